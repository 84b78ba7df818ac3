"""The one table of kernels: name, typed arguments, and what each computes.

A backend supplies a function (or a device kernel) for every name that a program uses. Argument
kinds: `in`, `out` and `inout` are activation buffers, `weight` a dense weight, `int`, `float`,
`bool` and `str` constants; a trailing `?` allows None. The input of the window itself (ids,
positions, slots, wanted rows), the keys and values, and the experts reach a kernel through the
executor, not through arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

_BUFFERS = {"in", "out", "inout"}
_SCALARS: dict[str, type | tuple[type, ...]] = {
    "int": int,
    "float": (int, float),
    "bool": bool,
    "str": str,
}


@frozen
class Kernel:
    """One entry: `args` maps argument names to kinds, `summary` says what is computed."""

    name: str
    args: Mapping[str, str]
    summary: str

    def check(self, args: Mapping[str, Any]) -> None:
        """Raise ValueError unless `args` has exactly the right names and kinds."""
        if args.keys() != self.args.keys():
            raise ValueError(f"kernel {self.name} takes {list(self.args)}, not {list(args)}")
        for name, kind in self.args.items():
            if not _is_kind(args[name], kind):
                raise ValueError(f"kernel {self.name}: {name} must be {kind}, is {args[name]!r}")


def _is_kind(value: object, kind: str) -> bool:
    if kind.endswith("?"):
        return value is None or _is_kind(value, kind[:-1])
    if kind in _BUFFERS:
        return type(value).__name__ == "Buffer"
    if kind == "weight":
        return type(value).__name__ == "Weight"
    return isinstance(value, _SCALARS[kind])


def _kernels(*entries: Kernel) -> dict[str, Kernel]:
    return {k.name: k for k in entries}


KERNELS: dict[str, Kernel] = _kernels(
    Kernel(
        "embed",
        {"table": "weight", "out": "out"},
        "row of the embedding table for each token id of the window",
    ),
    Kernel(
        "rms_norm",
        {"x": "in", "weight": "weight", "out": "out", "dim": "int", "eps": "float"},
        "x / sqrt(mean(x^2) + eps) * weight over each run of `dim` elements of a row",
    ),
    Kernel(
        "linear",
        {"x": "in", "weight": "weight", "bias": "weight?", "out": "out"},
        "x times the weight's rows, plus the bias",
    ),
    Kernel(
        "rope",
        {"x": "inout", "heads": "int", "head_dim": "int"},
        "rotate each head by its token's position; halves are paired (i, i + dim/2)",
    ),
    Kernel(
        "kv_append",
        {"k": "in", "v": "in", "layer": "int"},
        "store the window's keys and values at their positions, in the KV type",
    ),
    Kernel(
        "attention",
        {
            "q": "in",
            "out": "out",
            "layer": "int",
            "heads": "int",
            "kv_heads": "int",
            "head_dim": "int",
            "window": "int?",
        },
        "causal grouped-query attention over the sequence's stored positions, scale 1/sqrt(dim)",
    ),
    Kernel("add", {"x": "inout", "y": "in"}, "x + y"),
    Kernel("silu_mul", {"gate": "in", "up": "in", "out": "out"}, "gate * sigmoid(gate) * up"),
    Kernel(
        "route",
        {
            "logits": "in",
            "picks": "out",
            "weights": "out",
            "top_k": "int",
            "renormalise": "bool",
        },
        "softmax over the experts, the top_k largest (ties to the lowest index), their weights",
    ),
    Kernel(
        "experts",
        {"x": "in", "picks": "in", "out": "out", "layer": "int"},
        "each picked expert's unweighted row: down(silu(gate(x)) * up(x)), by router position",
    ),
    Kernel(
        "combine",
        {"x": "inout", "rows": "in", "weights": "in", "top_k": "int"},
        "x + sum of weight * row over the router positions, in router order",
    ),
    Kernel(
        "gate_add",
        {"x": "inout", "y": "in", "gate": "in"},
        "x + sigmoid(gate) * y, one gate value a token",
    ),
    Kernel(
        "gather",
        {"x": "in", "out": "out"},
        "the rows of x whose logits are wanted",
    ),
)
