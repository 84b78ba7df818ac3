"""Strata runs mixture-of-experts language models that do not fit the graphics card."""

from __future__ import annotations

__version__ = "0.1.0"
