"""Strata runs mixture-of-experts language models that do not fit the graphics card."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from strata_core.api import Model, load
    from strata_core.sampler import Sampling

__version__ = "0.1.0"
__all__ = ["Model", "Sampling", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import what loads numpy only when it is asked for, so that the command starts at once."""
    if name in ("Model", "load"):
        import strata_core.api

        return getattr(strata_core.api, name)
    if name == "Sampling":
        from strata_core.sampler import Sampling

        return Sampling
    raise AttributeError(f"module 'strata_core' has no attribute {name!r}")
