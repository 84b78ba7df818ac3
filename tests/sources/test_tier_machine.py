"""Any order of calls: every view has the file's bytes, no cell is used twice, nothing is left."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from strata_core.abilities import AdaptiveSource, CountingSource, Move
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, Source, View
from strata_core.memory.address import bytes_at
from strata_core.sources.tiered_file import TieredFile

from .tier_bench import Claiming, Faults, everything, make, raw, seen, tiny

_FOLDER = tempfile.TemporaryDirectory()
CHECKPOINT = tiny(Path(_FOLDER.name), experts=5, layers=2)
EXPERTS = everything(CHECKPOINT)
RAW = {expert: raw(CHECKPOINT, expert) for expert in EXPERTS}
SIZE = CHECKPOINT.experts.layouts[0].nbytes
ROOM = -(-SIZE // 4096) * 4096 + 4096

experts = st.sampled_from(EXPERTS)


class TierMachine(RuleBasedStateMachine):
    """A device holds some experts; the source serves the others and is told of moves."""

    @initialize(
        kept=st.integers(0, len(EXPERTS)),
        spares=st.integers(0, 2),
        device=st.frozensets(experts, max_size=4),
        verify=st.booleans(),
        refuse=st.sampled_from([0, 0, 1, 2]),
    )
    def start(
        self, kept: int, spares: int, device: frozenset[Expert], verify: bool, refuse: int
    ) -> None:
        self.faults = Faults()

        def build(allocator: Claiming) -> TieredFile:
            return make(
                CHECKPOINT,
                kept,
                allocator=allocator,
                opener=self.faults.open,
                excluded=sorted(device),
                spares=spares,
                verify=verify,
            )

        if refuse:
            refusing = Claiming(refuse)
            found = attempt(lambda: build(refusing))
            if isinstance(found, StrataError):
                assert "this test refuses it" in found.why
            else:  # it needs no memory for a tier
                assert refusing.calls < refuse
                found.close()
            assert refusing.ledger.outstanding() == (), "a start that was refused keeps memory"
        self.allocator = Claiming()
        self.source = build(self.allocator)
        assert isinstance(self.source, Source)
        assert isinstance(self.source, AdaptiveSource)
        assert isinstance(self.source, CountingSource)
        self.verify = verify
        self.device = set(device)
        self.views: list[tuple[Expert, View]] = []
        self.moves: dict[Expert, Move] = {}

    @rule(kind=st.sampled_from([None, None, "short", "end", "eio"]))
    def go_wrong(self, kind: str | None) -> None:
        self.faults.kind = kind

    @rule(layer=st.integers(0, 1), chosen=st.sets(st.integers(0, 4)))
    def prefetch(self, layer: int, chosen: set[int]) -> None:
        self.source.begin_layer(layer, sorted(chosen))

    @precondition(lambda self: len(self.views) < 8)
    @rule(expert=experts)
    def acquire(self, expert: Expert) -> None:
        if expert in self.device or any(e.layer != expert.layer for e, _ in self.views):
            return
        view = attempt(lambda: self.source.view(expert))
        if isinstance(view, StrataError):
            assert str(expert) in view.what
            assert str(CHECKPOINT.path) in str(view)
            if self.faults.kind in ("end", "eio"):
                return
            # A read that began while reads failed is noticed later, once.
            view = self.source.view(expert)
        assert view.in_ram
        assert view.stable
        self.views.append((expert, view))

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        expert, _ = self.views.pop(data.draw(st.integers(0, len(self.views) - 1)))
        self.source.release(expert)

    @rule(expert=experts, at=st.sampled_from([0, 0, 1, 64]))
    def read(self, expert: Expert, at: int) -> None:
        memory = memoryview(bytearray(ROOM + 8192))
        base = -_address(memory) % 4096 + at
        buffer = memory[base : base + ROOM]
        pad = attempt(lambda: self.source.read_into(expert, buffer))
        if isinstance(pad, StrataError):
            assert self.faults.kind in ("end", "eio")
            assert str(expert) in pad.what
            return
        assert bytes(buffer[pad : pad + SIZE]) == b"".join(RAW[expert])

    @rule(expert=experts)
    def begin_move(self, expert: Expert) -> None:
        if expert in self.moves:
            return
        before = self.source.kept
        if expert in self.device:
            move = self.source.begin_demote(expert)
            if move is None:
                self.device.remove(expert)  # it leaves all the same, and has no copy
            elif move.parts is not None:
                parts = CHECKPOINT.experts.layouts[expert.layer].parts
                for address, part, data in zip(move.parts, parts, RAW[expert], strict=True):
                    assert not self._held(address, part.nbytes)
                    bytes_at(address, part.nbytes)[:] = memoryview(data)
        else:
            if any(e == expert for e, _ in self.views):
                return
            move = self.source.begin_promote(expert)
            assert (move is not None) == (expert in before)
            if move is None:
                self.device.add(expert)
        assert self.source.kept == before, "nothing is visible before the copy has landed"
        if move is not None:
            self.moves[expert] = move

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), good=st.booleans())
    def end_move(self, data: st.DataObject, good: bool) -> None:
        move = self.moves.pop(data.draw(st.sampled_from(sorted(self.moves))))
        before = self.source.kept
        if not good:
            self.source.abort(move)
            assert self.source.kept == before
            return
        self.source.commit(move)
        if move.kind == "promote":
            self.device.add(move.expert)
            assert self.source.kept == before - {move.expert}
        else:
            self.device.remove(move.expert)
            assert self.source.kept == before | {move.expert}

    def _held(self, address: int, nbytes: int) -> bool:
        return any(
            place < address + nbytes and address < place + part.nbytes
            for expert, view in self.views
            for place, part in zip(
                view.parts, CHECKPOINT.experts.layouts[expert.layer].parts, strict=True
            )
        )

    @invariant()
    def every_view_has_the_files_bytes(self) -> None:
        for expert, view in getattr(self, "views", ()):
            assert seen(CHECKPOINT, expert, view) == RAW[expert]

    @invariant()
    def no_two_experts_share_a_cell(self) -> None:
        at: dict[int, Expert] = {}
        for expert, view in getattr(self, "views", ()):
            assert at.setdefault(view.parts[0], expert) == expert

    def teardown(self) -> None:
        if not hasattr(self, "source"):
            return
        for expert, _ in self.views:
            self.source.release(expert)
        counts = self.source.counters()["file"]
        assert counts.get("differ", 0) == 0
        assert (counts.get("verified", 0) > 0) <= self.verify
        self.source.close()
        self.source.close()
        assert self.allocator.ledger.outstanding() == (), "memory was not given back"
        assert self.allocator.ledger.peak("ram") > 0
        with pytest.raises(StrataError, match="closed"):
            self.source.view(EXPERTS[0])


Answer = TypeVar("Answer")


def attempt(call: Callable[[], Answer]) -> Answer | StrataError:
    """What a call gives, or the error that it raises."""
    try:
        return call()
    except StrataError as error:
        return error


def _address(memory: memoryview) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


TestTierMachine = TierMachine.TestCase
TestTierMachine.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
