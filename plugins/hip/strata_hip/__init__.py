"""AMD graphics cards for Strata: records and probes; see `strata_hip.plugin`."""

from __future__ import annotations

__version__ = "0.1.0"
