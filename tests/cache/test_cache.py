"""Slots, amounts and filling on the simulated accelerator, without any model."""

import itertools
import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.cache.amount import Wish, choose, scarcity
from strata_core.cache.fill import fill_slots
from strata_core.cache.slots import ALIGNMENT, fitting, make_slots, slot_bytes
from strata_core.cache.staging import Staging
from strata_core.errors import CheckpointError, EngineError, Refused
from strata_core.interfaces import BlobLayout, BlobPart, Expert, View
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held, undo_all
from strata_core.memory.ledger import Ledger, vram
from strata_core.testing.sim import SimFaults, SimHardware, SimRuntime

MIB = 1 << 20


def layout(rows, kind="F32"):
    each = rows * (17 if kind == "MXFP4" else 128)
    names = ("gate", "up", "down")
    parts = tuple(BlobPart(n, kind, rows, 32, i * each, each) for i, n in enumerate(names))
    return BlobLayout(parts, 3 * each)


class Bytes:
    """A source of random blobs that starts them `pad` bytes into the buffer."""

    def __init__(self, layouts, experts, pad=0, pinned=None, stable=True):
        rng = np.random.default_rng(1)
        self.blobs = {
            Expert(layer, i): rng.integers(0, 200, one.nbytes, np.uint8)
            for layer, one in layouts.items()
            for i in range(experts)
        }
        self.layouts, self.pad, self.stable = layouts, pad, stable
        self.pinned = pinned or {}
        self.held = 0
        self.read = []

    def view(self, expert):
        self.held += 1
        base = self.pinned.get(expert, 0)
        gate, up, down = (base + p.offset for p in self.layouts[expert.layer].parts)
        return View((gate, up, down), in_ram=True, dma=base != 0, stable=self.stable)

    def release(self, expert):
        self.held -= 1

    def read_into(self, expert, buffer):
        blob = self.blobs[expert]
        assert len(buffer) >= -(-len(blob) // 4096) * 4096 + 4096
        buffer[self.pad : self.pad + len(blob)] = blob.data
        self.read.append(expert)
        return self.pad


class Quiet:
    def __init__(self):
        self.moved, self.wanted, self.ended = 0, 0, 0

    def start(self, label, nbytes):
        self.wanted += nbytes

    def advance(self, nbytes):
        self.moved += nbytes

    def done(self):
        self.ended += 1


@pytest.fixture
def make():
    """make(**hardware): a runtime with its contexts open, a ledger, and what holds their memory."""
    made = []

    def open_(faults=None, **hardware):
        hardware.setdefault("vram", (64 * MIB, 64 * MIB))
        runtime = SimRuntime(SimHardware(**hardware), faults=faults)
        for device in range(len(hardware["vram"])):
            runtime.open_context(device)
        ledger = Ledger(devices=len(hardware["vram"]))
        held = Held(runtime, ledger)
        made.append((runtime, ledger, held))
        return runtime, ledger, held

    yield open_
    for runtime, ledger, held in made:
        held.close()
        assert ledger.outstanding() == ()
        assert runtime.leaks() == []
        runtime.close()
        assert runtime.breaches == []


LAYOUTS = {0: layout(7), 2: layout(9), 5: layout(7)}


def ranking(experts, layers=tuple(LAYOUTS)):
    return [Expert(layer, i) for i in range(experts) for layer in layers]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.sampled_from(ranking(6)), unique=True))
def test_slots_of_a_pool_never_overlap_and_stay_in_their_class(chosen):
    runtime = SimRuntime(SimHardware(vram=(64 * MIB,)))
    runtime.open_context(0)
    ledger = Ledger(devices=1)
    held = Held(runtime, ledger)
    pool = make_slots(held, 0, chosen, LAYOUTS)
    assert list(pool.places) == chosen
    spans = sorted((at, at + slot_bytes(LAYOUTS[e.layer])) for e, at in pool.places.items())
    assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
    for expert, at in pool.places.items():
        (home,) = [c for c in pool.classes if c.address <= at < c.address + c.nbytes * c.count]
        assert (at - home.address) % home.nbytes == 0
        assert home.nbytes == slot_bytes(LAYOUTS[expert.layer])
        assert at % ALIGNMENT == 0
    assert pool.nbytes == sum(b - a for a, b in spans) == ledger.used(vram(0))
    held.close()
    assert runtime.leaks() == []
    runtime.close()


def test_slots_that_do_not_fit_hold_nothing(make):
    runtime, ledger, held = make(vram=(4 * MIB,))
    other = runtime.alloc(0, 3 * MIB)
    held_before = runtime.memory(0)
    layouts = {0: layout(7), 1: layout(8000)}
    with pytest.raises(Refused, match=r"SIM0 has no .* an expert cache of 3 experts"):
        make_slots(held, 0, [Expert(0, 0), Expert(1, 0), Expert(1, 1)], layouts)
    assert ledger.outstanding() == ()
    assert runtime.memory(0) == held_before
    runtime.free(0, other)


@pytest.mark.parametrize(("nbytes", "count"), [(0, 0), (2815, 0), (2816, 1), (6399, 1), (6400, 2)])
def test_fitting_takes_the_best_until_the_first_that_does_not_fit(nbytes, count):
    assert (slot_bytes(LAYOUTS[0]), slot_bytes(LAYOUTS[2])) == (2816, 3584)
    assert fitting(ranking(6), LAYOUTS, nbytes) == tuple(ranking(6)[:count])


def wish(amount="auto", reserve=None):
    return Wish(amount, reserve, "--expert-cache")


def test_auto_counts_what_is_free_and_what_the_ledger_grants(make):
    runtime, ledger, held = make(vram=(64 * MIB,))
    order, layouts = ranking(200, (0,)), {0: layout(1000)}
    each = slot_bytes(layouts[0])
    args = (runtime, ledger, 0, order, layouts)
    assert len(choose(*args, wish(reserve=0))) == 64 * MIB // each
    assert len(choose(*args, wish(reserve=4 * MIB))) == 60 * MIB // each
    # the default of 700 MiB gives way on a device this small
    assert 50 * MIB // each < len(choose(*args, wish())) < 64 * MIB // each
    held.device(0, 30 * MIB, "something else")
    assert len(choose(*args, wish(reserve=4 * MIB))) == 30 * MIB // each
    ledger.limit(vram(0), 40 * MIB)
    assert len(choose(*args, wish(reserve=4 * MIB))) == 10 * MIB // each
    assert choose(*args, wish(reserve=64 * MIB)) == ()
    assert len(choose(*args, wish(3))) == 3
    assert len(choose(*args, wish(300))) == 200


def test_a_full_device_is_told_once_it_is_scarce(make, caplog):
    runtime, _, held = make(vram=(512 * MIB,))
    held.device(0, 500 * MIB, "a lot")
    assert scarcity(runtime, 0, "--expert-cache") is None
    held.device(0, 5 * MIB, "more")
    with caplog.at_level(logging.WARNING, "strata"):
        found = scarcity(runtime, 0, "--expert-cache")
    assert found is not None
    assert found.what == "only 7 MiB of VRAM free on SIM0"
    assert "only 7 MiB of VRAM free" in caplog.text


@pytest.mark.parametrize("pad", [0, 512, 4095])
def test_filling_through_buffers_brings_every_byte(make, pad):
    _runtime, _, held = make()
    source, progress = Bytes(LAYOUTS, 6, pad), Quiet()
    pool = make_slots(held, 1, ranking(6)[:11], LAYOUTS)
    staging = Staging.make(held, max(x.nbytes for x in LAYOUTS.values()))
    fill_slots(pool, LAYOUTS, source, staging, progress, "filling")
    for expert, at in pool.places.items():
        assert bytes_at(at, len(source.blobs[expert])).tobytes() == source.blobs[expert].tobytes()
    assert source.held == 0
    assert progress.moved == progress.wanted > 0
    assert progress.ended == 1
    staging.close()


@pytest.mark.parametrize("stable", [True, False])
def test_page_locked_experts_are_copied_without_a_buffer(make, stable):
    _runtime, _, held = make()
    source = Bytes(LAYOUTS, 4, stable=stable)
    for expert in ranking(4)[:5]:
        blob = source.blobs[expert]
        source.pinned[expert] = at = held.pinned(len(blob), "a test")
        bytes_at(at, len(blob))[:] = blob
    pool = make_slots(held, 0, ranking(4)[:8], LAYOUTS)
    staging = Staging.make(held, max(x.nbytes for x in LAYOUTS.values()))
    fill_slots(pool, LAYOUTS, source, staging, Quiet(), "filling")
    assert source.read == ranking(4)[5:8]
    for expert, at in pool.places.items():
        assert bytes_at(at, len(source.blobs[expert])).tobytes() == source.blobs[expert].tobytes()
    staging.close()


def test_scales_that_are_no_numbers_name_the_expert(make):
    _, _, held = make()
    layouts = {0: layout(8, "MXFP4")}
    source = Bytes(layouts, 2)
    source.blobs[Expert(0, 1)][17] = 255
    pool = make_slots(held, 0, ranking(2, (0,)), layouts)
    staging = Staging.make(held, layouts[0].nbytes)
    progress = Quiet()
    with pytest.raises(CheckpointError, match="expert 1 of layer 0"):
        fill_slots(pool, layouts, source, staging, progress, "filling")
    assert progress.ended == 1
    staging.close()


@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1), st.integers(1, 3 * MIB)), max_size=8))
def test_arrays_of_any_size_arrive_on_any_device(pieces):
    runtime = SimRuntime(SimHardware(vram=(64 * MIB, 64 * MIB)))
    for device in (0, 1):
        runtime.open_context(device)
    held = Held(runtime, Ledger(devices=2))
    staging = Staging.make(held, 10)
    rng = np.random.default_rng(len(pieces))
    sent = []
    for device, nbytes in pieces:
        data = rng.integers(0, 256, nbytes, np.uint8)
        at = held.device(device, nbytes, "a test")
        staging.put(device, at, data)
        sent.append((at, data))
    staging.drain()
    assert all(bytes_at(at, d.nbytes).tobytes() == d.tobytes() for at, d in sent)
    staging.close()
    held.close()
    assert runtime.leaks() == []
    runtime.close()


def test_refusals_name_purpose_and_leave_no_claim(make):
    _runtime, ledger, held = make(faults=SimFaults({"host_alloc": 1, "alloc": 1}))
    with pytest.raises(Refused, match="page-locked memory for doorbells were refused"):
        held.pinned(100, "doorbells")
    with pytest.raises(Refused, match=r"SIM1 has no .* MiB for rows") as caught:
        held.device(1, 100, "rows")
    assert "64.00 MiB of it are free" in caught.value.why
    ledger.limit(vram(0), 50)
    with pytest.raises(Refused, match="vram0 memory for rows"):
        held.device(0, 100, "rows")
    assert ledger.outstanding() == ()
    address = held.pinned(100, "doorbells")
    held.release(address)


def test_undoing_takes_every_foreseen_error(make):
    runtime, _, _ = make()
    done = []

    def busy():
        raise EngineError("the device is still busy", "it did not end", "start again")

    with pytest.raises(EngineError, match="still busy"):
        undo_all(runtime, [busy, lambda: done.append(1), busy, lambda: done.append(2)])
    assert done == [1, 2]


def test_undoing_goes_on_after_a_failure(make):
    runtime, ledger, held = make(faults=SimFaults({"free": 2}))
    for n in range(4):
        held.device(0, 100 + n, "a test")
    with pytest.raises(Exception, match="free failed"):
        held.close()
    assert ledger.outstanding() == ()
    left = [item.block.address for item in runtime.places.allocations if not item.freed]
    assert len(left) == 1
    undo_all(runtime, [lambda: runtime.free(0, left[0])])
