"""What core offers itself passes the suites that it asks plugins to pass."""

from __future__ import annotations

from pathlib import Path

import pytest
from attrs import evolve

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    Backend,
    BackendContext,
    Source,
    SourceContext,
)
from strata_core.kernels.cpu import backend as cpu
from strata_core.kernels.reference_backend import ReferenceBackend
from strata_core.memory.host import HostAllocator
from strata_core.sources import arena, mmap, sliced_pinned, tiered_file
from strata_core.testing.conformance import AllocatorSuite, BackendSuite, SourceSuite
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

BUDGET = 600_000
"""Bytes of host memory that hold a part of the experts of either model."""


class Gguf:
    """Quantised experts instead of the suite's floats."""

    def checkpoint(self, folder: Path) -> Checkpoint:
        hyper = tiny_hyper(experts=5, layers=3, dense_layers=frozenset({1}))
        write_tiny_gguf(folder / "m.gguf", hyper=hyper, expert_type="Q4_K")
        return open_checkpoint(folder / "m.gguf")


class TestArena(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        return arena.build(context)


class TestArenaOfQuantised(Gguf, TestArena):
    pass


class TestMappedFile(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        return mmap.build(context)


class TestMappedQuantised(Gguf, TestMappedFile):
    pass


class TestResident(Gguf, SourceSuite):
    def options(self) -> dict[str, object]:
        return {"tier_verify": True}

    def make(self, context: SourceContext) -> Source:
        return sliced_pinned.build(context)


class TestTier(SourceSuite):
    """A part of the experts in memory; in a hub folder an expert is three ranges."""

    def make(self, context: SourceContext) -> Source:
        return tiered_file.build(evolve(context, budget=BUDGET))

    def test_any_order_of_calls_is_served(self, model: Checkpoint) -> None:
        pytest.skip("its ring holds experts of one layer at a time; see sources/test_tier_machine")


class TestTierOfQuantised(Gguf, TestTier):
    def options(self) -> dict[str, object]:
        return {"tier_verify": True}


class TestHost(AllocatorSuite):
    def make(self, context: AllocatorContext) -> Allocator:
        return HostAllocator()


class TestReference(BackendSuite):
    def make(self, context: BackendContext) -> Backend:
        return ReferenceBackend()


class TestCpu(BackendSuite):
    @pytest.fixture(autouse=True)
    def kernels(self, compiled_kernels: Path) -> None:
        self.folder = compiled_kernels.parent

    def options(self) -> dict[str, object]:
        return {"threads": 2, "cache_dir": self.folder}

    def make(self, context: BackendContext) -> Backend:
        return cpu.build(context)


class TestCpuQuantised(Gguf, TestCpu):
    pass
