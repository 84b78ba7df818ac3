"""Plugins: what is installed, what of it is sound, and what it answers about this machine.

`load_plugins()` asks every entry point of the group `strata` once and returns a `Catalogue`;
`probe_catalogue` asks its records about a machine. Choosing among the offers is the work of
`strata_core.selection`, showing them that of `strata_core.plugin_report`. Nothing here is kept in
a global.
"""

from __future__ import annotations

from strata_core.plugins.catalogue import Blocked, Broken, Catalogue, Offer
from strata_core.plugins.loader import load_plugins
from strata_core.plugins.probing import PROBE_SECONDS, Probes, probe_catalogue

__all__ = [
    "PROBE_SECONDS",
    "Blocked",
    "Broken",
    "Catalogue",
    "Offer",
    "Probes",
    "load_plugins",
    "probe_catalogue",
]
