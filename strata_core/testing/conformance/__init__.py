"""Suites that a plugin's author runs on his own part, with public interfaces only."""
