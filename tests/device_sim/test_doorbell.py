"""Rounds of one graph, in which the simulated device waits for the host: bits, waits, failures."""

import logging
import time
from contextlib import contextmanager

import numpy as np
import pytest
from attrs import evolve
from test_adapting import TEXT, Bound
from test_rounds import Aliased, Asked
from test_split import Unstated

from strata_core.errors import DeviceError, EngineError
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.device.dispatch import APART, Dispatcher
from strata_core.kernels.device.exchange import LINE
from strata_core.kernels.device.rounds import Hand, Maker
from strata_core.memory.address import bytes_at
from strata_core.runtime import WaitClock
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import host_kernels

SOON = 0.2
"""Seconds that a device waits here where the host is to be late."""


def bound_to(lab, checkpoint, runtime=None, bound=60.0, every=1, wrap=lambda r: r, **options):
    """Backend, source and executor of a model whose experts all lie in memory."""
    options = {"dispatch": "doorbell", "expert_cache": 3, "pcie_frac": 0.4, **options}
    runtime = runtime or lab.runtime(aliases="apart")
    backend = lab.backend(wrap(runtime), bound=bound, **options)
    backend.open_contexts()
    source = Aliased(checkpoint.experts, runtime, every=every)
    try:
        return backend, source, lab.bind(backend, checkpoint, source)
    except BaseException:
        source.close()
        backend.close()
        raise


def end(lab, backend, source, executor):
    executor.close()
    source.close()
    lab.check_closed(backend)


def kinds(executor):
    return {ready.dispatch for (*_, doorbell), ready in executor._rounds.items() if doorbell}


@contextmanager
def silent_host(executor, after=0):
    """Rounds whose answers, from a layer on, go nowhere; gives the graphs that were made so.

    Only these are in a hurry: the device waits SOON for an answer of the first layer, and for one
    of a later layer not at all, so that the layers before have all the time that they want.
    """
    nowhere, answer = np.zeros(1, np.int64), Hand.answer
    start, made = executor._exchange.rest.at("answers"), []

    def deaf(hand, address):
        made.append(address)
        lost = (address - start) // LINE >= after
        return answer(hand, nowhere.ctypes.data if lost else address)

    def impatient(args):
        late = bytes_at(args.late, 4).view(np.uint32)
        if args.layer < after:
            wait(args)
        elif late[0] == NOTHING_LATCHED:
            late[0] = args.layer

    wait, least = host_kernels._await_host, executor._dispatcher.least
    executor._drop_rounds()
    Hand.answer = deaf
    if after:
        host_kernels._await_host = impatient
    else:
        executor._dispatcher.least = SOON
    try:
        yield made
    finally:
        Hand.answer, host_kernels._await_host = answer, wait
        executor._dispatcher.least = least
        executor._drop_rounds()


@pytest.mark.parametrize("threads", [1, 3])
def test_bits_are_those_of_every_mode_in_windows_of_every_size(lab, tiny_file, threads):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, threads=threads)
    want = lab.cpu(checkpoint).tobytes()
    for size in range(1, 9):
        assert lab.logits(executor, size=size).tobytes() == want
    assert kinds(executor) == {"doorbell"}
    counters, told = executor.counters(), executor.lanes()["dispatch"]
    assert counters["pcie"]["experts"] > 0
    assert counters["cpu"]["experts"] > 0
    # what was timed at start is not counted
    assert sum(lane["experts"] for lane in counters.values()) == 8 * 24 * 2 * 2
    assert (told["mode"], told["because"]) == ("doorbell", "--dispatch doorbell")
    assert told["time_outs"] == 0
    assert set(told["round_ms"]) == {"stepped", "doorbell"}
    end(lab, backend, source, executor)


@pytest.mark.parametrize(
    "options",
    [
        {"expert_cache": 0, "pcie_frac": 0.0},
        {"expert_cache_device1": 4, "expert_cache_device2": 3},
        {"expert_cache": 3, "pcie_frac": 1.0, "every": 2},
    ],
)
def test_bits_with_other_lanes(lab, tiny_file, options):
    checkpoint = tiny_file({"layers": 3})
    backend, source, executor = bound_to(lab, checkpoint, threads=2, **options)
    want = lab.cpu(checkpoint).tobytes()
    for size in (1, 1, 5):
        assert lab.logits(executor, size=size).tobytes() == want
    assert kinds(executor) == {"doorbell"}
    if "expert_cache_device1" in options:
        assert executor.counters()["helper"]["experts"] > 0
    assert executor.lanes()["dispatch"]["time_outs"] == 0
    end(lab, backend, source, executor)


@pytest.mark.parametrize("kind", ["arena", "resident"])
def test_bits_while_experts_change_places(lab, tiny_file, tools, kind):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, kind, expert_cache=6, pcie_frac=0.5, dispatch="doorbell")
    told = bound.executor.lanes()["dispatch"]
    assert told["mode"] == "doorbell"
    assert bound.logits().tobytes() == lab.cpu(checkpoint, ids=TEXT).tobytes()
    assert bound.executor.counters()["entered"]["experts"] > 0
    assert told["time_outs"] == 0
    bound.close()


def test_a_round_is_one_launch(lab, tiny_file, tools):
    checkpoint = tiny_file({"layers": 5})
    backend, source, executor = bound_to(lab, checkpoint, threads=2)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    before = backend.runtime.calls()
    executor.run(tools.window(tools.ids[1:2], start=1, slot=slot))
    after = backend.runtime.calls()
    assert {n: after[n] - before.get(n, 0) for n in after if after[n] != before.get(n, 0)} == {
        "graph_launcher": 1
    }
    end(lab, backend, source, executor)


@pytest.mark.parametrize("start", [(1 << 32) - 3, (1 << 63) - 8])
def test_numbers_of_rounds_wrap_around(lab, tiny_file, start):
    checkpoint = tiny_file()
    for dispatch in ("doorbell", "stepped"):
        backend, source, executor = bound_to(lab, checkpoint, dispatch=dispatch)
        executor._number = start
        assert lab.logits(executor, size=2).tobytes() == lab.cpu(checkpoint).tobytes()
        assert executor._number in (start + 12, 12 - 7)
        end(lab, backend, source, executor)


@pytest.mark.parametrize("after", [0, 1])
def test_a_host_that_does_not_answer_costs_one_round_and_no_bit(
    lab, tiny_file, tools, caplog, after
):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, threads=2)
    want = lab.cpu(checkpoint).tobytes()
    assert lab.logits(executor, size=3).tobytes() == want
    before = executor.counters()
    began = time.monotonic()
    slot, ids = executor.open_sequence(), tools.ids
    with silent_host(executor, after), caplog.at_level(logging.WARNING):
        rows = [executor.run(tools.window(ids[:8], slot=slot)).copy()]
    assert after or time.monotonic() - began > SOON
    rows += [executor.run(tools.window(ids[8:], start=8, slot=slot)).copy()]
    assert np.concatenate(rows).tobytes() == want
    executor.close_sequence(slot)
    waited = [r.getMessage() for r in caplog.records if "is run again" in r.getMessage()]
    assert len(waited) == 1 == executor.lanes()["dispatch"]["time_outs"]
    assert f"part of layer {after}" in waited[0]
    # once is no habit: doorbells go on, and what was rubbish was not counted
    assert executor.lanes()["dispatch"]["mode"] == "doorbell"
    assert lab.degradations == []
    assert lab.logits(executor, size=3).tobytes() == want
    counters = executor.counters()
    served = sum(counters[lane]["experts"] - before[lane]["experts"] for lane in before)
    assert served == 2 * 24 * 2 * 2
    assert executor.lanes()["dispatch"]["time_outs"] == 1
    end(lab, backend, source, executor)


def test_after_a_second_time_out_soon_rounds_are_stepped_for_good(lab, tiny_file):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, threads=2)
    want = lab.cpu(checkpoint).tobytes()
    with silent_host(executor) as seen:
        for _ in range(3):
            assert lab.logits(executor, size=8).tobytes() == want
        made = len(seen)
        assert lab.logits(executor, size=1).tobytes() == want
    assert len(seen) == made, "no kernel waits any more"
    told = executor.lanes()["dispatch"]
    assert (told["mode"], told["time_outs"]) == ("stepped", 2)
    (item,) = lab.degradations
    assert "stepped from now on" in item.what
    assert "layer 0" in item.why
    assert "--dispatch stepped" in item.remedy
    end(lab, backend, source, executor)


def test_time_outs_that_are_far_apart_end_nothing(lab, tiny_file, tools):
    """Two within so many rounds are a habit; in a run of days one an hour is not."""
    backend, source, executor = bound_to(lab, tiny_file(), threads=2)
    want, slot = lab.cpu(tiny_file())[:4].tobytes(), executor.open_sequence()
    modes = []
    for rounds in (0, APART + 1, APART + 1, APART // 2):
        executor._number += rounds
        with silent_host(executor):
            assert executor.run(tools.window(tools.ids[:4], slot=slot)).tobytes() == want
        modes.append(executor.lanes()["dispatch"]["mode"])
        assert len(lab.degradations) == (modes[-1] == "stepped")
    assert modes == ["doorbell"] * 3 + ["stepped"]
    told = executor.lanes()["dispatch"]
    assert told["time_outs"] == len(modes)
    assert f"within {APART} rounds" in told["because"]
    end(lab, backend, source, executor)


def test_answers_of_rounds_before_are_no_answers(lab, tiny_file):
    """Words hold what the host wrote last; a late answer to round n is none to round n + 1."""
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, threads=2)
    want = lab.cpu(checkpoint).tobytes()
    exchange = executor._exchange
    answers = exchange.array("answers", np.int64, exchange.shape.layers, 8)
    for _ in range(3):
        assert lab.logits(executor, size=4).tobytes() == want
        assert (answers[:, 0] == executor._number).all()
        answers[:, 0] = executor._number - 1
    assert executor.lanes()["dispatch"]["time_outs"] == 0
    end(lab, backend, source, executor)


def test_a_failure_of_the_host_leaves_no_device_waiting(lab, tiny_file, tools):
    """A helper's launch fails while the device waits: the error, and right bits afterwards."""
    checkpoint = tiny_file()
    options = {"expert_cache_device1": 8, "threads": 2}
    backend, source, executor = bound_to(lab, checkpoint, **options)
    runtime, launch = backend.runtime, executor._maker.runtime.run_graph
    helper = executor._maker.helpers[0].stream

    def refuse(graph, stream, name):
        if stream == helper:
            raise DeviceError("the helper is gone", "out of order", "none")
        return launch(graph, stream, name)

    slot = executor.open_sequence()
    runtime.run_graph = refuse
    # the device has nothing to wait for in this round
    executor._dispatcher.least = SOON
    executor._drop_rounds()
    with pytest.raises(EngineError, match="stopped at layer 0 in doorbell mode") as caught:
        executor.run(tools.window(tools.ids[:4], slot=slot))
    assert "did not launch a graph" in caught.value.why
    del runtime.run_graph
    runtime.breaches.clear()
    executor._settle()
    executor._dispatcher.least = 60.0
    executor._drop_rounds()
    assert lab.logits(executor, size=3).tobytes() == lab.cpu(checkpoint).tobytes()
    end(lab, backend, source, executor)


def test_what_is_not_finite_is_told_as_ever(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    executor._maker.host.begin = lambda tokens, begin=executor._maker.host.begin: (
        begin(tokens),
        executor._maker.host.status.__setitem__(0, 3),
    )
    with pytest.raises(EngineError, match="not finite"):
        executor.run(tools.window(tools.ids[1:3], start=1, slot=slot))
    end(lab, backend, source, executor)


# --- who may, and who chooses -------------------------------------------------------------------


class Clockless:
    """A runtime that tells of no clock."""

    def __init__(self, runtime):
        self._runtime = runtime

    def __getattr__(self, name):
        if name == "wait_clock":
            raise AttributeError(name)
        return getattr(self._runtime, name)


def refused(lab, checkpoint, source=None, machine=None, wrap=lambda r: r, **hardware):
    """Why a doorbell that was asked for cannot be had."""
    backend = lab.backend(wrap(lab.runtime(**hardware)), dispatch="doorbell", expert_cache=3)
    if machine is not None:
        backend._machine = evolve(backend._machine, **machine)
    executor = lab.bind(backend, checkpoint, source)
    assert executor.lanes()["dispatch"]["mode"] == "stepped"
    assert lab.logits(executor, size=5).tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)
    told = lab.degradations.pop()
    assert told.what == "--dispatch doorbell has no effect"
    assert lab.degradations == []
    return told.why


def test_where_kernels_must_not_wait(lab, tiny_file):
    checkpoint = tiny_file()
    assert "from a file" in refused(lab, checkpoint)
    assert "from a file" in refused(lab, checkpoint, Asked(checkpoint.experts))
    clock = WaitClock(0.0, "its clock stands still")
    assert refused(lab, checkpoint, clock=clock) == "its clock stands still"
    assert "no clock" in refused(lab, checkpoint, wrap=Clockless)
    for machine in ({"wsl": 2}, {"os": "windows"}):
        why = refused(lab, checkpoint, machine=machine, wrap=Unstated)
        assert "WSL" in why


@pytest.mark.parametrize(
    ("options", "because"),
    [
        ({"dispatch": "auto"}, "simulated"),
        ({"dispatch": "stepped"}, "--dispatch stepped"),
        ({"dispatch": "auto", "pcie_frac": 1.0}, "no other lane"),
    ],
)
def test_nothing_is_timed_where_nothing_is_open(lab, tiny_file, options, because):
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, **options)
    told = executor.lanes()["dispatch"]
    assert because in told["because"]
    assert told["round_ms"] == {}
    assert told["mode"] == ("device" if "pcie_frac" in options else "stepped")
    assert lab.logits(executor, size=5).tobytes() == lab.cpu(checkpoint).tobytes()
    assert kinds(executor) == set()
    end(lab, backend, source, executor)


def test_auto_times_rounds_of_either_kind(lab, tiny_file, caplog):
    checkpoint = tiny_file()
    with caplog.at_level(logging.INFO, "strata.device"):
        backend, source, executor = bound_to(lab, checkpoint, dispatch="auto", wrap=Unstated)
    told = executor.lanes()["dispatch"]
    assert set(told["round_ms"]) == {"stepped", "doorbell"}
    assert min(told["round_ms"].values()) > 0
    assert f"rounds are {'doorbells' if told['mode'] == 'doorbell' else 'stepped'}" in caplog.text
    assert executor.counters()["cpu"]["experts"] == 0
    assert not any(row.any() for row in executor.picks().values())
    assert lab.logits(executor, size=2).tobytes() == lab.cpu(checkpoint).tobytes()
    end(lab, backend, source, executor)


def test_a_doorbell_that_cannot_be_made_is_an_error_only_where_it_was_asked_for(
    lab, tiny_file, monkeypatch
):
    make = Maker.make

    def refuse(maker, mode, doorbell=None):
        if doorbell is not None:
            raise DeviceError("no graph", "out of memory", "none")
        return make(maker, mode, doorbell)

    monkeypatch.setattr(Maker, "make", refuse)
    checkpoint = tiny_file()
    backend, source, executor = bound_to(lab, checkpoint, dispatch="auto", wrap=Unstated)
    told = executor.lanes()["dispatch"]
    assert told["mode"] == "stepped"
    assert told["because"] == "a round could not be made one graph: out of memory"
    assert lab.logits(executor, size=2).tobytes() == lab.cpu(checkpoint).tobytes()
    end(lab, backend, source, executor)
    with pytest.raises(DeviceError, match="no graph"):
        bound_to(lab, checkpoint, wrap=Unstated)


class Timed:
    """Rounds that take as long as a test says."""

    def __init__(self, monkeypatch, stepped, doorbell, late_at=None):
        self.now, self.count = 0.0, 0
        self.seconds = {False: stepped, True: doorbell}
        self.late_at = late_at
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def attempt(self, doorbell):
        self.now += self.seconds[doorbell]
        self.count += doorbell
        return not doorbell or self.count != self.late_at

    def choice(self, asked="auto"):
        made = Dispatcher(
            asked=asked, ticks=1e9, least=0.02, measurable=True, degrade=lambda item: None
        )
        made.choose(self.attempt)
        return made


@pytest.mark.parametrize(
    ("stepped", "doorbell", "taken", "pairs"),
    [
        (2.6e-3, 2.4e-3, True, None),
        (2.41e-3, 2.4e-3, False, None),
        (2.4e-3, 2.6e-3, False, None),
        (15e-3, 14e-3, True, 5),
        (90e-3, 80e-3, False, 2),
        (1e-4, 1e-5, True, 25),
    ],
)
def test_the_faster_kind_is_taken(monkeypatch, stepped, doorbell, taken, pairs):
    timed = Timed(monkeypatch, stepped, doorbell)
    made = timed.choice()
    assert made.doorbell == taken
    assert pairs in (None, timed.count)
    assert ("too long" in made.because) == (pairs == 2)
    assert made.bound(1) == pytest.approx(max(0.02, stepped))
    assert made.bound(8) == pytest.approx(max(0.02, 8 * stepped))
    assert timed.choice("doorbell").doorbell


def test_a_time_out_while_timing_decides(monkeypatch):
    for late_at in (1, 4):
        timed = Timed(monkeypatch, 2.6e-3, 2.0e-3, late_at=late_at)
        made = timed.choice()
        assert not made.doorbell
        assert "too late" in made.because
        assert timed.count == late_at


def test_the_mapped_file_is_read_by_nobody_that_waits(lab, tiny_file):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=3, dispatch="auto")
    executor = lab.bind(backend, checkpoint, MappedFile(checkpoint.experts))
    assert "from a file" in executor.lanes()["dispatch"]["because"]
    lab.check_closed(backend, executor)
