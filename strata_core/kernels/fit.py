"""What the compiled kernels can compute of a model, on the CPU and on devices alike."""

from __future__ import annotations

from collections.abc import Callable

from strata_core.errors import CheckpointError, UsageError
from strata_core.interfaces import BlobLayout
from strata_core.kernels.cpu.attention import MOST_GROUP
from strata_core.kernels.cpu.elementwise import MOST_EXPERTS
from strata_core.kernels.cpu.unpack import UNPACK

Refuse = Callable[[str, str], CheckpointError]
"""Makes the error of a model that cannot be computed, from what about it and why."""


def check_heads(group: int, dim: int, kv_type: str, refuse: Refuse) -> None:
    """`group` heads share a KV head of `dim` elements. Raises CheckpointError, UsageError."""
    if group > MOST_GROUP or dim % 8:
        raise refuse(
            f"{group} heads share a KV head and a head has {dim} elements",
            f"at most {MOST_GROUP} heads and a multiple of 8 elements are possible",
        )
    if kv_type == "int8" and dim % 32:
        raise UsageError(
            "--kv int8 cannot be used with this model",
            f"its heads have {dim} elements, which is not a multiple of 32",
            "choose --kv fp16",
        )


def check_router(experts: int, refuse: Refuse) -> None:
    """A layer routes among so many experts. Raises CheckpointError."""
    if experts > MOST_EXPERTS:
        raise refuse(f"a layer has {experts} experts", f"at most {MOST_EXPERTS} are possible")


def check_experts(layer: int, layout: BlobLayout, refuse: Refuse) -> None:
    """Gate and up read the same input, so both take records or both floats.

    Raises CheckpointError.
    """
    gate, up, _ = layout.parts
    if (gate.type in UNPACK) != (up.type in UNPACK):
        raise refuse(
            f"experts of layer {layer} have gate in {gate.type} and up in {up.type}",
            "both must be quantised, or both floats",
        )
