"""What the tables of fused kernels are written in: runs of plain kernels, and what two share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import field, frozen

from strata_core.kernels.device.entry import DeviceKernel, Kind, Values

WIDEST_ROW = 8192
"""Floats of the longest row that a norm keeps in shared memory."""


@frozen(kw_only=True)
class Part:
    """A plain launch: its kernel, its parameters as the fused kernel calls them.

    `args` are those that are called otherwise here, or that must have a value.
    """

    kernel: str
    parameters: tuple[str, ...] = ()
    args: Mapping[str, str | int] = field(factory=dict)


@frozen(kw_only=True)
class Fused:
    """A fused kernel. `runs` are what it stands for, the longest first.

    Arguments and parameters that a run does not name are 0, or the first parameter's.
    """

    kernel: DeviceKernel
    runs: tuple[tuple[Part, ...], ...]
    fits: Callable[[Values, Sequence[str | int]], bool] = lambda _values, _parameters: True


NORM_PART = Part(kernel="rms_norm", args={"runs": 1, "weight": "gain"})
QUANTISE_PART = Part(kernel="quantise", args={"x": "out", "width": "dim"})
"""A norm of whole rows, and the records of what it gives."""


NORM_ARGS: dict[str, Kind] = {
    "out": "ptr",
    "gain": "ptr",
    "records": "ptr",
    "status": "ptr",
    "rows": "i32",
    "dim": "i32",
}
NORM_ENDS: dict[str, Kind] = {"eps": "f32", "op": "i32"}
"""Arguments of kernels that end with such a norm; a kernel's own come before and between."""


def _normed(of: str, heads: str) -> Part:
    args = {"x": of, "out": of, "weight": f"{of}_gain", "rows": "tokens", "dim": "head_dim"}
    return Part(kernel="rms_norm", args={**args, "runs": heads})


def _turned(of: str, heads: str) -> Part:
    return Part(kernel="rope", args={"x": of, "heads": heads})


_APPEND = Part(kernel="kv_append", parameters=("kv",))
_TURNS = (_turned("q", "heads"), _turned("k", "kv_heads"), _APPEND)

HEADS_ARGS: dict[str, Kind] = {
    "q": "ptr",
    "k": "ptr",
    "v": "ptr",
    "q_gain": "ptr",
    "k_gain": "ptr",
    "cos": "ptr",
    "sin": "ptr",
    "positions": "ptr",
    "places": "ptr",
    "status": "ptr",
    "layer_offset": "i64",
    "tokens": "i32",
    "heads": "i32",
    "kv_heads": "i32",
    "head_dim": "i32",
    "half": "i32",
    "width": "i32",
    "eps": "f32",
    "op": "i32",
}

HEADS_RUNS = ((_normed("q", "heads"), _normed("k", "kv_heads"), *_TURNS), _TURNS)
"""What is done to the heads of q, k and v before attention, with norms and without."""
