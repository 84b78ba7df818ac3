"""What the built-in backends can do; plain data, so that listing them needs no numpy."""

from __future__ import annotations

from strata_core.interfaces import Capabilities


def _as_float32(_type: str, elements: int) -> int:
    return 4 * elements


REFERENCE = Capabilities(kv_types=("fp32", "fp16"), exact=False, dense_bytes=_as_float32)
