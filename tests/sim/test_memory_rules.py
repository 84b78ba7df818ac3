"""Rules about memory: budgets, refusals, the pending error, what may be given back and when."""

from __future__ import annotations

import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from strata_core.errors import DeviceError, Refused
from strata_core.memory.address import address_of, bytes_at
from strata_core.runtime import Runtime
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.ranges import Ranges

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@pytest.fixture
def pages():
    """pages(n): the address of n pages, unmapped after the test."""
    mappings: list[mmap.mmap] = []

    def make(count: int) -> int:
        mappings.append(mmap.mmap(-1, count * PAGE))
        return ctypes.addressof(ctypes.c_char.from_buffer(mappings[-1]))

    yield make
    for mapping in mappings:
        mapping.close()


def breaks(sim: SimRuntime, words: str, act) -> None:
    """`act` breaks a rule: it is refused with these words, recorded, and pending till taken."""
    held, before = sim.leaks(), len(sim.breaches)
    with pytest.raises(DeviceError, match=words) as caught:
        act()
    assert not isinstance(caught.value, Refused)
    assert sim.breaches[before:] == [str(caught.value)]
    assert sim.leaks() == held
    with pytest.raises(DeviceError, match="was pending"):
        sim.memory(0)
    text = sim.take_error()
    assert text
    assert caught.value.why.startswith(text)
    assert sim.take_error() is None
    sim.memory(0)


# --- contexts and budgets ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "args"),
    [
        ("memory", (1,)), ("alloc", (1, 8)), ("free", (1, 8)), ("alias", (8, 1)),
        ("create_stream", (1,)), ("create_event", (1,)), ("load", (1, [])),
    ],
)  # fmt: skip
def test_no_verb_before_its_context(make, verb, args) -> None:
    sim = make(vram=(MIB, MIB))
    breaks(sim, "SIM1 has no context yet", lambda: getattr(sim, verb)(*args))
    sim.open_context(1)
    if verb not in {"free"}:
        getattr(sim, verb)(*args)


@pytest.mark.parametrize("verb", ["host_alloc", "host_free", "unregister", "register"])
def test_nothing_is_pinned_before_any_context(make, verb) -> None:
    sim = make(opened=0)
    with pytest.raises(DeviceError, match="no device has a context yet"):
        getattr(sim, verb)(*((PAGE, PAGE) if verb == "register" else (PAGE,)))


def test_there_are_no_other_devices(sim) -> None:
    breaks(sim, "no device 1", lambda: sim.open_context(1))
    breaks(sim, "no device -1", lambda: sim.memory(-1))


def test_contexts_allocations_and_registrations_share_one_budget(pages, make) -> None:
    sim = make(vram=(MIB,) * 3, pin_budget=3 * MIB, context_pins=MIB, refusal_line="no more: -122")
    host = sim.host_alloc(MIB - 5)
    sim.register(pages(256), 255 * PAGE)
    assert sim.report()["pinned"] == {
        "in_use": 3 * MIB - PAGE,
        "peak": 3 * MIB - PAGE,
        "by": {"contexts": MIB, "host_alloc": MIB, "registered": 255 * PAGE},
    }
    other = pages(2)
    for count, ask in enumerate(
        (
            lambda: sim.open_context(1),
            lambda: sim.host_alloc(PAGE + 1),
            lambda: sim.register(other, 2 * PAGE),
        ),
        1,
    ):
        with pytest.raises(Refused, match=r"out of memory \(error 2\)"):
            ask()
        assert sim.kernel_log == ["no more: -122"] * count
        with pytest.raises(DeviceError, match="was pending") as caught:
            sim.alloc(0, 8)
        assert not isinstance(caught.value, Refused)
        assert sim.take_error() == "out of memory (error 2)"
    assert not sim.breaches
    sim.host_free(host)
    sim.open_context(2)
    with pytest.raises(Refused):
        sim.open_context(1)
    sim.take_error()
    sim.register(other, PAGE)
    assert sim.report()["pinned"]["in_use"] == 2 * MIB + 256 * PAGE == 3 * MIB


def test_an_error_is_pending_for_its_own_thread(sim) -> None:
    with ThreadPoolExecutor(1) as other:
        with pytest.raises(Refused):
            other.submit(sim.alloc, 0, 1 << 40).result()
        sim.free(0, sim.alloc(0, 8))
        assert sim.take_error() is None
        with pytest.raises(DeviceError, match="was pending"):
            other.submit(sim.alloc, 0, 8).result()
        assert other.submit(sim.take_error).result() == "out of memory (error 2)"
        sim.free(0, other.submit(sim.alloc, 0, 8).result())


@pytest.mark.parametrize("error", [DeviceError("a copy failed", "x", "y"), ZeroDivisionError()])
def test_what_fails_where_nothing_can_be_raised_is_told_to_any_thread(sim, error) -> None:
    """Of a graph's own thread nobody takes errors: the next verb raises it, or it is taken."""
    for raised in (False, True):
        aside = threading.Thread(target=sim.failed_aside, args=(error,))
        aside.start()
        aside.join()
        if raised:
            with pytest.raises(type(error)) as caught:
                sim.memory(0)
            assert caught.value is error
            with pytest.raises(DeviceError, match="was pending"):
                sim.memory(0)
        assert sim.take_error()
        assert sim.take_error() is None
        sim.memory(0)


def test_an_open_context_is_not_paid_for_twice(make) -> None:
    sim = make(pin_budget=MIB, context_pins=MIB)
    sim.open_context(0)
    assert sim.report()["pinned"]["in_use"] == MIB


def test_device_memory_is_limited(sim) -> None:
    total = sim.memory(0).total
    assert total == sim.memory(0).free == 16 * MIB
    places = [sim.alloc(0, MIB - 200) for _ in range(16)]
    assert sim.memory(0).free == 0
    with pytest.raises(Refused, match=r"0 bytes of 16.00 MiB are free"):
        sim.alloc(0, 1)
    sim.take_error()
    sim.free(0, places[3])
    assert sim.memory(0).free == MIB
    sim.alloc(0, MIB)
    assert sim.report()["vram"]["SIM0"] == {"in_use": 16 * MIB, "peak": 16 * MIB}


def test_memory_is_committed_when_it_is_written() -> None:
    sim = SimRuntime(SimHardware(vram=(1 << 40,)))
    sim.open_context(0)
    place, host = sim.alloc(0, 1 << 39), sim.host_alloc(1 << 38)
    bytes_at(place + (1 << 38), 8)[:] = 1
    bytes_at(host + (1 << 37), 8)[:] = 2
    sim.free(0, place)
    sim.host_free(host)
    sim.close()
    assert not sim.leaks()


def test_contents_are_not_zero(sim) -> None:
    for address in (sim.alloc(0, 4096), sim.host_alloc(4096)):
        assert np.isnan(bytes_at(address, 4096).view(np.float32)).all()


def test_alignment_is_no_better_than_promised(sim) -> None:
    for nbytes in (1, 256, 4096, MIB):
        address = sim.alloc(0, nbytes)
        assert address % 256 == 0
        assert address % 512


@pytest.mark.parametrize("nbytes", [0, -1])
@pytest.mark.parametrize("verb", ["alloc", "host_alloc", "register"])
def test_memory_has_bytes(sim, verb, nbytes) -> None:
    args = {"alloc": (0, nbytes), "host_alloc": (nbytes,), "register": (PAGE, nbytes)}[verb]
    breaks(sim, "memory has at least one byte", lambda: getattr(sim, verb)(*args))


# --- giving back -------------------------------------------------------------------------------


def test_memory_is_freed_once_by_its_address(make) -> None:
    sim = make(vram=(MIB, MIB), opened=2)
    place, host = sim.alloc(0, 512), sim.host_alloc(PAGE)
    breaks(sim, "not what alloc gave", lambda: sim.free(0, place + 256))
    breaks(sim, "not what alloc gave", lambda: sim.free(1, place))
    breaks(sim, "not what alloc gave", lambda: sim.free(0, host))
    breaks(sim, "not the start", lambda: sim.host_free(host + 8))
    breaks(sim, "not the start", lambda: sim.host_free(place))
    breaks(sim, "not the start", lambda: sim.unregister(host))
    sim.free(0, place)
    sim.host_free(host)
    breaks(sim, "freed already", lambda: sim.free(0, place))
    breaks(sim, "not the start", lambda: sim.host_free(host))


def test_freed_addresses_are_not_given_out_again_at_once(sim) -> None:
    seen = set()
    for _ in range(200):
        address = sim.alloc(0, 4096)
        sim.free(0, address)
        seen.add(address)
    assert len(seen) == 200
    for _ in range(1000):
        sim.free(0, sim.alloc(0, 4096))
    assert sim.memory(0).free == 16 * MIB


def test_a_registration_is_not_freed_like_an_allocation(pages, sim) -> None:
    host = pages(1)
    sim.register(host, PAGE)
    breaks(sim, "not the start", lambda: sim.host_free(host))
    sim.unregister(host)
    breaks(sim, "not the start", lambda: sim.unregister(host))


@pytest.mark.parametrize("side", ["before", "behind"])
def test_writes_beyond_an_allocation_are_found(make, side) -> None:
    sim = make()
    place = sim.alloc(0, 1000)
    bytes_at(place - 1 if side == "before" else place + 1000, 1)[:] = 0
    breaks(sim, "written beyond its 1000 bytes", lambda: sim.free(0, place))
    sim.free(0, place)
    host = sim.host_alloc(PAGE)
    bytes_at(host + PAGE, 1)[:] = 0
    breaks(sim, "written beyond", lambda: sim.host_free(host))
    bytes_at(host + PAGE, 1)[:] = 0
    with pytest.raises(DeviceError, match=r"close: .* written beyond"):
        sim.close()


# --- registrations -----------------------------------------------------------------------------


def test_registrations_are_whole_pages_of_host_memory_and_apart(pages, sim) -> None:
    host = pages(4)
    breaks(sim, "not whole pages", lambda: sim.register(host + 8, PAGE))
    breaks(sim, "not whole pages", lambda: sim.register(host, PAGE + 8))
    sim.register(host + PAGE, 2 * PAGE)
    for start, count in ((0, 2), (1, 1), (2, 2), (0, 4)):
        breaks(sim, "page-locked already", partial(sim.register, host + start * PAGE, count * PAGE))
    sim.register(host, PAGE)
    sim.register(host + 3 * PAGE, PAGE)
    place = sim.alloc(0, 2 * PAGE)
    inside = place + PAGE - place % PAGE
    breaks(sim, "not host memory", lambda: sim.register(inside, PAGE))
    pinned = sim.host_alloc(PAGE)
    breaks(sim, "page-locked already", lambda: sim.register(pinned, PAGE))
    for start in range(0, 4, 1):
        if start != 2:
            sim.unregister(host + start * PAGE)


def test_what_is_not_mapped_is_not_registered(sim) -> None:
    mapping = mmap.mmap(-1, PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mapping.close()
    breaks(sim, "not host memory", lambda: sim.register(address, PAGE))


def test_memory_unmapped_while_registered_spoils_what_follows(make) -> None:
    sim = make()
    mapping = mmap.mmap(-1, 64 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    sim.register(address, 64 * PAGE)
    mapping.close()
    breaks(sim, r"already mapped \(error 208\)", lambda: sim.host_alloc(8))
    with pytest.raises(DeviceError, match="registered, but not mapped"):
        sim.close()
    assert sim.leaks() == [f"registered of {64 * PAGE} bytes"]


def test_unmapping_can_be_told_before_it_happens(pages, sim) -> None:
    host = pages(4)
    sim.register(host + PAGE, PAGE)
    sim.note_unmapped(host, PAGE)
    sim.note_unmapped(host + 2 * PAGE, 2 * PAGE)
    with pytest.raises(DeviceError, match="unmapped while they are registered"):
        sim.note_unmapped(host, 4 * PAGE)
    assert len(sim.breaches) == 1
    sim.unregister(host + PAGE)
    sim.note_unmapped(host, 4 * PAGE)
    stream = sim.create_stream(0)
    sim.copy(sim.alloc(0, 8), host, 8, stream)
    with pytest.raises(DeviceError, match=r"unmapping.* in use by a copy of 8 bytes"):
        sim.note_unmapped(host, 4 * PAGE)
    sim.synchronize(stream)
    sim.note_unmapped(host, 4 * PAGE)


def test_pageable_memory_unmapped_before_its_copy(sim, stream) -> None:
    mapping = mmap.mmap(-1, 64 * PAGE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    sim.copy(sim.alloc(0, PAGE), address + 10 * PAGE, PAGE, stream)
    mapping.close()
    with pytest.raises(DeviceError, match="unmapped before the work was done"):
        sim.synchronize(stream)
    sim.take_error()
    sim.synchronize(stream)


# --- aliases and copies ------------------------------------------------------------------------


def test_aliases_apart_are_one_range_a_registration(pages, make) -> None:
    sim = make(aliases="apart", vram=(MIB, MIB), opened=2)
    host = pages(2)
    sim.register(host, PAGE)
    sim.register(host + PAGE, PAGE)
    first, second = sim.alias(host + PAGE - 1, 0), sim.alias(host + PAGE, 0)
    assert first is not None
    assert second is not None
    assert second != first + 1
    assert sim.alias(host, 0) == sim.alias(host, 1) != host
    pinned = sim.host_alloc(100)
    assert sim.alias(pinned + 100, 0) is None
    sim.unregister(host)
    assert sim.alias(host, 0) is None
    assert sim.alias(host + PAGE, 0) == second
    sim.unregister(host + PAGE)


def test_copies_keep_within_one_piece_of_memory(pages, sim, stream) -> None:
    host, place = pages(4), sim.alloc(0, 4 * PAGE)
    sim.register(host, PAGE)
    sim.register(host + PAGE, PAGE)
    breaks(
        sim,
        "in two registrations",
        lambda: sim.copy(place, host + PAGE - 1, 2, stream),
    )
    breaks(
        sim,
        "in and beside a registration",
        lambda: sim.copy(place, host + 2 * PAGE - 1, 2, stream),
    )
    breaks(sim, "beyond its allocation", lambda: sim.copy(place + 1, host, 4 * PAGE, stream))
    breaks(sim, "beyond its allocation", lambda: sim.fill(place + 1, 0, 4 * PAGE, stream))
    breaks(sim, "not device memory", lambda: sim.fill(host, 0, 8, stream))
    breaks(sim, "onto themselves", lambda: sim.copy(place, place + 8, 9, stream))
    breaks(sim, "copy", lambda: sim.copy(place, host, -1, stream))
    breaks(sim, "fill", lambda: sim.fill(place, 256, 1, stream))
    sim.free(0, place)
    breaks(sim, "was freed", lambda: sim.copy(place + 8, host, 1, stream))
    breaks(sim, "was freed", lambda: sim.fill(place, 0, 1, stream))
    sim.unregister(host)
    sim.unregister(host + PAGE)


# --- the end -----------------------------------------------------------------------------------


def test_what_is_left_is_told_and_freed(sim) -> None:
    assert isinstance(sim, Runtime)
    assert sim.leaks() == []
    place, host = sim.alloc(0, 100), sim.host_alloc(10)
    stream, event = sim.create_stream(0), sim.create_event(0)
    sim.begin_capture(stream)
    sim.end_capture(stream)
    data = np.zeros(4, np.uint8)
    sim.copy(place, address_of(data), 4, stream)
    want = [
        "alloc of 100 bytes on device 0",
        "host_alloc of 10 bytes",
        "stream SIM0.1",
        "unfinished copy of 4 bytes on stream SIM0.1",
        "event of device 0",
        "graph of device 0",
    ]
    assert sim.leaks() == want
    sim.close()
    assert sim.leaks() == want
    assert sim.report()["pinned"]["in_use"] == 0
    assert sim.report()["vram"]["SIM0"]["in_use"] == 0
    for act in (lambda: sim.alloc(0, 8), lambda: sim.take_error(), lambda: sim.host_free(host)):
        with pytest.raises(DeviceError, match="the runtime is closed"):
            act()
    sim.close()
    assert event


def test_ranges() -> None:
    ranges: Ranges[str] = Ranges()
    ranges.add(10, 5, "a")
    ranges.add(15, 5, "b")
    ranges.add(0, 2, "c")
    for start, nbytes in ((9, 2), (14, 1), (19, 9), (0, 30), (1, 1)):
        with pytest.raises(ValueError, match="overlap"):
            ranges.add(start, nbytes, "x")
    assert [ranges.at(i) for i in (0, 1, 2, 9, 10, 14, 15, 19, 20)] == [
        "c", "c", None, None, "a", "a", "b", "b", None,
    ]  # fmt: skip
    assert ranges.overlapping(1, 16) == ["c", "a", "b"]
    assert ranges.overlapping(2, 10) == []
    assert list(ranges) == ["c", "a", "b"]
    assert (ranges.pop(10), len(ranges)) == ("a", 2)
    with pytest.raises(KeyError):
        ranges.pop(11)
