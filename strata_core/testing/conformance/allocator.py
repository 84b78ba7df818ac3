"""The suite for allocators of host memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import pytest

from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import Allocator, AllocatorContext, Backend, Region, StartPolicy
from strata_core.machine import read_machine
from strata_core.memory.address import bytes_at

PAGE = 4096
SIZES = (1, 4095, 4096, 100_001, 3 << 20)


class AllocatorSuite:
    """Subclass it and supply `make`; `backend` where the allocator needs one that is built."""

    def make(self, context: AllocatorContext) -> Allocator:
        """Build the allocator under test."""
        raise NotImplementedError("a subclass of AllocatorSuite supplies make(context)")

    def backend(self) -> Backend:
        """The backend that the allocator works for: by default the one that needs nothing."""
        from strata_core.kernels.reference_backend import ReferenceBackend

        return ReferenceBackend()

    def options(self) -> dict[str, object]:
        """Settings to build with, by key; those not named have their defaults."""
        return {}

    @pytest.fixture
    def allocator(self) -> Iterator[Allocator]:
        """A built allocator; it and its backend are closed afterwards."""
        from strata_core.config import resolve_arguments

        degradations: list[Degradation] = []
        backend = self.backend()
        context = AllocatorContext(
            machine=read_machine(),
            options={**resolve_arguments({}, {}).options(), **self.options()},
            degrade=degradations.append,
            backend=backend,
        )
        devices = self._open(backend)
        made = self.make(context)
        if devices and hasattr(made, "contexts_ready"):
            made.contexts_ready(devices)
        yield made
        made.close()
        backend.close()

    @staticmethod
    def _open(backend: Any) -> Sequence[int]:
        """Open the contexts of a backend with devices, as a start does; the devices."""
        if not hasattr(backend, "open_contexts"):
            return ()
        backend.open_contexts()
        found: Sequence[int] = backend.devices
        return found

    def check_region(self, region: Region, nbytes: int, cuts: list[int], purpose: str) -> None:
        """What holds for every region."""
        assert region.nbytes >= nbytes, f"{nbytes} bytes were asked for, {region.nbytes} given"
        assert region.address % PAGE == 0, f"the region at {region.address:#x} is not page-aligned"
        assert region.purpose == purpose, "the region does not say what it is for"
        assert region.path, "the region does not say how it was had"
        at = region.address
        for span in region.spans:
            assert span.address == at, f"spans leave a hole, or overlap, at {at:#x}"
            at += span.nbytes
        assert at == region.address + region.nbytes, "the spans do not cover the region"
        ends = [s.address + s.nbytes - region.address for s in region.spans[:-1]]
        wrong = sorted(set(ends) - set(cuts))
        assert not wrong, f"spans end at {wrong}, which are none of the cuts"

    def check_aliases(self, region: Region) -> None:
        """Aliases belong to page-locked spans, and no two spans share device addresses."""
        ranges = sorted((s.alias, s.alias + s.nbytes) for s in region.spans if s.alias is not None)
        for (_, end), (begin, _) in pairwise(ranges):
            assert end <= begin, "the aliases of two spans overlap"
        loose = [s for s in region.spans if s.alias is not None and not s.pinned]
        assert not loose, "a span that is not page-locked has an alias"

    @pytest.mark.parametrize("nbytes", SIZES)
    def test_a_region_is_whole_and_can_be_written(self, allocator: Allocator, nbytes: int) -> None:
        """Page-aligned, covered by spans, every byte of it memory."""
        cuts = list(range(PAGE * 4, nbytes, PAGE * 4))
        region = allocator.reserve(nbytes, cuts, "conformance")
        self.check_region(region, nbytes, cuts, "conformance")
        self.check_aliases(region)
        whole = bytes_at(region.address, nbytes)
        whole[:] = 0x5A
        assert (whole == 0x5A).all(), "what was written into the region is not there"
        allocator.release(region)

    def test_spans_end_nowhere_without_cuts(self, allocator: Allocator) -> None:
        """No cuts, one span."""
        region = allocator.reserve(1 << 20, [], "one piece")
        self.check_region(region, 1 << 20, [], "one piece")
        allocator.release(region)

    def test_regions_do_not_overlap(self, allocator: Allocator) -> None:
        """Also with some given back in between; what one holds is not another's."""
        regions: list[tuple[int, Region]] = []
        for number in range(12):
            region = allocator.reserve(50_000 + 5_000 * number, [], f"region {number}")
            bytes_at(region.address, region.nbytes)[:] = number
            regions.append((number, region))
            if number % 3 == 2:
                allocator.release(regions.pop(0)[1])
        ranges = sorted((r.address, r.address + r.nbytes) for _, r in regions)
        for (_, end), (begin, _) in pairwise(ranges):
            assert end <= begin, "two regions overlap"
        for number, region in regions:
            kept = (bytes_at(region.address, region.nbytes) == number).all()
            assert kept, f"region {number} lost what was written into it"
            allocator.release(region)

    def test_many_threads_may_ask(self, allocator: Allocator) -> None:
        """Reserve, write, check, release from eight threads."""

        def work(number: int) -> bool:
            for _ in range(10):
                region = allocator.reserve(70_000, [], f"thread {number}")
                whole = bytes_at(region.address, region.nbytes)
                whole[:] = number
                if not (whole == number).all():
                    return False
                allocator.release(region)
            return True

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8))), "regions of two threads share memory"

    def test_what_cannot_be_had_is_refused_with_its_purpose(self, allocator: Allocator) -> None:
        """And the allocator goes on."""
        with pytest.raises(StrataError) as caught:
            allocator.reserve(1 << 60, [], "everything")
        assert "everything" in str(caught.value), "the error does not say what the memory is for"
        region = allocator.reserve(PAGE, [], "a page")
        self.check_region(region, PAGE, [], "a page")
        allocator.release(region)

    def test_the_start_policy_is_one(self, allocator: Allocator) -> None:
        """A `StartPolicy`, the same at every look."""
        assert isinstance(allocator.start_policy, StartPolicy), "start_policy is no StartPolicy"
        assert allocator.start_policy == allocator.start_policy, "start_policy changes"

    def test_closing_twice_is_harmless(self, allocator: Allocator) -> None:
        """With something still reserved."""
        allocator.reserve(PAGE, [], "left")
        allocator.close()
        allocator.close()
