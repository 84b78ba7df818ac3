"""What a source or an executor may offer besides its interface; core looks for it by `isinstance`.

These protocols belong to the interface that `interfaces.API` numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from attrs import frozen

from strata_core.interfaces import Expert, Source

if TYPE_CHECKING:
    import numpy as np


@runtime_checkable
class CountingSource(Source, Protocol):
    """A source that counts what it reads from files. Any thread may ask."""

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """As `Executor.counters`, by lanes of its own: "file" is what was read from files."""


@frozen(eq=False)
class Move:
    """An expert on its way out of a device's memory (demote) or into it (promote).

    `parts` are the host addresses that a demoted expert's gate, up and down are to be copied to;
    None where nothing has to be copied. `dma`: a copy engine may write there.
    """

    expert: Expert
    kind: Literal["demote", "promote"]
    parts: tuple[int, int, int] | None
    dma: bool = False


@runtime_checkable
class AdaptiveSource(Source, Protocol):
    """A source that stays in step with experts entering and leaving a device's memory.

    Two phases: what `begin_...` gives changes nothing that a view or a read can see until `commit`,
    and nothing at all after `abort`. Each move is ended once, by one of the two; the engine's
    thread calls all four. While a move is open no other one of the same expert may begin. Where the
    source is a `StableSource` too, addresses of an expert hold until a move of it is committed.
    """

    def begin_demote(self, expert: Expert) -> Move | None:
        """Room for the host copy of an expert that leaves; None: it will be read from its file."""

    def begin_promote(self, expert: Expert) -> Move | None:
        """An expert enters, its host copy's room is to be given back; None: it has no copy."""

    def commit(self, move: Move) -> None:
        """The copy has landed. Raises StrataError where it is found wrong; the move is aborted."""

    def abort(self, move: Move) -> None:
        """It has not, and nothing of it will land any more."""


@runtime_checkable
class CountingExecutor(Protocol):
    """An executor that counts what routers choose, for profiles."""

    def picks(self) -> Mapping[int, np.ndarray]:
        """How often each expert was chosen so far: int64 [experts] by layer; a copy."""
