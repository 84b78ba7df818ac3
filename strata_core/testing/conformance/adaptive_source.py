"""The part of the suite for sources that stay in step with experts on devices."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from strata_core.abilities import AdaptiveSource, Move
from strata_core.checkpoint.open import Checkpoint
from strata_core.interfaces import Expert, View
from strata_core.memory.address import bytes_at
from strata_core.testing.conformance.comparing import same_bytes

if TYPE_CHECKING:
    from strata_core.testing.conformance.source import Case

PAGE = 4096


class AdaptiveSourceTests:
    """Two-phase moves: of a source that has `begin_demote` and the other three; else skipped.

    A third of the experts is on a device when the source is built.
    """

    # what SourceSuite has

    def raw(self, checkpoint: Checkpoint, expert: Expert) -> bytes:
        """An expert's blob, read past the source."""
        raise NotImplementedError

    def compare(self, case: Case, expert: Expert, view: View, when: str) -> None:
        """The bytes behind a view against the file's."""
        raise NotImplementedError

    def build(
        self,
        model: Checkpoint,
        *,
        refuse: int | None = None,
        pinned: bool = True,
        excluded: frozenset[Expert] = frozenset(),
    ) -> Case:
        """A built source; devices hold the experts that are `excluded`."""
        raise NotImplementedError

    # the tests

    @pytest.fixture
    def moving(self, model: Checkpoint) -> Any:
        """A built source and the experts that a device holds."""
        held = on_device(model)
        case = self.build(model, excluded=frozenset(held))
        if not isinstance(case.source, AdaptiveSource):
            case.source.close()
            case.allocator.close()
            pytest.skip("the source has no `begin_demote`: it does not follow devices")
        yield case, held
        case.source.close()
        case.allocator.close()

    def test_nothing_of_a_move_is_seen_before_its_commit(self, moving: Any) -> None:
        """Reads have the file's bytes while a copy is on its way, and after it has landed."""
        case, held = moving
        for leaving, entering in zip(held, outside(case, held), strict=False):
            promote = case.source.begin_promote(entering)
            demote = case.source.begin_demote(leaving)
            spoil(case, demote)
            for expert in (leaving, entering):
                check(self, case, expert, "before its move is committed")
            land(self, case, demote)
            if demote is not None:
                case.source.commit(demote)
            check(self, case, leaving, "after it has left its device")
            if promote is not None:
                case.source.commit(promote)
            check(self, case, entering, "after it has entered a device")

    def test_an_aborted_move_changes_nothing(self, moving: Any) -> None:
        """Whatever was written for it; its room serves the next move."""
        case, held = moving
        leaving, entering = held[0], outside(case, held)[0]
        found: list[bool] = []
        for _ in range(20):
            moves = [case.source.begin_promote(entering), case.source.begin_demote(leaving)]
            there = [move is not None for move in moves]
            found = found or there
            assert there == found, "an aborted move keeps its room"
            spoil(case, moves[1])
            for move in moves:
                if move is not None:
                    case.source.abort(move)
            for expert in (leaving, entering):
                check(self, case, expert, "after its move was aborted")

    def test_what_enters_makes_room_for_what_leaves(self, moving: Any) -> None:
        """Once it is committed; over and over."""
        case, held = moving
        inside, others = list(held), outside(case, held)
        for number in range(30):
            entering, leaving = others.pop(0), inside.pop(0)
            promote = case.source.begin_promote(entering)
            if promote is not None:
                case.source.commit(promote)
            demote = case.source.begin_demote(leaving)
            assert promote is None or demote is not None, (
                f"{entering} gave its room back, and {leaving} found none in round {number}"
            )
            land(self, case, demote)
            if demote is not None:
                case.source.commit(demote)
            check(self, case, leaving, "after it has left its device")
            inside.append(entering)
            others.append(leaving)

    def test_open_moves_leak_nothing(self, moving: Any) -> None:
        """A source that is closed while moves are open gives everything back."""
        case, held = moving
        for leaving, entering in zip(held, outside(case, held), strict=False):
            case.source.begin_promote(entering)
            case.source.begin_demote(leaving)
        case.source.close()
        left = [r.purpose for r in case.allocator.outstanding.values()]
        assert not left, f"a source that is closed with open moves keeps {left}"

    def test_moves_in_any_order_are_right(self, model: Checkpoint) -> None:
        """A state machine over moves, views and copies."""
        case = self.build(model, excluded=frozenset(on_device(model)))
        adaptive = isinstance(case.source, AdaptiveSource)
        case.source.close()
        case.allocator.close()
        if not adaptive:
            pytest.skip("the source has no `begin_demote`: it does not follow devices")
        machine: Any = partial(MovesMachine, self, model)
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=20,
                stateful_step_count=25,
                deadline=None,
                database=None,
                suppress_health_check=list(HealthCheck),
            ),
        )


def on_device(model: Checkpoint) -> list[Expert]:
    """Every third expert."""
    files = model.experts
    return [Expert(layer, i) for layer in files.layouts for i in range(0, files.count, 3)]


def outside(case: Case, held: list[Expert]) -> list[Expert]:
    """The others."""
    return [expert for expert in case.experts() if expert not in held]


def spoil(case: Case, move: Move | None) -> None:
    """Half of a copy has landed, and it is not what it will be."""
    if move is not None and move.parts is not None:
        for part, address in _parts(case, move):
            bytes_at(address, part.nbytes)[: part.nbytes // 2] = 0xA5


def land(suite: AdaptiveSourceTests, case: Case, move: Move | None) -> None:
    """The whole copy has landed."""
    if move is not None and move.parts is not None:
        blob = suite.raw(case.checkpoint, move.expert)
        for part, address in _parts(case, move):
            bytes_at(address, part.nbytes)[:] = np.frombuffer(
                blob[part.offset : part.offset + part.nbytes], np.uint8
            )


def _parts(case: Case, move: Move) -> Any:
    layout = case.checkpoint.experts.layouts[move.expert.layer]
    return zip(layout.parts, move.parts or (), strict=True)


def check(suite: AdaptiveSourceTests, case: Case, expert: Expert, when: str) -> None:
    """A view and a copy of an expert have the file's bytes."""
    (view,) = case.acquire([expert])
    suite.compare(case, expert, view, when)
    case.source.release(expert)
    size = case.blob_size(expert)
    buffer = bytearray(-(-size // PAGE) * PAGE + PAGE)
    pad = case.source.read_into(expert, memoryview(buffer))
    wanted = suite.raw(case.checkpoint, expert)
    same_bytes(buffer[pad : pad + size], wanted, f"a copy of {expert} is wrong {when}")


class MovesMachine(RuleBasedStateMachine):
    """Moves begin, land, are committed and aborted while others are read."""

    def __init__(self, suite: AdaptiveSourceTests, model: Checkpoint) -> None:
        super().__init__()
        self.suite = suite
        self.device = set(on_device(model))
        self.case = suite.build(model, excluded=frozenset(self.device))
        self.moves: dict[Expert, Move] = {}

    @rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        """A move of an expert that has none open."""
        free = [e for e in self.case.experts() if e not in self.moves]
        if not free:
            return
        expert = data.draw(st.sampled_from(free), "expert")
        source: Any = self.case.source
        leaves = expert in self.device
        move = source.begin_demote(expert) if leaves else source.begin_promote(expert)
        if move is None:
            self.device ^= {expert}
            return
        assert move.expert == expert, "a move is of another expert"
        assert move.kind == ("demote" if leaves else "promote"), "a move is of the other kind"
        self._apart(move)
        spoil(self.case, move)
        self.moves[expert] = move

    @precondition(lambda self: self.moves)
    @rule(data=st.data(), good=st.booleans())
    def end(self, data: st.DataObject, good: bool) -> None:
        """A move is committed once its copy has landed, or aborted."""
        move = self.moves.pop(data.draw(st.sampled_from(sorted(self.moves)), "move"))
        source: Any = self.case.source
        if good:
            land(self.suite, self.case, move)
            source.commit(move)
            self.device ^= {move.expert}
        else:
            source.abort(move)

    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        """Any expert, wherever it is."""
        expert = data.draw(st.sampled_from(self.case.experts()), "expert")
        check(self.suite, self.case, expert, "among moves")

    def _apart(self, move: Move) -> None:
        """Memory for a copy is nobody else's."""
        mine = [(a, a + p.nbytes) for p, a in _parts(self.case, move)] if move.parts else []
        for other in self.moves.values():
            if other.parts:
                for part, at in _parts(self.case, other):
                    clash = any(at < end and begin < at + part.nbytes for begin, end in mine)
                    assert not clash, f"{move.expert} and {other.expert} share memory"

    def teardown(self) -> None:
        """End what is open, and give everything back."""
        source: Any = self.case.source
        for move in self.moves.values():
            source.abort(move)
        for expert in self.case.experts():
            check(self.suite, self.case, expert, "at the end")
        source.close()
        left = [r.purpose for r in self.case.allocator.outstanding.values()]
        assert not left, f"a closed source keeps {left}"
        self.case.allocator.close()
