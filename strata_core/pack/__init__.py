"""Packs: a model written once in the form that sources read best, and its bytes checked."""
