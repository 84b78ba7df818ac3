"""What a start asks of a backend that places a model step by step; core's device backend is one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol, runtime_checkable

from strata_core.interfaces import (
    Executor,
    Expert,
    ExpertFiles,
    Limits,
    Progress,
    Region,
    Source,
    Weights,
)
from strata_core.kernels.program import Program
from strata_core.memory.ledger import Ledger
from strata_core.runtime import Runtime


class DevicesInUse(Protocol):
    """Which devices of the runtime are used."""

    @property
    def wanted_devices(self) -> tuple[int, ...]:
        """Indices: the device that computes, then the helpers that are to hold experts."""


class Staged(Protocol):
    """A model on its way onto devices. A step that is done already does nothing again."""

    @property
    def resident(self) -> frozenset[Expert]:
        """Experts that have a slot on some device by now."""

    def take_small_pins(self) -> None:
        """Take what host and devices exchange, and the buffers for filling."""

    def test_lanes(self, devices: Sequence[int] | None = None) -> None:
        """Have devices (None: all) compute rows whose bits are known, and tell of other bits."""

    def place_dense(self) -> None:
        """Place the dense weights and the buffers of the first device."""

    def place_embedding(self, where: Literal["device", "pinned"]) -> None:
        """Place the token embedding; on the device where the wish is refused."""

    def make_cache(self) -> None:
        """Take the first device's slots."""

    def make_helpers(self, devices: Sequence[int] | None = None) -> None:
        """Take slots and buffers of the helpers on these devices (None: on all)."""

    def fill_cache(self, source: Source) -> None:
        """Fill the first device's slots."""

    def fill_helpers(self, source: Source) -> None:
        """Fill the helpers' slots."""

    def close(self) -> None:
        """Give everything back, copies under way first; again, it does nothing."""


@runtime_checkable
class StagedBackend(Protocol):
    """A backend over a runtime. What `prepare` began, the next `bind` completes."""

    runtime: Runtime
    ledger: Ledger

    @property
    def options(self) -> DevicesInUse:
        """Which devices it uses."""

    def prepare(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        limits: Limits,
        progress: Progress,
        ranking: Sequence[Expert] | None = None,
        rates: Sequence[float] = (),
    ) -> Staged:
        """A model's placement, nothing of it done yet.

        `rates` is how often a token asks for each expert of `ranking`, where that is known.
        """

    def bind(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        progress: Progress,
    ) -> Executor:
        """Do what is left."""


@runtime_checkable
class FindsLimit(Protocol):
    """An allocator that finds out what may be pinned once contexts are open."""

    def contexts_ready(self, devices: Sequence[int]) -> None:
        """These devices' contexts are open, nothing is pinned yet. Raises StrataError."""


@runtime_checkable
class KnowsRegions(Protocol):
    """An allocator that can say what it has given."""

    def regions(self) -> tuple[Region, ...]:
        """What is held now, each region once all of its spans are settled."""
