"""Experts that a round asks for: the steps by themselves, and rounds over such sources."""

import ctypes
import gc
import itertools
import mmap
import os
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import Expert, Limits, View, Window
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.mailbox import (
    COUNT,
    FAILED,
    INDICES,
    LANDED,
    LAYER,
    MAILBOX_WORDS,
    write_function,
)
from strata_core.kernels.cpu.pool import Pool, yield_function
from strata_core.kernels.cpu.target import host_target
from strata_core.memory.platform.pages import PageHints, page_hints
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile
from strata_core.testing.tiny import write_tiny_gguf

LIMITS = Limits(tokens=40, logits=40, context=64, kv_type="fp16")
IDS = (np.arange(24) * 37 % 290 + 3).astype(np.int32)
EXPERTS = 8


@pytest.fixture(scope="module")
def library(cache):
    return Library(Compiler(host_target(), cache, print))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / "m.gguf"
    write_tiny_gguf(path)
    with closing(open_checkpoint(path)) as made:
        yield made


# --- the steps -----------------------------------------------------------------------------------


class Desk:
    """`ask` and `take` over one layer, with everything that they read and write."""

    def __init__(self, library, picks, there):
        self.picks = np.array(picks, np.int32)
        self.entries = np.array([len(picks)], np.int64)
        self.table = np.zeros((EXPERTS, 3), np.uint64)
        self.table[sorted(there)] = 64
        self.now, self.late = (np.full(len(picks), 7, np.int32) for _ in range(2))
        self.left = np.full(1, 7, np.int64)
        self.box = np.zeros(MAILBOX_WORDS, np.int64)
        self.pipe = os.pipe()
        self._run, self._library = library.runner(), library

    def _step(self, name, *args):
        words = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
        block = np.array(words, np.int64)
        self._run(self._library.address(Step(name)), block.ctypes.data, 0, 1)

    def ask(self):
        arrays = (self.picks, self.entries, self.table, self.now, self.late, self.left, self.box)
        self._step("ask", *arrays, 5, write_function(), self.pipe[1])

    def take(self, least, give_way=None):
        arrays = (self.late, self.entries, self.now, self.left, self.box)
        self._step("take", *arrays, least, give_way or yield_function())

    def announced(self):
        os.write(self.pipe[1], b".")
        return os.read(self.pipe[0], 9)[:-1]

    def close(self):
        for descriptor in self.pipe:
            os.close(descriptor)


PICKS = st.lists(st.integers(-1, EXPERTS - 1), min_size=1, max_size=40)


@settings(max_examples=40, deadline=None)
@given(PICKS, st.sets(st.integers(0, EXPERTS - 1)), st.data())
def test_each_pick_is_computed_once_and_only_when_it_is_there(library, picks, there, data):
    with closing(Desk(library, picks, there)) as desk:
        desk.ask()
        missing = list(dict.fromkeys(p for p in picks if p >= 0 and p not in there))
        assert desk.now.tolist() == [p if p in there else -1 for p in picks]
        assert desk.left[0] == len(missing)
        assert desk.announced() == (b"r" if missing else b"")
        done = [desk.now.copy()]
        landed = 0
        if missing:
            assert desk.box[[COUNT, LAYER, LANDED]].tolist() == [len(missing), 5, 0]
            assert desk.box[INDICES : INDICES + len(missing)].tolist() == missing
        while landed < len(missing):
            landed = data.draw(st.integers(landed + 1, len(missing)))
            desk.box[LANDED] = landed
            desk.take(data.draw(st.integers(1, landed)))
            assert set(desk.now.tolist()) <= {-1, *missing[:landed]}
            assert desk.left[0] == sum(p in missing[landed:] for p in picks)
            done.append(desk.now.copy())
        computed = np.array(done)
        assert ((computed >= 0).sum(axis=0) == [p >= 0 for p in picks]).all()
        assert computed.max(axis=0).tolist() == picks


def test_after_a_failure_nothing_is_waited_for_nor_asked(library):
    with closing(Desk(library, [1, 2, 3, 2], {1})) as desk:
        desk.ask()
        assert desk.announced() == b"r"
        desk.box[LANDED], desk.box[FAILED] = 1, 1
        desk.take(8)
        assert desk.now.tolist() == desk.late.tolist() == [-1] * 4
        assert desk.left[0] == 0
        desk.ask()
        assert desk.announced() == b""
        desk.take(8)
        assert desk.now.tolist() == [-1] * 4


def test_a_wait_ends_when_enough_has_landed(library):
    with closing(Desk(library, [4, 5, 6], set())) as desk:
        desk.ask()

        def land():
            """What the wait gives the processor away to: one more lands every third time."""
            gave_way.append(int(desk.box[LANDED]))
            desk.box[LANDED] = len(gave_way) // 3
            return 0

        gave_way = []
        give_way = ctypes.CFUNCTYPE(ctypes.c_int)(land)
        desk.take(2, ctypes.cast(give_way, ctypes.c_void_p).value)
        assert gave_way == [0, 0, 0, 1, 1, 1]
        assert desk.now.tolist() == [4, 5, -1]
        assert desk.late.tolist() == [-1, -1, 6]


ADVISE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def test_pages_of_each_expert_are_asked_for_once(library):
    seen = []
    call = ADVISE(lambda address, nbytes, advice: seen.append((address, nbytes, advice)) or 0)
    function = ctypes.cast(call, ctypes.c_void_p).value
    page = mmap.PAGESIZE
    table = np.array([[e * 100 * page + p * 10 * page + 5 for p in range(3)] for e in range(4)])
    picks, sizes = np.array([2, -1, 0, 2], np.int32), np.array([page, 7, 1], np.int64)
    entries = np.array([4], np.int64)
    args = [picks.ctypes.data, entries.ctypes.data, table.ctypes.data, sizes.ctypes.data]
    block = np.array([*args, function, 9], np.int64)
    library.runner()(library.address(Step("advise")), block.ctypes.data, 0, 1)
    assert seen == [
        (e * 100 * page + p * 10 * page or None, size + 5, 9)
        for e in (2, 0)
        for p, size in enumerate((page, 7, 1))
    ]


# --- rounds --------------------------------------------------------------------------------------


class Partly:
    """A source of which `stable` experts have addresses; the others come late, or not at all."""

    def __init__(self, experts, stable=(), delay=0.0):
        self.source, self.stable, self.delay = MappedFile(experts), set(stable), delay
        self.held, self.asked, self.broken, self.stable_version = [], [], set(), 0
        self.stuck, self.threads = set(), set()

    def stable_addresses(self, layer):
        places = self.source.addresses(layer)
        for index in range(len(places)):
            if Expert(layer, index) not in self.stable:
                places[index] = 0
        return places

    def begin_layer(self, layer, experts):
        self.threads.add(threading.get_ident())
        assert self.held == [], "what was asked for before is given back"
        self.asked += [Expert(layer, index) for index in experts]

    def view(self, expert):
        time.sleep(self.delay)
        if expert in self.broken:
            raise OSError(f"no {expert}")
        self.held.append(expert)
        return View(self.source.view(expert).parts, in_ram=True)

    def read_into(self, expert, buffer):
        return self.source.read_into(expert, buffer)

    def release(self, expert):
        self.held.remove(expert)
        if expert in self.stuck:
            raise OSError(f"{expert} is not taken back")

    def close(self):
        pass


def every(checkpoint):
    return [Expert(n, i) for n in checkpoint.experts.layouts for i in range(EXPERTS)]


def bound(checkpoint, library, pool, source):
    program = build_program(checkpoint.hyper)
    return CpuExecutor(program, checkpoint, checkpoint.experts, source, LIMITS, library, pool)


def logits(executor, size):
    slot = executor.open_sequence()
    rows = []
    for start in range(0, len(IDS), size):
        ids = IDS[start : start + size]
        window = Window(
            ids=ids,
            positions=np.arange(start, start + len(ids), dtype=np.int32),
            slots=np.full(len(ids), slot, np.int32),
            logits_rows=np.arange(len(ids), dtype=np.int32),
            kernel_class="window",
        )
        rows.append(executor.run(window).copy())
    executor.close_sequence(slot)
    return np.concatenate(rows).tobytes()


@pytest.fixture(scope="module")
def expected(checkpoint, library):
    with closing(Pool(library.compiler, 1)) as pool:
        return logits(bound(checkpoint, library, pool, MappedFile(checkpoint.experts)), 24)


@pytest.fixture(params=[1, 3])
def pool(library, request):
    with closing(Pool(library.compiler, request.param)) as made:
        yield made


@pytest.mark.parametrize("count", [0, 1, 8, 15, 16])
@pytest.mark.parametrize("delay", [0.0, 0.002])
def test_any_part_may_have_addresses(checkpoint, expected, library, pool, count, delay):
    source = Partly(checkpoint.experts, every(checkpoint)[::-1][:count], delay)
    with closing(bound(checkpoint, library, pool, source)) as executor:
        for size in (24,) if delay else (1, 5, 24):
            assert logits(executor, size) == expected
            assert source.held == []
        assert source.stable.isdisjoint(source.asked)
        assert (source.asked == []) == (count == 16)
        assert source.threads <= {threading.get_ident()}, "the engine's thread alone asks"
        served = sum(int(layer.served[0]) for layer in executor._experts.values())
        assert served == executor.counters()["cpu"]["experts"]
        assert served == (1 if delay else 3) * 24 * 2 * checkpoint.hyper.top_k


def test_addresses_may_change_between_rounds(checkpoint, expected, library, pool):
    source = Partly(checkpoint.experts)
    with closing(bound(checkpoint, library, pool, source)) as executor:
        for count in (0, 16, 3, 9):
            source.stable, source.asked = set(every(checkpoint)[:count]), []
            source.stable_version += 1
            assert logits(executor, 6) == expected
            assert source.stable.isdisjoint(source.asked)
            assert (source.asked == []) == (count == 16)


@pytest.mark.parametrize("size", [1, 24])
def test_a_failure_ends_its_round_alone(checkpoint, expected, library, pool, size):
    source = Partly(checkpoint.experts, every(checkpoint)[:4])
    with closing(bound(checkpoint, library, pool, source)) as executor:
        source.broken = set(every(checkpoint)[10:])
        with pytest.raises(OSError, match=r"no expert \d of layer 1"):
            logits(executor, size)
        assert source.held == []
        source.broken = set()
        for slot in list(executor._slots):
            executor.close_sequence(slot)
        assert logits(executor, size) == expected


@pytest.mark.parametrize("broken", [False, True])
@pytest.mark.parametrize("layers", [{0}, {1}, {0, 1}])
def test_views_are_given_back_whatever_a_release_raises(
    checkpoint, expected, library, pool, layers, broken
):
    source = Partly(checkpoint.experts)
    with closing(bound(checkpoint, library, pool, source)) as executor:
        source.stuck = {e for e in every(checkpoint) if e.layer in layers}
        source.broken = set(every(checkpoint)[10:]) if broken else set()
        first = f"layer {min(layers)} is not taken back"
        with pytest.raises(OSError, match="^no expert" if broken and layers == {1} else first):
            logits(executor, 24)
        assert source.held == []
        assert not any(layer.table.any() for layer in executor._experts.values())
        source.stuck, source.broken = set(), set()
        for slot in list(executor._slots):
            executor.close_sequence(slot)
        assert logits(executor, 24) == expected


def test_threads_and_pipes_are_given_back(checkpoint, library, pool):
    def open_files():
        folder = Path("/proc/self/fd")
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    gc.collect()  # files of earlier tests are closed now, not meanwhile
    before, threads = open_files(), set(threading.enumerate())
    for _ in range(3):
        with closing(bound(checkpoint, library, pool, Partly(checkpoint.experts))) as executor:
            logits(executor, 24)
        executor.close()
    assert open_files() == before
    assert set(threading.enumerate()) <= threads


# --- pages of a mapped file ----------------------------------------------------------------------


def test_a_mapped_file_with_hints_has_the_same_bits(checkpoint, expected, library, pool):
    hints = page_hints()
    if hints is None:
        pytest.skip("this system has no madvise")
    source = MappedFile(checkpoint.experts, hints)
    with closing(bound(checkpoint, library, pool, source)) as executor:
        assert all(logits(executor, size) == expected for size in (1, 24))
    buffer = bytearray(checkpoint.experts.layouts[0].nbytes + 8192)
    plain = bytearray(len(buffer))
    assert source.read_into(Expert(0, 3), memoryview(buffer)) == 0
    MappedFile(checkpoint.experts).read_into(Expert(0, 3), memoryview(plain))
    assert buffer == plain


def test_a_mapped_file_tells_which_pages_it_reads(checkpoint, library, pool):
    seen = []
    call = ADVISE(lambda address, nbytes, advice: seen.append((address, nbytes, advice)) or 0)
    hints = PageHints(ctypes.cast(call, ctypes.c_void_p).value, 1, 3)
    source = MappedFile(checkpoint.experts, hints)
    assert {advice for *_, advice in seen} == {1}
    assert len(seen) == 2 * EXPERTS * 3
    covered = {(s, s + n) for s, n, _ in seen}
    seen.clear()
    with closing(bound(checkpoint, library, pool, source)) as executor:
        logits(executor, 24)
        asked = {n: np.flatnonzero(count) for n, count in executor.picks().items()}
    assert {advice for *_, advice in seen} == {3}
    assert len(seen) == 3 * sum(map(len, asked.values()))
    assert {(s, s + n) for s, n, _ in seen} <= covered
    for layer, index in itertools.chain(*([(n, i) for i in found] for n, found in asked.items())):
        for address in source.view(Expert(layer, int(index))).parts:
            assert any(s <= address < s + n for s, n, _ in seen)
