"""What the tables of device kernels are written in: entries, argument kinds, grid rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from attrs import frozen

Kind = Literal["ptr", "i32", "i64", "f32"]

_FORMAT: dict[Kind, str] = {"ptr": "Q", "i32": "i", "i64": "q", "f32": "f"}
_SIZE: dict[Kind, int] = {"ptr": 8, "i32": 4, "i64": 8, "f32": 4}

Values = Mapping[str, int | float]

WAIT_ARGS: dict[str, Kind] = {
    "answer": "ptr",
    "round": "ptr",
    "late": "ptr",
    "bound": "i64",
    "layer": "i32",
}
"""Arguments of a kernel that may wait for the host: the host's word (0: it does not wait), which is
to become the number at `round`; where the first wait of a round that took more than `bound` ticks
of the device's clock latches its `layer`, by its place among the routed ones."""


@frozen
class Geometry:
    """Blocks of a grid, threads of a block, bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int = 0


@frozen(kw_only=True)
class DeviceKernel:
    """One entry of the table. `parameters` name what the kernel is compiled for."""

    name: str
    parameters: tuple[str, ...] = ()
    args: Mapping[str, Kind]
    geometry: Callable[[Values], Geometry]
    summary: str

    @property
    def format(self) -> str:
        """The argument block as a `struct` format."""
        parts, at = ["<"], 0
        for kind in self.args.values():
            size = _SIZE[kind]
            parts.append("x" * (-at % size) + _FORMAT[kind])
            at += -at % size + size
        return "".join(parts)


def over(width: str, per: int, rows: str, threads: int = 256) -> Callable[[Values], Geometry]:
    """Blocks of `per` elements along a row, one line of blocks for each row."""

    def rule(a: Values) -> Geometry:
        return Geometry((-(-int(a[width]) // per), int(a[rows]), 1), (threads, 1, 1))

    return rule


def each(*counts: str, threads: int) -> Callable[[Values], Geometry]:
    """One block for each combination of up to three counts, the first varying fastest."""

    def rule(a: Values) -> Geometry:
        x, y, z = ([int(a[name]) for name in counts] + [1, 1])[:3]
        return Geometry((x, y, z), (threads, 1, 1))

    return rule


def one(threads: int) -> Callable[[Values], Geometry]:
    """One block."""

    def rule(_: Values) -> Geometry:
        return Geometry((1, 1, 1), (threads, 1, 1))

    return rule


WARPS = 4
"""Groups of 32 threads in a block of products."""

ROOM = 10 << 10
"""Bytes of shared memory in which one of them keeps its rows."""


def slot_bytes(stride: int, count: int) -> int:
    """Bytes of shared memory for `count` rows, which keep their place within lines of 128 bytes."""
    return -(-(count * stride + 127) // 128) * 128


def staged_rows(stride: int) -> int:
    """Rows that a warp stages: 8, 4, 2 or 1; 0 where not even one fits. The sources' `batch_of`."""
    return next((n for n in (8, 4, 2, 1) if slot_bytes(stride, n) <= ROOM), 0)


def rows_of_block(stride: int) -> int:
    """Weight rows of one block of products."""
    return WARPS * (staged_rows(stride) or 4)


def staged(matrices: Mapping[str, str], other: str = "") -> Callable[[Values], Geometry]:
    """Blocks of rows of some matrices in turn: `matrices` are arguments, stride by number of rows.

    `other` counts a second dimension of the grid.
    """

    def rule(a: Values) -> Geometry:
        shapes = [(int(a[rows]), int(a[stride])) for rows, stride in matrices.items()]
        blocks = sum(-(-rows // rows_of_block(stride)) for rows, stride in shapes)
        most = max(slot_bytes(stride, staged_rows(stride)) for _, stride in shapes)
        shared = WARPS * most if all(staged_rows(stride) for _, stride in shapes) else WARPS * ROOM
        return Geometry((blocks, int(a[other]) if other else 1, 1), (32 * WARPS, 1, 1), shared)

    return rule


MOST_EMBEDDED = 32 << 10
"""Bytes of a row of embeddings that a block brings into shared memory. The sources' own."""


def embedded(a: Values) -> Geometry:
    """A block for each token, with room for its row of the table."""
    stride = int(a["stride"])
    shared = slot_bytes(stride, 1) if stride <= MOST_EMBEDDED else 0
    return Geometry((int(a["tokens"]), 1, 1), (256, 1, 1), shared)
