"""Start order and host memory for Strata under WSL 2; see `strata_wsl.plugin`."""

from __future__ import annotations

__version__ = "0.1.0"
