"""Slots that prompts borrow from a cache, from a prompt's first chunk to the next round.

What is in a lent slot has to be had from elsewhere meanwhile. A source that is in step with the
cache keeps it in memory where it has room: the expert leaves the device, and enters it again when
the prompt is over, by the two phases of any other move. Else it is read from its file.
"""

from __future__ import annotations

from collections.abc import Callable

from attrs import define, evolve, field

from strata_core.abilities import AdaptiveSource, Move
from strata_core.cache.lend import Loan, lend
from strata_core.cache.slots import SlotPool
from strata_core.cache.waiting import Patience
from strata_core.errors import EngineError, StrataError
from strata_core.interfaces import Expert
from strata_core.kernels.device.lost import Lost
from strata_core.kernels.device.prompt_bring import Bringing
from strata_core.kernels.device.prompt_waves import Ring
from strata_core.plan.lending import WAVE


@define(eq=False)
class Borrowed:
    """What one device's cache lends; used by one thread, while nobody else may change its slots.

    Buffers are of `largest` bytes, at most `most` of them; `own` are those where `pool` has none to
    lend; `everyone` counts all experts. `lost` are experts that could not come back.

    `ring` are the buffers, `slots` the experts that keep theirs; both stay until `give_back`.
    """

    bringing: Bringing
    pool: SlotPool | None
    largest: int
    most: int
    own: tuple[int, ...]
    everyone: int
    lost: Lost
    patience: Patience
    new_event: Callable[[], int]
    wave: int = WAVE
    ring: Ring = field(factory=lambda: Ring(()), init=False)
    slots: dict[Expert, int] = field(factory=dict, init=False)
    counts: dict[str, int] = field(factory=lambda: dict.fromkeys(("experts", "bytes"), 0))
    _loan: Loan | None = field(default=None, init=False)
    _kept: list[Expert] = field(factory=list, init=False)
    _lent: bool = field(default=False, init=False)
    _refilling: bool = field(default=False, init=False)
    _landed: int = field(init=False)

    def __attrs_post_init__(self) -> None:
        self._landed = self.new_event()

    @property
    def lent(self) -> bool:
        """Whether slots are without their experts, which nobody has begun to bring back."""
        return self._lent

    def borrow(self, *, many: bool) -> bool:
        """Have slots for a chunk; whether they are others than before. Raises StrataError.

        `many`: as many as copies run ahead through; two waves do for a chunk that waits for its
        picks in every layer, and leave more experts in their slots.
        """
        self._refilling = False  # copies back come before those of this chunk, in their stream
        fresh = self._loan is None
        if self._loan is None:
            self._take(self.most if many else min(self.most, 2 * self.wave))
        assert self._loan is not None, "it was taken"
        self._lent = bool(self._loan.experts)
        return fresh

    def _take(self, most: int) -> None:
        places = dict(self.pool.places) if self.pool is not None else {}
        loan = Loan()
        if len(places) < self.everyone:
            loan = lend(self.pool, self.largest, most, self.lost.vacated)
        buffers = loan.buffers or self.own
        if not buffers and len(places) < self.everyone:
            raise EngineError(
                "there are no buffers for the experts of a prompt",
                f"none of {len(places)} slots is as large as the largest expert",
                "give another number of experts with --expert-cache",
            )
        self._keep(loan.experts)
        for expert in loan.experts:
            del places[expert]
        self.ring, self.slots = Ring.of(buffers, self.wave), places
        self._loan = loan

    def refill(self) -> None:
        """Copy what is in no slot back, behind everything that used the buffers.

        One that the source has an error with loses its slot. Raises only what is the device's.
        """
        assert self.pool is not None, "only a pool lends"
        assert self._loan is not None, "what was lent is known"
        stager = self.bringing.stager
        before = stager.experts, stager.nbytes
        places = self.pool.places
        lent = {expert: places[expert] for expert in self._loan.experts if expert in places}

        def gone(expert: Expert, error: Exception) -> None:
            self.lost.add(expert, places.pop(expert), error)

        self.bringing.send_back(lent, self._landed, gone)
        back = tuple(e for e in self._loan.experts if e in places)
        self._loan = evolve(self._loan, experts=back)
        self._lent, self._refilling = False, True
        self.counts["experts"] += stager.experts - before[0]
        self.counts["bytes"] += stager.nbytes - before[1]

    def give_back(self) -> None:
        """Have every lent slot hold its expert again, in the order of the stream, or be `lost`."""
        if self._lent:
            self.refill()
        bringing = self.bringing
        if self._refilling:
            if self._kept:  # their memory is given back, so nothing may be copied from it
                self.patience.wait(self._landed, "the experts of lent slots")
            bringing.runtime.wait(bringing.stream, self._landed)
            self._refilling = False
        self._forget()
        self._loan = None

    # copies in memory

    def _keep(self, experts: tuple[Expert, ...]) -> None:
        """Have the source keep what is lent in memory, as far as it has room. Raises StrataError.

        Nothing is lent yet: where this fails, every expert is in its slot still.
        """
        source, bringing = self.bringing.stager.source, self.bringing
        if not isinstance(source, AdaptiveSource) or self.pool is None:
            return
        self._forget()
        moves: list[Move] = []
        try:
            for expert in experts:
                move = source.begin_demote(expert)
                if move is None:
                    continue
                moves.append(move)
                if move.parts is not None:
                    self._send_out(self.pool.places[expert], move, move.parts)
            if moves:
                bringing.runtime.record(self._landed, bringing.stager.stream)
                self.patience.wait(self._landed, "copies of lent slots")
            while moves:
                move = moves.pop()
                source.commit(move)
                self._kept.append(move.expert)
        except BaseException:
            if self._idle():  # else what is on its way may land yet, and its memory stays taken
                for move in moves:
                    source.abort(move)
            self._forget()
            raise

    def _send_out(self, slot: int, move: Move, targets: tuple[int, int, int]) -> None:
        """Copy a slot's expert to its place in memory, by the copy engine where it reaches all."""
        bringing, layout = self.bringing, self.bringing.layouts[move.expert.layer]
        if not move.dma:
            bringing.stager.fetch(slot, layout, targets)
            return
        for part, target in zip(layout.parts, targets, strict=True):
            stream = bringing.stager.stream
            bringing.runtime.copy(target, slot + part.offset, part.nbytes, stream)

    def _idle(self) -> bool:
        """Whether nothing is being copied any more, after a failure."""
        bringing = self.bringing
        bringing.runtime.take_error()
        try:
            bringing.runtime.record(self._landed, bringing.stager.stream)
            self.patience.wait(self._landed, "copies of lent slots")
        except StrataError:
            bringing.runtime.take_error()
            return False
        return True

    def _forget(self) -> None:
        """Give back the memory of what is in its slot again."""
        source = self.bringing.stager.source
        while self._kept:
            expert = self._kept.pop()
            if self.pool is None or expert not in self.pool.places:
                continue
            assert isinstance(source, AdaptiveSource), "it kept them"
            move = source.begin_promote(expert)
            if move is not None:
                source.commit(move)
