"""What a source or an executor may offer besides its interface; core looks for it by `isinstance`.

These protocols belong to the interface that `interfaces.API` numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from attrs import frozen

from strata_core.interfaces import Expert, Source, StableSource

if TYPE_CHECKING:
    import numpy as np

    from strata_core.memory.platform.pages import PageHints


@runtime_checkable
class CountingSource(Source, Protocol):
    """A source that counts what it reads from files. Any thread may ask."""

    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """As `Executor.counters`, by lanes of its own: "file" is what was read from files."""


@runtime_checkable
class PartlyStableSource(Source, Protocol):
    """A source some of whose experts have addresses that hold from one round to the next.

    A backend may read those at any time in a round, in any thread, without acquiring them; it
    acquires the others.
    """

    @property
    def stable_version(self) -> int:
        """Another number whenever the addresses have changed, which they do between rounds only."""

    def stable_addresses(self, layer: int) -> np.ndarray:
        """uint64 [experts, 3]: addresses of gate, up and down of each expert of `layer`, or zeros.

        They hold until `stable_version` changes or the source is closed.
        """


@runtime_checkable
class PagedSource(StableSource, Protocol):
    """A source whose experts lie in a mapped file, perhaps not all of it in memory.

    `page_hints` is asked once, in the thread that binds the program.
    """

    @property
    def page_hints(self) -> PageHints | None:
        """How to tell the system which pages come next; None where that is of no use."""


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
    """An executor that counts what routers choose, for profiles. Any thread may ask."""

    def picks(self) -> Mapping[int, np.ndarray]:
        """How often each expert was chosen so far: int64 [experts] by layer; a copy."""


@runtime_checkable
class SplittingExecutor(Protocol):
    """An executor that splits what its device does not hold between lanes. Any thread may ask."""

    def lanes(self) -> Mapping[str, Any]:
        """The split for `--json`: what was asked for, the table, the rates that were measured."""


@runtime_checkable
class TimingExecutor(Protocol):
    """An executor that can tell where the time of a prompt's chunks goes.

    Any thread may call it while no request is under way.
    """

    def time_prompts(self, *, on: bool) -> None:
        """Keep the times of chunks from now on, or no longer.

        Raises UsageError where its device tells no times.
        """

    def prompt_times(self) -> Sequence[Mapping[str, Any]]:
        """Those of each chunk since that was turned on, for `--json`."""


@runtime_checkable
class AskingExecutor(Protocol):
    """An executor that asks its source for experts which have no address that holds.

    Any thread may ask it how often.
    """

    def asked(self) -> Mapping[str, int]:
        """How often, so far: experts, bytes, requests, answer_us; empty where it never asks.

        The lane that computes them counts the same experts.
        """
