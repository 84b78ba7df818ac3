"""What a program is lowered to: segments of launches and copies, for one mode and its places."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import define, field, frozen

from strata_core.kernels.cpu.workspace import Dense
from strata_core.kernels.device.exchange import LINE, Exchange, word
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.program import Weight
from strata_core.runtime import PLAIN_ROOM, Launch


@frozen
class Copy:
    """A copy of a graph."""

    target: int
    source: int
    nbytes: int


@frozen
class Fill:
    """A fill of a graph."""

    target: int
    value: int
    nbytes: int


Item = Launch | Copy | Fill


@define
class Segment:
    """What runs in one graph; `layer` is the routed layer whose mail it sends (None: the last)."""

    items: list[Item] = field(factory=list)
    layer: int | None = None


@frozen(order=True)
class Mode:
    """Sizes that a graph is captured for: tokens, rows of logits, splits of attention."""

    tokens: int
    wanted: int
    splits: int


@frozen(eq=False)
class Places:
    """Where a device finds what launches name: its workspace, the exchange, the dense weights.

    `exchange_alias` is the exchange's address as the device sees it, `room` the bytes of shared
    memory that a block may have there, `matrix` whether it has matrix units for prompts.
    """

    regions: Regions
    exchange: Exchange
    exchange_alias: int
    weights: Mapping[Weight, Dense]
    room: int = PLAIN_ROOM
    matrix: bool = False

    def seen(self, region: str, offset: int = 0) -> int:
        """A part of the exchange, by the device's address."""
        host = self.exchange.rest.at(region) + offset
        return self.exchange_alias + host - self.exchange.address

    def seen_word(self, layer: int, helper: int = 0) -> int:
        """An announcing word, by the device's address."""
        return self.seen("words", word(self.exchange.shape, layer, helper))

    def seen_answer(self, layer: int) -> int:
        """The answer of the host to a routed layer, by the device's address."""
        return self.seen("answers", LINE * layer)
