"""The adaptive cache in rounds: the CPU's bits at every pace, hits that rise, failures undone."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest
from adapting_bench import SOURCES, TEXT, Bound
from attrs import evolve

from strata_core.cache.adaptive import Pair
from strata_core.cache.swaps import Swapper
from strata_core.errors import EngineError, StrataError
from strata_core.interfaces import Expert
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.device import backend
from strata_core.model.build import build_program
from strata_core.sources import sliced_pinned
from strata_core.sources.mmap import MappedFile
from strata_core.testing.jobs import AtOnce
from strata_core.testing.sim import VERBS, SimFaults

NOT_REACHED = ("mmap", "resident, pageable")
"""Kinds of which no expert has an address that a device reads."""


def told_of_share(lab, kind, share):
    """Take the degradation of a share that nothing can take; whether it is there where due."""
    told = [d for d in lab.degradations if d.what == f"--pcie-frac {share:g} has no effect"]
    for item in told:
        lab.degradations.remove(item)
    return len(told) == (share > 0 and kind in NOT_REACHED)


@pytest.fixture(scope="module")
def expected(library, tiny_file):
    found = {}

    def make(lab, checkpoint):
        if id(checkpoint) not in found:
            found[id(checkpoint)] = lab.cpu(checkpoint, ids=TEXT).tobytes()
        return found[id(checkpoint)]

    return make


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize(("cache", "every", "share"), [(1, 1, 0), (8, 4, 0.5), (5, 1, 1)])
def test_bits_do_not_depend_on_who_changes_places(
    lab, tools, tiny_file, expected, kind, cache, every, share
):
    checkpoint = tiny_file()
    bound = Bound(
        lab, tools, checkpoint, kind, expert_cache=cache, adapt_every=every, pcie_frac=share
    )
    for _ in range(2):
        assert bound.logits().tobytes() == expected(lab, checkpoint)
    counters = bound.executor.counters()
    assert counters["entered"]["experts"] > 0
    assert counters["entered"]["undone"] == 0
    if isinstance(bound.source, sliced_pinned.SlicedPinned):
        assert counters["left"]["experts"] > 0
        file = bound.source.counters()["file"]
        assert file["differ"] == 0
        assert file["verified"] >= counters["left"]["experts"]
    else:
        assert counters["left"]["experts"] == 0, "nothing leaves what every expert lies in"
    assert told_of_share(lab, kind, share)
    assert lab.degradations == []
    bound.close()


@pytest.mark.parametrize(
    ("kind", "cache", "more"),
    [
        ("mmap", 5, {}),
        ("mmap", 5, {"expert_cache_device1": 4}),
        ("resident, pageable", 0, {}),
        ("mmap", 16, {}),
        ("mmap", 12, {"expert_cache_device1": 4}),
        ("resident", 5, {}),
        ("resident, a part page-locked", 5, {}),
    ],
)
@pytest.mark.parametrize("share", [0, 0.5, 1, "auto"])
@pytest.mark.parametrize("every", [0, 1])
def test_a_share_that_nothing_can_take_is_reported(
    lab, tools, tiny_file, kind, cache, more, share, every
):
    options = {"expert_cache": cache, "pcie_frac": share, "adapt_every": every, **more}
    bound = Bound(lab, tools, tiny_file(), kind, **options)
    misses = cache + more.get("expert_cache_device1", 0) < 16
    without = share not in (0, "auto") and kind in NOT_REACHED and misses
    told = [d for d in lab.degradations if d.what.endswith("has no effect")]
    assert [d.what for d in told] == ([f"--pcie-frac {share} has no effect"] if without else [])
    assert all("--source arena" in d.remedy for d in told)
    bound.close()


@pytest.fixture
def at_leisure(monkeypatch):
    """What is done beside a round is done before it, and rounds wait for reads: nothing is late."""
    monkeypatch.setattr(backend, "Beside", lambda name: AtOnce())
    tick = Swapper.tick

    def wait_and_tick(swapper, pairs):
        jobs = [job for swap in swapper._open for job in (swap.reading, swap.storing)]
        wait([job for job in jobs if job is not None])
        return tick(swapper, pairs)

    monkeypatch.setattr(Swapper, "tick", wait_and_tick)


@pytest.mark.usefixtures("at_leisure")
def test_hits_rise_where_the_text_asks_for_few(lab, tools, tiny_file):
    checkpoint = tiny_file()
    hits = {}
    for every in (0, 1, 4):
        bound = Bound(lab, tools, checkpoint, "resident", expert_cache=6, adapt_every=every)
        bound.logits(np.repeat(TEXT[:4], 8))
        bound.logits(np.repeat(TEXT[-4:], 8))
        hits[every] = bound.executor.counters()["hit"]["experts"]
        bound.close()
    assert hits[1] > hits[0] * 1.2
    assert hits[4] > hits[0] * 1.1


@pytest.mark.parametrize("kind", ["arena", "resident"])
def test_where_the_link_reaches_everything_rounds_stay_one_graph(
    lab, tools, tiny_file, expected, kind
):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, kind, expert_cache=6, pcie_frac=1)
    assert bound.logits().tobytes() == expected(lab, checkpoint)
    counters = bound.executor.counters()
    assert counters["entered"]["experts"] > 0
    assert counters["cpu"]["experts"] == 0
    whole = {ready.dispatch for ready in bound.executor._rounds.values()} == {"device"}
    assert whole == (kind == "arena"), "places of the resident ones change hands"
    bound.close()


def test_prompts_are_counted_and_not_followed(lab, tools, tiny_file):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, expert_cache=5)
    executor = bound.executor
    slot = executor.open_sequence()
    for start in range(0, len(TEXT) // 20 * 20, 20):
        ids = TEXT[start : start + 20]
        executor.run(tools.window(ids, start=start, slot=slot, rows=[19]))
    assert executor.counters()["entered"]["experts"] == 0
    picks = executor.picks()
    wanted = len(TEXT) // 20 * 20 * checkpoint.hyper.top_k
    assert [int(row.sum()) for row in picks.values()] == [wanted] * len(picks)
    executor.close_sequence(slot)
    bound.close()


@pytest.mark.parametrize("options", [{}, {"expert_cache_device1": 4}, {"pcie_frac": 1}])
def test_picks_are_those_that_the_cpu_counts(lab, tools, tiny_file, options):
    checkpoint = tiny_file({"layers": 4, "dense_layers": frozenset({0, 2})})
    pool = Pool(lab.library.compiler, 1)
    source = MappedFile(checkpoint.experts)
    program = build_program(checkpoint.hyper)
    cpu = CpuExecutor(
        program, checkpoint, checkpoint.experts, source, tools.limits, lab.library, pool
    )
    bound = Bound(lab, tools, checkpoint, "arena", expert_cache=5, **options)
    for size in (1, 7, 20):
        lab.logits(cpu, TEXT, size)
        bound.logits(size=size)
    mine, its = bound.executor.picks(), cpu.picks()
    assert list(mine) == list(its)
    assert all((mine[layer] == its[layer]).all() for layer in its)
    pool.close()
    bound.close()


def test_helpers_keep_what_they_have(lab, tools, tiny_file, expected):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, "resident", expert_cache=4, expert_cache_device1=5)
    (helper,) = bound.executor._maker.helpers
    before = dict(helper.pool.places)
    for _ in range(2):
        assert bound.logits().tobytes() == expected(lab, checkpoint)
    counters = bound.executor.counters()
    assert counters["entered"]["experts"] > 0
    assert counters["helper"]["experts"] > 0
    assert helper.pool.places == before
    bound.close()


@pytest.mark.parametrize("cache", [0, 16])
def test_nothing_is_taken_where_nobody_can_enter(lab, tools, tiny_file, cache):
    bound = Bound(lab, tools, tiny_file(), expert_cache=cache)
    assert "entered" not in bound.executor.counters()
    purposes = {claim.purpose for claim in bound.backend.ledger.outstanding()}
    assert "buffers that experts change places through" not in purposes
    bound.close()


def test_spares_come_out_of_an_auto_cache_and_beside_one_of_a_given_size(lab, tools, tiny_file):
    checkpoint = tiny_file()
    blob = checkpoint.experts.layouts[0].nbytes
    taken = {}
    for cache, every in ((8, 0), (8, 1), ("auto", 0), ("auto", 1)):
        vram = taken[8, 0] + 2 * blob if cache == "auto" else 1 << 30
        runtime = lab.runtime(vram=(vram,))
        bound = Bound(lab, tools, checkpoint, runtime=runtime, expert_cache=cache,
                      adapt_every=every, vram_reserve_mib=0)  # fmt: skip
        pool = bound.executor._adaptation.swapper.pool if every else None
        spare = sum(map(len, pool.spare.values())) if pool else 0
        taken[cache, every] = bound.backend.ledger.used("vram0")
        assert (spare > 0) == bool(every)
        bound.close()
    assert taken[8, 1] - taken[8, 0] == -(-blob // 256) * 256
    assert 0 <= taken["auto", 0] - taken["auto", 1] <= -(-blob // 256) * 256


def test_a_cache_that_leaves_no_room_for_spares_stays_as_it_is(lab, tools, tiny_file, expected):
    checkpoint = tiny_file()
    probe = Bound(lab, tools, checkpoint, expert_cache=8, adapt_every=0)
    nbytes = probe.backend.ledger.used("vram0")
    probe.close()
    runtime = lab.runtime(vram=(nbytes + 4096,))
    bound = Bound(lab, tools, checkpoint, runtime=runtime, expert_cache=8)
    (told,) = [d for d in lab.degradations if "change places" in d.what]
    assert told.what == "experts do not change places on SIM0"
    assert "--expert-cache" in told.why
    assert bound.logits().tobytes() == expected(lab, checkpoint)
    bound.close()


SWAP_VERBS = ("copy", "record", "wait", "finished", "create_event")


def test_swaps_take_few_verbs_and_wait_for_nothing(lab, tools, tiny_file):
    bound = Bound(lab, tools, tiny_file(), "resident", expert_cache=6)
    before = bound.backend.runtime.calls()
    bound.logits()
    assert bound.executor._adaptation.swapper.counts.entered > 0
    after = bound.backend.runtime.calls()
    called = {verb for verb in VERBS if after.get(verb, 0) != before.get(verb, 0)}
    assert called == {*SWAP_VERBS, "graph_launcher"}
    bound.close()


@pytest.mark.parametrize("kind", ["arena", "resident", "resident, a part page-locked"])
def test_a_swap_asks_the_source_for_its_own_experts_alone(lab, tools, tiny_file, kind):
    bound = Bound(lab, tools, tiny_file(), kind, expert_cache=6, pcie_frac=0.5, tier_verify=False)
    source, asked = bound.source, []
    view = source.view
    source.view = lambda expert: asked.append(expert) or view(expert)
    source.addresses = lambda layer: pytest.fail(f"all experts of layer {layer} are asked for")
    bound.logits()
    counts = bound.executor._adaptation.swapper.counts
    assert counts.entered > 0
    swaps = counts.entered + counts.undone + bound.executor._adaptation.swapper.under_way
    assert len(asked) <= 6 * swaps, "a fixed number for each swap, however many experts there are"
    bound.close()


@pytest.fixture
def swapped(lab, tools, tiny_file):
    """A bound model, and of the second layer a pair that may change places with a spare slot."""
    bound = Bound(lab, tools, tiny_file(), expert_cache=6)
    adaptation = bound.executor._adaptation
    pool, layouts = adaptation.swapper.pool, bound.checkpoint.experts.layouts
    layer = sorted(layouts)[1]
    leaving = next(e for e in sorted(pool.places) if e.layer == layer)
    others = (Expert(layer, i) for i in range(bound.checkpoint.experts.count))
    entering = next(e for e in others if e not in pool.places)
    slot = pool.take_spare(layouts[layer])
    yield adaptation.table, (Pair(leaving, entering), slot)
    pool.give_spare(layouts[layer], slot)
    bound.close()


def test_only_layers_with_a_swap_are_copied(swapped, monkeypatch):
    table, swap = swapped
    layer, copied = swap[0].entering.layer, []
    real = table.runtime.copy
    monkeypatch.setattr(
        table.runtime, "copy", lambda *given: copied.append(given) or real(*given), raising=False
    )
    table.publish([swap])
    cells = table.cells.layers[layer]
    ((target, source, nbytes, _),) = copied
    assert (source, nbytes) == (cells.ctypes.data, cells.nbytes)
    assert target - table.target == source - table.mirror
    assert nbytes < table.nbytes


def test_the_wait_for_the_last_copy_is_bounded(swapped, monkeypatch):
    table, swap = swapped
    table.publish([swap])
    before = {layer: cells.tobytes() for layer, cells in table.cells.layers.items()}
    version, table.patience = table.cells.version, 0.01
    with monkeypatch.context() as patch:
        patch.setattr(table.runtime, "finished", lambda event: False, raising=False)
        with pytest.raises(EngineError, match="the copy of the table of cells"):
            table.publish([swap])
        table.patience = 120.0
    assert {layer: cells.tobytes() for layer, cells in table.cells.layers.items()} == before
    assert table.cells.version == version
    table.publish([swap])
    assert table.cells.version == version + 1


@pytest.mark.parametrize("kind", ["arena", "resident, pageable"])
@pytest.mark.parametrize("verb", SWAP_VERBS)
def test_a_verb_that_fails_in_a_swap_changes_no_token(lab, tools, tiny_file, expected, verb, kind):
    checkpoint = tiny_file()
    counted = Bound(lab, tools, checkpoint, kind, expert_cache=6, pcie_frac=0.5)
    begin = counted.backend.runtime.calls().get(verb, 0)
    counted.logits()
    last = counted.backend.runtime.calls().get(verb, 0)
    counted.close()
    assert told_of_share(lab, kind, 0.5)
    chosen = range(begin + 1, last + 1)
    if len(chosen) > 3:
        chosen = [begin + 1, begin + 2, (begin + last) // 2]
    for nth in chosen:
        runtime = lab.runtime(faults=SimFaults({verb: nth}))
        bound = Bound(lab, tools, checkpoint, kind, runtime, expert_cache=6, pcie_frac=0.5)
        assert bound.logits().tobytes() == expected(lab, checkpoint)
        assert told_of_share(lab, kind, 0.5)
        if runtime.calls().get(verb, 0) >= nth and lab.degradations:
            assert "no longer change places on SIM0" in lab.degradations.pop().what
        assert lab.degradations == []
        bound.close()


def test_a_read_that_fails_leaves_the_expert_where_it_is(lab, tools, tiny_file, expected):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, expert_cache=6)
    bound.source.read_into = lambda expert, buffer: 1 // 0
    for _ in range(2):
        assert bound.logits().tobytes() == expected(lab, checkpoint)
    counters = bound.executor.counters()["entered"]
    assert counters["experts"] == 0
    assert counters["undone"] > 0
    assert len(lab.degradations) == 1
    bound.close()


def test_a_prompt_names_the_read_that_it_waits_for_and_the_next_one_waits_again(
    lab, tools, tiny_file, monkeypatch
):
    # a plan that is late on a busy machine would begin no swap in so few rounds
    monkeypatch.setattr(backend, "Beside", lambda name: AtOnce())
    bound = Bound(lab, tools, tiny_file(), expert_cache=6)
    executor, swapper = bound.executor, bound.executor._adaptation.swapper
    read_into, slow = bound.source.read_into, threading.Event()
    bound.source.read_into = lambda *args: slow.wait(120) and read_into(*args)
    bound.logits(TEXT[:9])
    assert swapper.under_way > 0
    slot = executor.open_sequence()
    prompt = evolve(tools.window(TEXT[:20], slot=slot, rows=[19]), kernel_class="prompt")
    swapper.patience = 0.05
    with pytest.raises(StrataError, match="still on their way") as caught:
        executor.run(prompt)
    swapper.patience = 120.0
    assert "the source did not read expert" in caught.value.why
    assert "disk" in caught.value.remedy
    slow.set()
    assert np.isfinite(executor.run(prompt)).all()
    assert swapper.under_way == 0
    assert lab.degradations == []
    executor.close_sequence(slot)
    bound.close()
