"""A model as data: the list of kernels that one window runs through, written once per family.

A family file emits a `Program` through a `ProgramBuilder`; a backend binds it once (the reference
interprets it, a compiled backend turns it into an argument block, a device captures it in a graph)
and runs it for every window. Nothing here knows how a kernel computes; `table.py` says which
kernels there are and which arguments each takes, and the builder refuses anything else.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from attrs import field, frozen

from strata_core.checkpoint.hyper import Rope
from strata_core.kernels.table import KERNELS

Rows = Literal["token", "pick", "logits"]
"""Rows of a buffer: one a token, one a (token, router position), one a wanted logits row."""


@frozen
class Buffer:
    """An activation buffer: `rows` says what a row stands for, `width` the elements of a row."""

    name: str
    rows: Rows
    width: int
    dtype: Literal["float32", "int32"] = "float32"


@frozen
class Weight:
    """A dense weight, named by role and layer (None: outside the layers)."""

    role: str
    layer: int | None = None


Argument = Buffer | Weight | int | float | str | bool | None


@frozen
class Op:
    """One kernel with its arguments, by the names that the kernel table gives them."""

    kernel: str
    args: Mapping[str, Argument]


@frozen(kw_only=True)
class Program:
    """Everything one window computes, in order; `top_k` is the number of picks of a token.

    `kv_layers` layers keep keys and values of `kv_width` elements each per position.
    """

    ops: tuple[Op, ...]
    buffers: tuple[Buffer, ...]
    logits: Buffer
    vocabulary: int
    top_k: int
    rope: Rope
    kv_layers: int
    kv_width: int

    def weights(self) -> tuple[Weight, ...]:
        """Every dense weight the program reads, each once, in order of first use."""
        seen: dict[Weight, None] = {}
        for op in self.ops:
            for value in op.args.values():
                if isinstance(value, Weight):
                    seen.setdefault(value)
        return tuple(seen)


@frozen
class ProgramBuilder:
    """Collects ops and buffers; a mistake in a family file is an error here, not while running."""

    _ops: list[Op] = field(factory=list)
    _buffers: dict[str, Buffer] = field(factory=dict)

    def buffer(
        self,
        name: str,
        rows: Rows,
        width: int,
        dtype: Literal["float32", "int32"] = "float32",
    ) -> Buffer:
        """The buffer of that name, made at its first mention and shared by later ones."""
        wanted = Buffer(name, rows, width, dtype)
        have = self._buffers.setdefault(name, wanted)
        if have != wanted:
            raise ValueError(f"buffer {name} is {have}, now asked for as {wanted}")
        return have

    def emit(self, kernel: str, **args: Argument) -> None:
        """Append one kernel call; its arguments are checked against the kernel table."""
        KERNELS[kernel].check(args)
        self._ops.append(Op(kernel, args))

    def finish(
        self,
        *,
        logits: Buffer,
        vocabulary: int,
        top_k: int,
        rope: Rope,
        kv_layers: int,
        kv_width: int,
    ) -> Program:
        """The program made of all that was emitted."""
        return Program(
            ops=tuple(self._ops),
            buffers=tuple(self._buffers.values()),
            logits=logits,
            vocabulary=vocabulary,
            top_k=top_k,
            rope=rope,
            kv_layers=kv_layers,
            kv_width=kv_width,
        )
