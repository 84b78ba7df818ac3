"""`FetchingSource`: the suite for sources with several fetchers, and what failures leave behind."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from strata_core.errors import StrataError
from strata_core.interfaces import Expert, Source, SourceContext
from strata_core.sources.fetching import FetchingSource
from strata_core.testing.conformance import SourceSuite

PURPOSE = "far experts"


class FromFiles:
    """Reads the model's own files; can be slow, fail for an expert, or group all of a call."""

    def __init__(self, context: SourceContext, *, together: bool = False, delay: float = 0.0):
        self.experts = context.experts
        self.together, self.delay = together, delay
        self.failing: dict[Expert, BaseException] = {}
        self.calls: list[tuple[Expert, ...]] = []
        self.closed = 0
        self.gate = threading.Event()
        self.gate.set()

    def groups(self, experts: Sequence[Expert]):
        return [experts] if self.together else [[expert] for expert in experts]

    def fetch(self, experts: Sequence[Expert], buffers: Sequence[memoryview]) -> None:
        self.calls.append(tuple(experts))
        assert self.gate.wait(120)
        time.sleep(self.delay)
        for expert, buffer in zip(experts, buffers, strict=True):
            if expert in self.failing:
                raise self.failing[expert]
            at = 0
            for piece in self.experts.pieces(expert):
                with piece.file.open("rb") as file:
                    file.seek(piece.offset)
                    at += file.readinto(buffer[at : at + piece.nbytes])
            assert at == len(buffer)

    def close(self) -> None:
        self.closed += 1


class TestWithRoomForAll(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        fetcher = FromFiles(context)
        return FetchingSource(context, fetcher, nbytes=1 << 30, threads=3, purpose=PURPOSE)


class TestWithRoomForThree(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        largest = max(layout.nbytes for layout in context.experts.layouts.values())
        room = 3 * (largest + 4096)
        fetcher = FromFiles(context, together=True, delay=0.001)
        return FetchingSource(context, fetcher, nbytes=room, threads=2, purpose=PURPOSE)


class TestWithRoomForOne(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        return FetchingSource(context, FromFiles(context), nbytes=0, threads=1, purpose=PURPOSE)


@pytest.fixture
def built(tmp_path: Path):
    """built(slots, threads, **fetcher options): a case of the suite, its source and its fetcher."""
    cases = []

    def build(slots: int, threads: int = 2, **options):
        made = []

        class Suite(SourceSuite):
            def make(self, context: SourceContext) -> Source:
                largest = max(layout.nbytes for layout in context.experts.layouts.values())
                stride = -(-largest // 4096) * 4096
                made.append(FromFiles(context, **options))
                return FetchingSource(
                    context, made[0], nbytes=slots * stride, threads=threads, purpose=PURPOSE
                )

        suite = Suite()
        case = suite.build(suite.checkpoint(tmp_path))
        cases.append(case)
        return suite, case, made[0]

    yield build
    for case in cases:
        case.source.close()
        assert not case.allocator.outstanding


def check(suite: SourceSuite, case, expert: Expert) -> None:
    suite.compare(case, expert, case.source.view(expert), "in a view")
    case.source.release(expert)


def test_announced_experts_are_fetched_once_and_ahead(built) -> None:
    suite, case, fetcher = built(8, together=True)
    case.source.begin_layer(1, [3, 1, 3, 2, 99, -1])
    case.source.begin_layer(1, [1, 2, 3])
    for index in (1, 2, 3):
        check(suite, case, Expert(1, index))
    assert fetcher.calls == [(Expert(1, 3), Expert(1, 1), Expert(1, 2))]
    fetched = case.source.fetched
    size = case.blob_size(Expert(1, 1))
    assert (fetched.blobs, fetched.nbytes) == (3, 3 * size)
    assert fetched.seconds > 0
    case.source.begin_layer(77, [0])
    assert len(fetcher.calls) == 1


def test_the_least_recently_used_makes_room(built) -> None:
    suite, case, fetcher = built(2)
    a, b, c = (Expert(0, i) for i in range(3))
    for expert in (a, b, a, c, a):
        check(suite, case, expert)
    assert fetcher.calls == [(a,), (b,), (c,)]
    check(suite, case, b)
    assert fetcher.calls[-1] == (b,)


def test_memory_for_more_than_there_is_room_for_goes_back(built) -> None:
    suite, case, _ = built(2)
    held = [Expert(0, i) for i in range(6)]
    for expert in held:
        case.source.view(expert)
    assert len(case.allocator.outstanding) == 1 + 4
    for expert in held:
        case.source.release(expert)
    assert len(case.allocator.outstanding) == 1
    check(suite, case, held[5])


def test_a_failed_fetch_names_the_expert_and_is_made_again_when_asked(built) -> None:
    suite, case, fetcher = built(3)
    bad, good = Expert(2, 1), Expert(2, 2)
    fetcher.failing[bad] = ValueError("no route")
    case.source.begin_layer(2, [1, 2])
    with pytest.raises(StrataError, match="expert 1 of layer 2") as caught:
        case.source.view(bad)
    assert "no route" in caught.value.why
    check(suite, case, good)
    fetcher.failing[bad] = StrataError("of its own")
    with pytest.raises(StrataError, match="of its own"):
        case.source.read_into(bad, memoryview(bytearray(1 << 20)))
    del fetcher.failing[bad]
    check(suite, case, bad)
    with pytest.raises(StrataError, match="not held"):
        case.source.release(bad)


def test_failures_while_room_is_short_leak_nothing(built) -> None:
    suite, case, fetcher = built(1)
    held = Expert(0, 0)
    case.source.view(held)
    fetcher.failing[Expert(0, 1)] = SystemExit(3)
    for _ in range(3):
        with pytest.raises(SystemExit):
            case.source.view(Expert(0, 1))
        assert len(case.allocator.outstanding) == 1
    case.source.release(held)
    check(suite, case, Expert(0, 2))


def test_groups_that_are_wrong_are_the_plugins_fault(built) -> None:
    suite, case, fetcher = built(4)
    for groups in (lambda _: [], lambda e: [e, e], lambda _: 1 / 0, lambda _: [[Expert(9, 9)]]):
        fetcher.groups = groups
        with pytest.raises(StrataError, match="cannot group experts of layer 0"):
            case.source.begin_layer(0, [1, 2])
    check(suite, case, Expert(0, 1))


def test_a_copy_waits_for_a_fetch_under_way(built) -> None:
    suite, case, fetcher = built(4)
    fetcher.gate.clear()
    expert = Expert(0, 4)
    case.source.begin_layer(0, [4])
    buffer = bytearray(case.blob_size(expert) + 8192)
    thread = threading.Thread(target=case.source.read_into, args=(expert, memoryview(buffer)))
    thread.start()
    fetcher.gate.set()
    thread.join(120)
    assert bytes(buffer[: case.blob_size(expert)]) == suite.raw(case.checkpoint, expert)
    assert fetcher.calls == [(expert,)]


def test_close_ends_what_is_under_way_and_closes_the_fetcher(built) -> None:
    _, case, fetcher = built(7, threads=1)
    fetcher.gate.clear()
    case.source.begin_layer(0, list(range(7)))
    end = case.source._pool.shutdown

    def shutdown(*, wait: bool, cancel_futures: bool) -> None:
        """The first fetch goes on once the others are called off."""
        end(wait=False, cancel_futures=cancel_futures)
        fetcher.gate.set()
        end(wait=wait)

    case.source._pool.shutdown = shutdown
    case.source.close()
    case.source.close()
    assert fetcher.closed == 1
    assert len(fetcher.calls) < 7
    with pytest.raises(StrataError, match="closed"):
        case.source.view(Expert(0, 0))
    with pytest.raises(StrataError, match="closed"):
        case.source.begin_layer(0, [0])
