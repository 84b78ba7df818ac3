"""The tiered file and sources without addresses on simulated devices: bits, lanes, faults."""

import time
from contextlib import closing

import numpy as np
import pytest
from attrs import evolve

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, Span, View
from strata_core.memory.host import HostAllocator
from strata_core.sources.mmap import MappedFile
from strata_core.testing.tiny import write_tiny_gguf

from ..sources.tier_bench import Faults, everything, make  # noqa: TID252 - tests have no name


class Registered(HostAllocator):
    """Host memory that a runtime page-locks, each region as one span with an alias."""

    def __init__(self, runtime):
        super().__init__()
        self.runtime = runtime

    def reserve(self, nbytes, cuts, purpose):
        region = super().reserve(nbytes, cuts, purpose)
        self.runtime.register(region.address, -(-nbytes // 4096) * 4096)
        alias = self.runtime.alias(region.address, 0)
        return evolve(region, spans=(Span(region.address, nbytes, alias, pinned=True),))

    def release(self, region):
        self.runtime.unregister(region.address)
        super().release(region)


class Bound:
    """A model on devices over a tier of `kept` experts; `faults` are those of its file."""

    def __init__(self, lab, checkpoint, kept, **options):
        self.lab, self.checkpoint, self.faults = lab, checkpoint, Faults()
        runtime = lab.runtime(aliases="apart")
        self.backend = lab.backend(runtime, **options)
        self.backend.open_contexts()
        # the tier keeps what is asked for least, so that the cache holds others
        order = list(reversed(everything(checkpoint)))
        self.source = make(
            checkpoint,
            kept,
            allocator=Registered(runtime),
            opener=self.faults.open,
            ranking=order,
        )
        self.executor = lab.bind(self.backend, checkpoint, self.source)

    def same(self, size):
        logits = self.lab.logits(self.executor, size=size)
        assert logits.tobytes() == self.lab.cpu(self.checkpoint).tobytes()

    def served(self):
        counters, asked = self.executor.counters(), self.executor.asked()
        # a layer's experts are asked for together, and computed by the CPU alone
        assert asked["requests"] <= asked["experts"] <= counters["cpu"]["experts"]
        assert (asked["answer_us"] > 0) == (asked["experts"] > 0)
        return {n: lane["experts"] for n, lane in counters.items()}

    def close(self):
        self.executor.close()
        self.source.close()
        self.lab.check_closed(self.backend)


SHARES = [0.0, 0.37, 1.0, "auto"]


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize(("cache", "kept"), [(0, 0), (0, 7), (1, 16), (8, 3), (16, 5), (5, 11)])
def test_any_tier_cache_and_share_has_the_bits_of_the_cpu(lab, tiny_file, cache, kept, share):
    bound = Bound(lab, tiny_file(), kept, expert_cache=cache, pcie_frac=share, threads=2)
    for size in (1, 8):
        bound.same(size)
    served = bound.served()
    assert sum(served.values()) == 2 * 24 * 2 * 2
    assert (served["hit"] > 0) == (cache > 0)
    # what has a cell in the tier has an alias
    if share in (0.0, 1.0):
        assert (served["pcie"] > 0) == (share == 1.0 and kept > 0 and cache < 16)
    bound.close()


@pytest.mark.parametrize("helpers", [(3,), (0, 5), (14,)])
def test_helpers_beside_a_tier(lab, tiny_file, helpers):
    asked = {f"expert_cache_device{n}": count for n, count in enumerate(helpers, 1)}
    bound = Bound(lab, tiny_file(), 4, expert_cache=2, pcie_frac=0.5, **asked)
    bound.same(3)
    served = bound.served()
    assert served["helper"] > 0
    assert (served["cpu"] + served["pcie"] > 0) == (sum(helpers) < 14), "2 and 14 are all experts"
    bound.close()


def test_what_is_there_is_computed_while_the_rest_is_read(lab, tiny_file):
    bound = Bound(lab, tiny_file(), 9, expert_cache=0, pcie_frac=0.0, threads=2)
    view, layers, seen = bound.source.view, bound.executor._maker.host.experts, []

    def late(expert):
        """Not before experts of its layer that are there were computed; it would hang otherwise."""
        limit = time.monotonic() + 120
        while not layers[expert.layer].served[0] and time.monotonic() < limit:
            time.sleep(0.001)
        seen.append(int(layers[expert.layer].served[0]))
        return view(expert)

    bound.source.view = late
    lab.logits(bound.executor, size=24)
    assert seen
    assert min(seen) > 0
    bound.source.view = view
    bound.same(1)
    bound.close()


@pytest.mark.parametrize("cache", [0, 8])
@pytest.mark.parametrize(("kind", "says"), [("eio", "Input/output error"), ("end", "ends at byte")])
def test_a_failed_read_names_expert_and_file_and_the_next_request_is_served(
    lab, tiny_file, kind, says, cache
):
    bound = Bound(lab, tiny_file(), 2, expert_cache=cache, pcie_frac=0.5, threads=2)
    bound.same(3)
    bound.source._ring.settle()
    for cell in bound.source._ring.block.cells:
        bound.source._ring.drop(cell)
    bound.faults.kind = kind
    with pytest.raises(StrataError, match=r"cannot read expert \d+ of layer \d+ from .*gguf") as e:
        lab.logits(bound.executor, size=1)
    assert says in e.value.why
    bound.faults.kind = None
    bound.same(1)
    bound.same(8)
    bound.close()


def test_short_reads_are_gone_on_with(lab, tiny_file):
    bound = Bound(lab, tiny_file(), 3, expert_cache=2)
    bound.faults.kind = "short"
    bound.same(5)
    bound.close()


def test_a_file_that_shrinks_and_one_that_vanishes(lab, tmp_path):
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    with closing(open_checkpoint(path)) as checkpoint:
        expected = lab.cpu(checkpoint)
        bound = Bound(lab, checkpoint, 3, expert_cache=2)
        moved = path.rename(tmp_path / "moved.gguf")
        logits = lab.logits(bound.executor, size=4)
        assert logits.tobytes() == expected.tobytes(), "an open file serves on"
        for cell in bound.source._ring.block.cells:
            bound.source._ring.drop(cell)
        whole = moved.read_bytes()
        # dense weights are mapped, so the file shrinks for unbuffered reads alone
        bound.faults.kind = "end"
        with pytest.raises(StrataError, match="cannot read expert"):
            lab.logits(bound.executor, size=1)
        assert moved.read_bytes() == whole
        bound.faults.kind = None
        assert lab.logits(bound.executor, size=1).tobytes() == expected.tobytes()
        bound.close()


class Failing:
    """A source of somebody else, without addresses; `broken` experts raise what is given."""

    def __init__(self, experts):
        self.source, self.held, self.broken = MappedFile(experts), [], {}
        self.read_into = self.source.read_into

    def begin_layer(self, layer, experts):
        if "begin" in self.broken:
            raise self.broken["begin"]

    def view(self, expert):
        if expert in self.broken:
            raise self.broken[expert]
        self.held.append(expert)
        return View(self.source.view(expert).parts, in_ram=True, stable=False)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        pass


@pytest.mark.parametrize("where", ["begin", "view"])
def test_what_a_source_raises_ends_the_round_and_no_later_one(lab, tiny_file, where):
    checkpoint = tiny_file()
    source = Failing(checkpoint.experts)
    backend = lab.backend(expert_cache=0, threads=2)
    executor = lab.bind(backend, checkpoint, source)
    every = [Expert(n, i) for n in checkpoint.experts.layouts for i in range(8)]
    source.broken = {key: ValueError("gone") for key in ("begin", *every[8:])}
    if where == "view":
        del source.broken["begin"]
    for size in (1, 24):
        with pytest.raises(ValueError, match="gone"):
            lab.logits(executor, size=size)
        assert source.held == []
    source.broken = {}
    logits = lab.logits(executor, size=1)
    assert np.isfinite(logits).all()
    assert logits.tobytes() == lab.cpu(checkpoint).tobytes()
    assert source.held == []
    lab.check_closed(backend, executor)
