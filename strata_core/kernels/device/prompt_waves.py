"""Which experts of a layer a chunk computes together, and which buffers they are brought into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.interfaces import BlobLayout, Expert
from strata_core.plan.lending import WAVE

COVERED = 4
"""From so many entries for each expert of a layer on, a chunk is taken to ask for all of them."""


def asks_for_all(tokens: int, top_k: int, experts: int) -> bool:
    """Whether a chunk is so long that a layer's experts are brought before its picks are known.

    With so many entries for each expert all but e^-4 of them, a fiftieth, are picked by routers
    that choose evenly: leaving those out saves less than waiting for the picks costs.
    """
    return tokens * top_k >= COVERED * experts


@frozen
class Wave:
    """Experts that one launch computes: `begin` is their first line in the layer's table.

    `part` is the part of the ring that they are brought into; None where they have slots.
    `moves` are (index, address) of each that is brought.
    """

    begin: int
    count: int
    part: int | None
    moves: tuple[tuple[int, int], ...] = ()


@frozen(eq=False)
class Ring:
    """Buffers of experts on their way, in parts of a wave each that take turns.

    With n parts, what is copied is up to n - 1 waves ahead of what is computed.
    """

    parts: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, buffers: Sequence[int], wave: int = WAVE) -> Ring:
        """Cut buffers into parts for waves of at most `wave` experts: two at least, where it can.

        There are never more than `most_parts` of them.
        """
        if not buffers:
            return cls(())
        size = max(1, min(wave, len(buffers) // 2))
        count = len(buffers) // size
        return cls(tuple(tuple(buffers[n * size : (n + 1) * size]) for n in range(count)))


def most_parts(buffers: int, wave: int = WAVE) -> int:
    """The most parts that a ring of so many buffers, or fewer, is cut into."""
    return max(3, buffers // wave)


def plan_waves(
    layer: int,
    layout: BlobLayout,
    needed: Sequence[int],
    slots: Mapping[Expert, int],
    ring: Ring,
    turn: int,
    table: NDArray[Any],
) -> tuple[list[Wave], int]:
    """The waves of a layer, those in slots first, and whose turn it is afterwards.

    Fills `table`, WAVE [experts], with a line for each of `needed`.
    """
    resident = [i for i in needed if Expert(layer, i) in slots]
    others = [i for i in needed if Expert(layer, i) not in slots]
    waves: list[Wave] = []
    if resident:
        places = [slots[Expert(layer, i)] for i in resident]
        _fill(table[: len(resident)], layout, resident, places)
        waves.append(Wave(0, len(resident), None))
    at = len(resident)
    while others:
        buffers = ring.parts[turn]
        here, others = others[: len(buffers)], others[len(buffers) :]
        _fill(table[at : at + len(here)], layout, here, buffers[: len(here)])
        waves.append(Wave(at, len(here), turn, tuple(zip(here, buffers, strict=False))))
        at += len(here)
        turn = (turn + 1) % len(ring.parts)
    return waves, turn


def _fill(
    lines: NDArray[Any], layout: BlobLayout, experts: Sequence[int], places: Sequence[int]
) -> None:
    address = np.array(places, np.uint64)
    for part in layout.parts:
        lines[part.name] = address + np.uint64(part.offset)
    lines["expert"] = experts
