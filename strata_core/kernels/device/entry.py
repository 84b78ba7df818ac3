"""What an entry of a table of device kernels is: typed arguments, and the rule for its grid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

from attrs import frozen

Kind = Literal["ptr", "i32", "i64", "f32"]

_FORMAT: dict[Kind, str] = {"ptr": "Q", "i32": "i", "i64": "q", "f32": "f"}
_SIZE: dict[Kind, int] = {"ptr": 8, "i32": 4, "i64": 8, "f32": 4}

Values = Mapping[str, int | float]


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


def rows(per: int, threads: int) -> Callable[[Values], Geometry]:
    """Blocks of `per` weight rows."""

    def rule(a: Values) -> Geometry:
        return Geometry((-(-int(a["rows"]) // per), 1, 1), (threads, 1, 1))

    return rule


def table(*entries: DeviceKernel) -> dict[str, DeviceKernel]:
    """Entries by name."""
    return {k.name: k for k in entries}
