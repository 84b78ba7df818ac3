"""Programs that Strata can be compared with, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from attrs import frozen

from strata_core.cli.compare.figures import Asked, Figures
from strata_core.cli.compare.reading import read_llama_bench


@frozen
class Placed:
    """How much of a model Strata holds on its devices, for a peer to be given as much.

    `layers` is the number of layers with experts; `experts` is the share of all experts that lie
    on devices, from 0 to 1; without a device there is none at all.
    """

    layers: int
    experts: float
    device: bool

    @property
    def layers_on_device(self) -> int:
        """Layers whose experts a peer that places whole layers holds on its device."""
        return round(self.layers * self.experts) if self.device else 0


@frozen
class Peer:
    """A program to compare with: the command that measures, and the reader of what it prints."""

    name: str
    flags: Callable[[Asked, Placed], list[str]]
    read: Callable[[str, Asked], Figures]

    def command(self, program: str, model: str, asked: Asked, placed: Placed) -> list[str]:
        """The command that makes it measure what is asked, with as much on its device."""
        return [program, "-m", model, *asked.flags, *self.flags(asked, placed)]


def _llama_bench(asked: Asked, placed: Placed) -> list[str]:
    """Where Strata has a device, all layers go there but the experts of some; else none is used."""
    where = ["-ngl", "0", "-dev", "none"]
    if placed.device:
        where = ["-ngl", "99", "-ncmoe", str(placed.layers - placed.layers_on_device)]
    return ["-t", str(asked.threads), "-o", "json", *where]


PEERS: Mapping[str, Peer] = MappingProxyType(
    {"llama-bench": Peer("llama-bench", _llama_bench, read_llama_bench)}
)
"""Every peer that is known, by the name that `--compare` takes."""
