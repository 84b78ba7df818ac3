"""Whole models on the cpu backend: bits of the exact mode, whatever the window, threads, source."""

from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from strata_core.checkpoint.hyper import Rope
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import EngineError, UsageError
from strata_core.interfaces import Limits, Window
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.target import host_target
from strata_core.kernels.exact_kernels import EXACT_KERNELS, matrices
from strata_core.kernels.interpreter import Interpreter
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

LIMITS = Limits(tokens=40, logits=40, context=64, kv_type="fp16")
IDS = (np.arange(24) * 37 % 290 + 3).astype(np.int32)


class Paused:
    """A source without stable addresses: every expert is acquired and released."""

    def __init__(self, source):
        self.source, self.held, self.begun = source, [], []

    def begin_layer(self, layer, experts):
        self.begun.append((layer, list(experts)))

    def view(self, expert):
        self.held.append(expert)
        return self.source.view(expert)

    def read_into(self, expert, buffer):
        return self.source.read_into(expert, buffer)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        pass


def window(ids, start=0, slot=0, rows=None):
    ids = np.asarray(ids, np.int32)
    rows = np.arange(len(ids)) if rows is None else rows
    return Window(
        ids=ids,
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        slots=np.full(len(ids), slot, np.int32),
        logits_rows=np.asarray(rows, np.int32),
        kernel_class="window",
    )


@pytest.fixture(scope="module")
def library(cache):
    return Library(Compiler(host_target(), cache, print))


@pytest.fixture(scope="module")
def pools(library):
    made = {n: Pool(library._compiler, n) for n in (1, 2, 5)}
    yield made
    for pool in made.values():
        pool.close()


def bound(checkpoint, library, pool, source=None, limits=LIMITS):
    program = build_program(checkpoint.hyper)
    source = source or MappedFile(checkpoint.experts)
    return CpuExecutor(program, checkpoint, checkpoint.experts, source, limits, library, pool)


def exactly(checkpoint, limits=LIMITS):
    program = build_program(checkpoint.hyper)
    source = MappedFile(checkpoint.experts)
    dense = matrices(program, checkpoint)
    return Interpreter(program, EXACT_KERNELS, dense, checkpoint.experts, source, limits)


def first_run(executor, ids=IDS):
    slot = executor.open_sequence()
    logits = executor.run(window(ids, slot=slot)).copy()
    executor.close_sequence(slot)
    return logits


@pytest.fixture(scope="module", params=["Q8_0", "Q4_K", "F16"])
def tiny(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny") / f"{request.param}.gguf"
    write_tiny_gguf(path, expert_type=request.param)
    with closing(open_checkpoint(path)) as checkpoint:
        yield checkpoint


@pytest.fixture(scope="module")
def expected(tiny):
    return first_run(exactly(tiny))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_run_has_the_bits_of_the_exact_mode(tiny, expected, library, pools, threads):
    logits = first_run(bound(tiny, library, pools[threads]))
    assert np.isfinite(logits).all()
    assert logits.tobytes() == expected.tobytes()


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 9])
def test_windows_of_any_size_have_the_same_bits(tiny, expected, library, pools, size):
    executor = bound(tiny, library, pools[2])
    slot = executor.open_sequence()
    rows = [
        executor.run(window(IDS[i : i + size], start=i, slot=slot)).copy()
        for i in range(0, len(IDS), size)
    ]
    assert np.concatenate(rows).tobytes() == expected.tobytes()


def test_several_sequences_share_a_window(tiny, expected, library, pools):
    executor = bound(tiny, library, pools[2])
    slots = [executor.open_sequence() for _ in range(3)]
    for slot in slots[1:]:
        executor.run(window(IDS[:5], slot=slot))
    parts = [window(IDS[:8], slot=slots[0]), window(IDS[5:9], start=5, slot=slots[1])]
    parts.append(window(IDS[5:6], start=5, slot=slots[2]))
    joined = Window(
        ids=np.concatenate([p.ids for p in parts]),
        positions=np.concatenate([p.positions for p in parts]),
        slots=np.concatenate([p.slots for p in parts]),
        logits_rows=np.arange(13, dtype=np.int32),
        kernel_class="window",
    )
    logits = executor.run(joined)
    assert logits[:8].tobytes() == expected[:8].tobytes()
    assert logits[8:12].tobytes() == expected[5:9].tobytes()
    assert logits[12].tobytes() == expected[5].tobytes()


def test_a_source_without_stable_addresses_gives_the_same_bits(tiny, expected, library, pools):
    source = Paused(MappedFile(tiny.experts))
    executor = bound(tiny, library, pools[2], source)
    assert first_run(executor).tobytes() == expected.tobytes()
    assert source.held == []
    assert sorted({layer for layer, _ in source.begun}) == sorted(tiny.experts.layouts)
    slot = executor.open_sequence()
    for i, token in enumerate(IDS[:6]):
        logits = executor.run(window([token], start=i, slot=slot))
        assert logits[0].tobytes() == expected[i].tobytes()


def test_rolling_back_forgets_later_positions(tiny, expected, library, pools):
    executor = bound(tiny, library, pools[2])
    slot = executor.open_sequence()
    executor.run(window(IDS[:6], slot=slot))
    snapshot = executor.save(slot, 6)
    executor.run(window([7, 8, 9], start=6, slot=slot))
    executor.restore(slot, snapshot)
    logits = executor.run(window(IDS[6:9], start=6, slot=slot))
    assert logits.tobytes() == expected[6:9].tobytes()


def test_wanted_rows_only(tiny, expected, library, pools):
    executor = bound(tiny, library, pools[1])
    slot = executor.open_sequence()
    assert executor.run(window(IDS[:9], slot=slot, rows=[])).shape[0] == 0
    logits = executor.run(window(IDS[9:12], start=9, slot=slot, rows=[2, 0]))
    assert logits.tobytes() == expected[[11, 9]].tobytes()


def test_counters_count_picks_and_their_bytes(tiny, library, pools):
    executor = bound(tiny, library, pools[2])
    first_run(executor)
    layouts = tiny.experts.layouts
    picks = len(IDS) * tiny.hyper.top_k
    total = sum(layout.nbytes * picks for layout in layouts.values())
    assert executor.counters() == {"cpu": {"experts": picks * len(layouts), "bytes": total}}


def test_too_large_a_window_is_refused(tiny, library, pools):
    executor = bound(tiny, library, pools[1])
    with pytest.raises(EngineError, match="too big"):
        executor.run(window(np.zeros(41)))


def test_kv_types(tiny, library, pools):
    for kv_type in ("fp32", "int8"):
        limits = Limits(40, 40, 64, kv_type)
        if kv_type == "int8" and tiny.hyper.head_dim % 32:
            continue
        logits = first_run(bound(tiny, library, pools[2], limits=limits))
        if kv_type == "fp32":
            assert logits.tobytes() == first_run(exactly(tiny, limits)).tobytes()
        assert np.isfinite(logits).all()


def test_what_cannot_be_computed_is_refused_by_name(tmp_path, library, pools):
    path = tmp_path / "narrow.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(head_dim=16, rope=Rope(1e4, 16)))
    with closing(open_checkpoint(path)) as checkpoint:
        limits = Limits(40, 40, 64, "int8")
        with pytest.raises(UsageError, match="--kv int8") as caught:
            bound(checkpoint, library, pools[1], limits=limits).prepare("single")
        assert "16 elements" in caught.value.why


@pytest.mark.shared
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"])
def test_families_have_the_bits_of_the_exact_mode(models: Path, library, pools, family):
    with closing(open_checkpoint(models / "tiny" / family)) as checkpoint:
        expected = first_run(exactly(checkpoint))
        assert first_run(bound(checkpoint, library, pools[2])).tobytes() == expected.tobytes()


@pytest.mark.shared
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0", "Q4_K_M", "MXFP4"])
def test_a_trained_model_has_the_bits_of_the_exact_mode(models: Path, library, pools, name):
    with closing(open_checkpoint(models / "kjv-moe" / f"kjv-{name}.gguf")) as checkpoint:
        ids = IDS[:6]
        expected = first_run(exactly(checkpoint), ids)
        executor = bound(checkpoint, library, pools[2])
        assert first_run(executor, ids).tobytes() == expected.tobytes()
