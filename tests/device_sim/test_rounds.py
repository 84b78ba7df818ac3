"""Rounds: what moves, who is called, which lane computes, and how a round that fails ends."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import numpy as np
import pytest
from attrs import evolve

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import EngineError, Refused
from strata_core.interfaces import Expert, View
from strata_core.kernels.cpu.hand_over import TIMED_OUT
from strata_core.kernels.device.exchange import LINE
from strata_core.sources.mmap import MappedFile
from strata_core.testing.sim import SimFaults
from strata_core.testing.tiny import write_tiny_gguf


class Aliased:
    """Experts in page-locked memory of the runtime: every one has an alias, or some."""

    def __init__(self, experts, runtime, device=0, every=1):
        self.files = experts
        self.mapped = MappedFile(experts)
        self.places, self.runtime = {}, runtime
        for layer, layout in experts.layouts.items():
            for index in range(experts.count):
                address = runtime.host_alloc(layout.nbytes)
                buffer = (ctypes.c_uint8 * layout.nbytes).from_address(address)
                self.mapped.read_into(Expert(layer, index), memoryview(buffer).cast("B"))
                alias = runtime.alias(address, device) if index % every == 0 else None
                self.places[layer, index] = (address, alias)

    def begin_layer(self, layer, experts):
        pass

    def view(self, expert):
        address, alias = self.places[expert.layer, expert.index]
        parts = self.files.layouts[expert.layer].parts
        gate, up, down = (address + part.offset for part in parts)
        return View((gate, up, down), in_ram=True, dma=alias is not None, alias=alias)

    def addresses(self, layer):
        found = [self.view(Expert(layer, i)).parts for i in range(self.files.count)]
        return np.array(found, np.uint64)

    def read_into(self, expert, buffer):
        return self.mapped.read_into(expert, buffer)

    def release(self, expert):
        pass

    def close(self):
        for address, _ in self.places.values():
            self.runtime.host_free(address)


class Asked:
    """Experts that have no address: each round asks for them, in vain while `broken`."""

    def __init__(self, experts):
        self.mapped, self.held, self.broken = MappedFile(experts), [], False

    def begin_layer(self, layer, experts):
        pass

    def view(self, expert):
        if self.broken:
            raise OSError(f"no {expert}")
        self.held.append(expert)
        return self.mapped.view(expert)

    def read_into(self, expert, buffer):
        return self.mapped.read_into(expert, buffer)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        pass


def aliased(lab, checkpoint, every=1, **options):
    runtime = lab.runtime(aliases="apart")
    backend = lab.backend(runtime, **options)
    backend.open_contexts()
    source = Aliased(checkpoint.experts, runtime, every=every)
    return backend, source, lab.bind(backend, checkpoint, source)


@pytest.mark.parametrize("cache", [0, 5])
@pytest.mark.parametrize(("share", "every"), [(0.5, 1), (1.0, 1), (1.0, 2), (0.3, 2)])
def test_the_link_reads_through_aliases(lab, tiny_file, share, every, cache):
    checkpoint = tiny_file()
    backend, source, executor = aliased(lab, checkpoint, every, expert_cache=cache, pcie_frac=share)
    for size in (1, 8):
        assert lab.logits(executor, size=size).tobytes() == lab.cpu(checkpoint).tobytes()
    counters = executor.counters()
    assert counters["pcie"]["experts"] > 0
    assert (counters["cpu"]["experts"] == 0) == (share == every == 1)
    whole = {ready.dispatch for ready in executor._rounds.values()} == {"device"}
    assert whole == (share == every == 1)
    executor.close()
    source.close()
    lab.check_closed(backend)


def test_lanes_add_up_and_their_bytes_are_the_blobs(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=4, expert_cache_device1=4)
    executor = lab.bind(backend, checkpoint)
    lab.logits(executor, size=3)
    counters = executor.counters()
    layouts = checkpoint.experts.layouts
    picks = len(tools.ids) * checkpoint.hyper.top_k * len(layouts)
    assert sum(lane["experts"] for lane in counters.values()) == picks
    nbytes = {layout.nbytes for layout in layouts.values()}.pop()
    assert all(lane["bytes"] == lane["experts"] * nbytes for lane in counters.values())
    assert counters["hit"]["experts"]
    assert counters["helper"]["experts"]
    lab.check_closed(backend, executor)


def moved(runtime):
    report = runtime.report()
    link = report["links"]["SIM0"]
    return link["to_device"], link["from_device"], report["launcher_calls"]


def test_hits_move_nothing_over_the_link_but_frame_picks_and_logits(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=16)
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    before = moved(backend.runtime)
    executor.run(tools.window(tools.ids[1:2], start=1, slot=slot))
    to_device, from_device, launches = np.subtract(moved(backend.runtime), before)
    exchange = executor._exchange
    assert to_device == exchange.frame.nbytes < 8192
    picks = 4 * checkpoint.hyper.top_k * len(checkpoint.experts.layouts)
    counts = 256
    assert from_device == counts + 256 + 4 * checkpoint.hyper.vocabulary + 8 + picks
    assert launches == 1
    assert executor.counters()["cpu"] == {"experts": 0, "bytes": 0}
    lab.check_closed(backend, executor)


def test_a_stepped_round_calls_python_for_its_graphs_alone(lab, tiny_file, tools, monkeypatch):
    checkpoint = tiny_file({"layers": 5})
    backend = lab.backend(expert_cache=7, threads=2)
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    before = moved(backend.runtime)[2]
    calls = backend.runtime.calls()
    schedules = []
    run = backend._pool.run
    monkeypatch.setattr(backend._pool, "run", lambda s: (schedules.append(s), run(s)))
    executor.run(tools.window(tools.ids[1:2], start=1, slot=slot))
    assert moved(backend.runtime)[2] - before == 5 + 1
    assert len(schedules) == 1
    after = backend.runtime.calls()
    verbs = {name for name in after if after[name] != calls.get(name, 0)}
    assert verbs == {"graph_launcher"}
    lab.check_closed(backend, executor)


def test_a_device_that_does_not_answer_ends_in_an_error(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend(expert_cache=3, patience=0.05)
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    ids = tools.ids
    executor.run(tools.window(ids[:1], slot=slot))
    kernels = backend.runtime._kernels
    signal = kernels["dispatch"]

    def silent(runtime, device, launch):
        words = np.ctypeslib.as_array((ctypes.c_int64 * 1).from_address(word))
        old = words[0]
        signal(runtime, device, launch)
        words[0] = old

    word = executor._exchange.rest.at("words")
    kernels["dispatch"] = silent
    with pytest.raises(EngineError, match="stopped at layer 0 in stepped mode") as caught:
        executor.run(tools.window(ids[1:2], start=1, slot=slot))
    assert "did not answer within 0.05 s" in caught.value.why
    kernels["dispatch"] = signal
    again = lab.logits(executor)
    assert again.tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("silent", [False, True])
def test_after_a_source_that_failed_the_device_is_awaited(lab, tiny_file, tools, silent):
    """Also where the device stopped answering in the same round, which nobody is told of then."""
    checkpoint = tiny_file()
    source = Asked(checkpoint.experts)
    backend = lab.backend(expert_cache=3, patience=0.05)
    executor = lab.bind(backend, checkpoint, source)
    kernels = backend.runtime._kernels
    signal = kernels["dispatch"]
    word = (ctypes.c_int64 * 1).from_address(executor._exchange.rest.at("words") + LINE)

    def mute(runtime, device, launch):
        old = word[0]
        signal(runtime, device, launch)
        word[0] = old

    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    source.broken = True
    kernels["dispatch"] = mute if silent else signal
    with pytest.raises(OSError, match="no expert"):
        executor.run(tools.window(tools.ids[1:5], start=1, slot=slot))
    assert (executor._maker.hand.failure[0] == TIMED_OUT) == silent
    source.broken, kernels["dispatch"] = False, signal
    before = backend.runtime.calls()
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    after = backend.runtime.calls()
    assert after["finished"] - before.get("finished", 0) == 1
    assert source.held == []
    lab.check_closed(backend, executor)


@pytest.mark.parametrize(
    "options",
    [{"expert_cache": 3}, {"expert_cache": 16}, {"expert_cache": 3, "expert_cache_device1": 5}],
)
def test_any_thread_may_ask_for_accounts_at_any_moment(lab, tiny_file, tools, options, monkeypatch):
    checkpoint = tiny_file()
    backend = lab.backend(**options)
    executor = lab.bind(backend, checkpoint)
    runtime, seen, told = backend.runtime, [], []

    def ask():
        before = runtime.calls()
        seen.append(threads.submit(lambda: (executor.counters(), executor.picks())).result(120))
        told.append(runtime.calls() == before)

    def asking(work):
        def do(*args):
            ask()
            result = work(*args)
            ask()
            return result

        return do

    with ThreadPoolExecutor(1) as threads:
        for name, kernel in list(runtime._kernels.items()):
            monkeypatch.setitem(runtime._kernels, name, asking(kernel))
        monkeypatch.setattr(runtime, "end_capture", asking(runtime.end_capture))
        for size in (1, 3):
            assert lab.logits(executor, size=size).tobytes() == lab.cpu(checkpoint).tobytes()
        ask()
    assert len(seen) > 400
    assert all(told), "no verb is called for an answer"
    sums = [sum(lane["experts"] for lane in counters.values()) for counters, _ in seen]
    assert sums == sorted(sums)
    assert len(set(sums)) > 24
    asked = 2 * len(tools.ids) * checkpoint.hyper.top_k * len(checkpoint.experts.layouts)
    assert sums[-1] == sum(int(row.sum()) for row in seen[-1][1].values()) == asked
    lab.check_closed(backend, executor)
    assert executor.counters() == seen[-1][0]


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_launch_that_fails_names_its_layer(lab, tiny_file, tools, nth):
    checkpoint = tiny_file()
    runtime = lab.runtime(faults=SimFaults({"graph_launcher": 3 + nth}))
    backend = lab.backend(runtime, expert_cache=3)
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    where = ["layer 0", "layer 1", "its end"][nth - 1]
    with pytest.raises(EngineError, match=f"stopped at {where} in stepped mode") as caught:
        executor.run(tools.window(tools.ids[1:2], start=1, slot=slot))
    assert "driver says: " in caught.value.why
    assert "nothing" not in caught.value.why
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    lab.check_closed(backend, executor)


@pytest.mark.parametrize(("cache", "helper"), [(0, 0), (16, 0), (0, 16), (3, 5)])
def test_what_is_not_finite_is_named_as_the_cpu_does(lab, tmp_path, cache, helper):
    path = tmp_path / "bad.gguf"
    write_tiny_gguf(path, expert_type="Q8_0")
    with closing(open_checkpoint(path)) as checkpoint:
        start = checkpoint.experts.pieces(Expert(1, 0))[0].offset
        count = checkpoint.experts.layouts[1].parts[0].nbytes * checkpoint.experts.count
    data = np.fromfile(path, np.uint8)
    data[start : start + count].reshape(-1, 34)[:, :2] = [0x00, 0x7C]  # scales of infinity
    data.tofile(path)
    with closing(open_checkpoint(path)) as checkpoint:
        with pytest.raises(EngineError, match="not finite") as expected:
            lab.cpu(checkpoint)
        assert "experts in layer 1" in expected.value.what
        backend = lab.backend(expert_cache=cache, expert_cache_device1=helper)
        executor = lab.bind(backend, checkpoint)
        for size in (None, 1):
            with pytest.raises(EngineError) as caught:
                lab.logits(executor, size=size)
            assert str(caught.value) == str(expected.value)
        lab.check_closed(backend, executor)


def test_too_large_a_window_is_refused(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend()
    executor = lab.bind(backend, checkpoint)
    with pytest.raises(EngineError, match="too big"):
        executor.run(tools.window(np.zeros(41)))
    lab.check_closed(backend, executor)


def test_a_context_that_does_not_fit_is_refused_with_its_purpose(lab, tiny_file, tools):
    checkpoint = tiny_file()
    backend = lab.backend(lab.runtime(vram=(64 << 20,)))
    limits = evolve(tools.limits, context=1 << 17)
    with pytest.raises(Refused, match="keys and values of 131072 positions"):
        lab.bind(backend, checkpoint, limits=limits)
    lab.check_closed(backend)
