"""The part of the suite for a runtime that is about devices, memory and copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from strata_core.errors import DeviceError, Refused
from strata_core.memory.address import bytes_at
from strata_core.runtime import Runtime
from strata_core.testing.conformance.runtime_base import (
    MIB,
    PAGE,
    Bench,
    RuntimeBase,
    pages,
    pattern,
)


class MemorySuite(RuntimeBase):
    """Devices, allocation, page-locked memory, copies."""

    def test_it_has_all_verbs(self, runtime: Runtime) -> None:
        """The protocol is checked by name."""
        assert isinstance(runtime, Runtime)

    def test_devices_are_counted_from_zero(self, runtime: Runtime) -> None:
        """Labels are the runtime's with the index; the facts are there."""
        for index, device in enumerate(runtime.devices()):
            assert device.index == index
            assert device.label == f"{runtime.label}{index}"
            assert device.name
            assert device.architecture
            assert device.units > 0
            assert device.warp > 0

    def test_a_context_is_opened_once(self, runtime: Runtime) -> None:
        """A second time does nothing, and costs nothing."""
        before = runtime.memory(0)
        runtime.open_context(0)
        assert runtime.memory(0).free >= before.free - MIB
        assert 0 < before.free <= before.total

    def test_free_memory_follows_allocations(self, runtime: Runtime) -> None:
        """What is taken is not free any more, until it is given back."""
        before = runtime.memory(0).free
        address = runtime.alloc(0, 64 * MIB)
        assert address % 256 == 0
        during = runtime.memory(0).free
        assert during <= before - 64 * MIB
        runtime.free(0, address)
        assert runtime.memory(0).free >= during + 64 * MIB

    def test_allocations_do_not_overlap(self, bench: Bench) -> None:
        """Each holds its own bytes; all are aligned."""
        sizes = [1, 255, 256, 257, 4096, 70_001]
        data = [pattern(nbytes, seed) for seed, nbytes in enumerate(sizes)]
        places = [bench.put(piece) for piece in data]
        for place, piece in zip(places, data, strict=True):
            assert place % 256 == 0
            assert (bench.get(place, piece.size) == piece).all()
            bench.runtime.free(0, place)

    @pytest.mark.parametrize("verb", ["alloc", "host_alloc"])
    def test_a_refusal_changes_nothing(self, bench: Bench, verb: str) -> None:
        """Asking for too much raises Refused; after take_error everything works as before."""
        runtime = bench.runtime
        kept = bench.put(pattern(1000))
        before = runtime.memory(0).free
        for _ in range(2):
            ask: Callable[[], int] = partial(runtime.alloc, 0, before + (64 << 30))
            if verb == "host_alloc":
                ask = partial(runtime.host_alloc, 1 << 52)
            with pytest.raises(Refused):
                ask()
            runtime.take_error()
            assert runtime.take_error() is None
        assert runtime.memory(0).free >= before - MIB
        assert (bench.get(kept, 1000) == pattern(1000)).all()

    def test_a_refusal_is_pending_for_its_own_thread_alone(self, bench: Bench) -> None:
        """Neither fails the verbs of another thread, nor is taken by it."""
        runtime = bench.runtime
        too_much = runtime.memory(0).free + (64 << 30)
        with ThreadPoolExecutor(1) as other:
            with pytest.raises(Refused):
                other.submit(runtime.alloc, 0, too_much).result()
            runtime.free(0, runtime.alloc(0, PAGE))
            assert runtime.take_error() is None
            other.submit(runtime.take_error).result()
            runtime.free(0, other.submit(runtime.alloc, 0, PAGE).result())

    def test_without_an_error_none_is_taken(self, runtime: Runtime) -> None:
        """take_error is quiet."""
        assert runtime.take_error() is None

    @pytest.mark.parametrize("kind", ["pageable", "pinned", "registered"])
    def test_copies_in_every_direction(self, bench: Bench, kind: str) -> None:
        """Host to device, device to device, device to host, at odd places and sizes."""
        runtime, data = bench.runtime, pattern(3 * PAGE)
        with pages(3) as host:
            address = runtime.host_alloc(3 * PAGE) if kind == "pinned" else host
            if kind == "registered":
                runtime.register(host, 3 * PAGE)
            bytes_at(address, 3 * PAGE)[:] = data
            first, second = (runtime.alloc(0, 3 * PAGE) for _ in range(2))
            for offset, nbytes in ((0, 3 * PAGE), (1, 1), (PAGE - 3, 7), (5, 2 * PAGE + 1)):
                runtime.copy(first, address + offset, nbytes, bench.stream)
                runtime.copy(second + 1, first, nbytes - 1, bench.stream)
                runtime.synchronize(bench.stream)
                bytes_at(address, 3 * PAGE)[:] = 0
                runtime.copy(address + offset, first, 1, bench.stream)
                if nbytes > 1:
                    runtime.copy(address + offset + 1, second + 2, nbytes - 2, bench.stream)
                runtime.synchronize(bench.stream)
                want = data[offset : offset + max(nbytes - 1, 1)]
                assert (bytes_at(address + offset, want.size) == want).all()
                bytes_at(address, 3 * PAGE)[:] = data
            if kind == "registered":
                runtime.unregister(host)
            if kind == "pinned":
                runtime.host_free(address)

    def test_a_copy_within_the_host(self, bench: Bench) -> None:
        """Page-locked memory to page-locked memory."""
        runtime, data = bench.runtime, pattern(5000)
        source, target = runtime.host_alloc(5000), runtime.host_alloc(5000)
        bytes_at(source, 5000)[:] = data
        runtime.copy(target, source, 5000, bench.stream)
        runtime.synchronize(bench.stream)
        assert (bytes_at(target, 5000) == data).all()

    def test_nothing_is_copied_for_no_bytes(self, bench: Bench) -> None:
        """A copy of no bytes is none."""
        place = bench.put(pattern(16))
        host = bench.runtime.host_alloc(16)
        bench.runtime.copy(place, host, 0, bench.stream)
        assert (bench.get(place, 16) == pattern(16)).all()

    def test_fill(self, bench: Bench) -> None:
        """Sets the bytes asked for, and no others."""
        place = bench.put(pattern(1000))
        bench.runtime.fill(place + 3, 0xA7, 500, bench.stream)
        want = pattern(1000)
        want[3:503] = 0xA7
        assert (bench.get(place, 1000) == want).all()

    def test_registering_keeps_what_is_there(self, runtime: Runtime) -> None:
        """Also when undone, and again."""
        with pages(4) as host:
            bytes_at(host, 4 * PAGE)[:] = pattern(4 * PAGE)
            for _ in range(2):
                runtime.register(host, 4 * PAGE)
                assert (bytes_at(host, 4 * PAGE) == pattern(4 * PAGE)).all()
                runtime.unregister(host)
                assert (bytes_at(host, 4 * PAGE) == pattern(4 * PAGE)).all()

    def test_no_copy_across_two_registrations(self, bench: Bench) -> None:
        """It is refused as a whole; each side alone is copied."""
        runtime, data = bench.runtime, pattern(4 * PAGE)
        place = bench.put(np.zeros(4 * PAGE, np.uint8))
        with pages(4) as host:
            bytes_at(host, 4 * PAGE)[:] = data
            runtime.register(host, 2 * PAGE)
            runtime.register(host + 2 * PAGE, 2 * PAGE)
            for target, source in ((place, host + PAGE), (host + PAGE, place)):
                with pytest.raises(DeviceError):
                    runtime.copy(target, source, 2 * PAGE, bench.stream)
                runtime.take_error()
            assert not bench.get(place, 4 * PAGE).any()
            assert (bytes_at(host, 4 * PAGE) == data).all()
            for half in (0, 2 * PAGE):
                runtime.copy(place + half, host + half, 2 * PAGE, bench.stream)
            runtime.synchronize(bench.stream)
            assert (bench.get(place, 4 * PAGE) == data).all()
            runtime.unregister(host)
            runtime.unregister(host + 2 * PAGE)

    def test_memory_that_is_not_page_locked_has_no_alias(self, runtime: Runtime) -> None:
        """None before it is registered and after."""
        with pages(1) as host:
            assert runtime.alias(host, 0) is None
            runtime.take_error()
            runtime.register(host, PAGE)
            runtime.unregister(host)
            assert runtime.alias(host, 0) is None
            runtime.take_error()

    def test_aliases_follow_their_span(self, runtime: Runtime) -> None:
        """Inside one allocation they lie at the distances of the host addresses."""
        host = runtime.host_alloc(3 * PAGE)
        start = runtime.alias(host, 0)
        if start is None:
            pytest.skip("devices do not address host memory here")
        for offset in (1, PAGE, 3 * PAGE - 1):
            assert runtime.alias(host + offset, 0) == start + offset

    def test_copies_between_devices(self, bench: Bench) -> None:
        """By the stream of either."""
        runtime = bench.runtime
        if len(runtime.devices()) < 2:
            pytest.skip("there is one device")
        runtime.open_context(1)
        other, data = Bench(runtime, 1), pattern(100_000)
        here, there = bench.put(data), runtime.alloc(1, data.size)
        runtime.copy(there, here, data.size, bench.stream)
        runtime.synchronize(bench.stream)
        assert (other.get(there, data.size) == data).all()
        bench.put(np.zeros(data.size, np.uint8), here)
        runtime.copy(here, there, data.size, other.stream)
        runtime.synchronize(other.stream)
        assert (bench.get(here, data.size) == data).all()
