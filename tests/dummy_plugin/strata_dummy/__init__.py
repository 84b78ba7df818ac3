"""Plugins for the tests, one module each."""
