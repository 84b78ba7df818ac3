"""The chain pinned, sliced, locked: which path is taken, what it holds, and what it says."""

from __future__ import annotations

import logging
import threading
import time

import numpy as np
import pytest
from attrs import evolve

from strata_core.errors import DeviceError, PluginError, StrataError
from strata_core.interfaces import AllocatorContext, StartPolicy
from strata_core.memory.address import bytes_at
from strata_core.memory.ledger import PINNED, RAM
from strata_core.memory.pinned import build
from strata_core.memory.platform import touch
from strata_core.memory.rules import ARENA, COMPLEMENT
from strata_core.memory.spans import reach, span_of

PAGE = 4096
LAYER = 10 * PAGE
SIZE = 5 * LAYER
CUTS = [LAYER * i for i in range(5)]


def pinned(region) -> list[tuple[int, int]]:
    return [(s.address - region.address, s.nbytes) for s in region.spans if s.pinned]


def check_cover(region) -> None:
    """Spans follow one another without holes; aliases belong to page-locked ones alone."""
    at = region.address
    for span in region.spans:
        assert span.address == at
        assert span.pinned or span.alias is None
        at += span.nbytes
    assert at == region.address + region.nbytes


def test_all_begins_with_one_allocation(bench, caplog) -> None:
    caplog.set_level(logging.INFO, "strata")
    b = bench(complement="all")
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    check_cover(region)
    assert (region.path, len(region.spans), pinned(region)) == ("pinned", 1, [(0, SIZE)])
    assert region.spans[0].alias not in (None, region.address)
    assert b.runtime.registered == []
    assert b.ledger.used(PINNED) == SIZE
    line = "page-locking path 1, the resident experts: 0.000191 of 0.000191 GiB pinned"
    assert caplog.messages == [f"{line} (granted at once)"]
    assert b.degradations == []


@pytest.mark.parametrize("had", [True, False])
@pytest.mark.parametrize("complement", ["all", LAYER, None])
def test_large_pages_that_are_not_had_are_told_once(bench, had: bool, complement) -> None:
    def pool(system) -> None:
        system._from_pool = lambda size: evolve(system.reserve(size), large=True) if had else None

    settings = {} if complement is None else {"complement": complement}
    b = bench(large=True, prepare=pool, **settings)
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert (region.path == "pinned") == (complement == "all")
    told = [item for item in b.degradations if "STRATA_LARGE_PAGES" in item.what]
    if had and complement != "all":
        assert told == []
        return
    (item,) = told
    assert item.what.startswith("the resident experts is not in large pages")
    assert ("the driver allocated it" in item.why) == (complement == "all")
    assert "nr_hugepages" in item.remedy


def test_by_itself_slices_of_a_layer_are_registered(bench, caplog) -> None:
    caplog.set_level(logging.INFO, "strata")
    b = bench()
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    check_cover(region)
    assert region.path == "sliced"
    assert pinned(region) == [(cut, LAYER) for cut in CUTS]
    assert len({span.alias - span.address for span in region.spans}) == 5, "one alias for several"
    assert "page-locking path 2" in caplog.messages[0]
    assert "0.000191 of 0.000191 GiB pinned in 5 slices" in caplog.messages[0]
    assert b.degradations == []


def test_a_refused_allocation_is_followed_by_slices(bench) -> None:
    for options in (
        {"refuse": {"host_alloc": 1}},
        {"refuse_one": True},
        {"aliases": "none"},
    ):
        b = bench(complement="all", **options)
        region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
        assert (region.path, len(pinned(region))) == ("sliced", 5)
        assert b.runtime.take_error() is None
        assert len(b.degradations) == (0 if "refuse_one" in options else 1)
    assert all(span.alias is None for span in region.spans)
    assert reach(region, region.address, 1) == (True, None)


def test_where_registering_is_refused_one_allocation_is_tried(bench) -> None:
    b = bench(refuse={"register": 1})
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert (region.path, pinned(region)) == ("pinned", [(0, SIZE)])
    assert b.runtime.calls()["register"] == 1
    assert b.system.held == {}
    assert "as one allocation only" in b.degradations[0].what


@pytest.mark.parametrize("n", range(2, 6))
def test_registering_stops_at_the_first_refusal(bench, n: int, caplog) -> None:
    caplog.set_level(logging.INFO, "strata")
    b = bench(refuse={"register": n})
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    check_cover(region)
    assert pinned(region) == [(cut, LAYER) for cut in CUTS[: n - 1]]
    assert b.runtime.calls()["register"] == n
    assert "host_alloc" not in b.runtime.calls()
    assert b.runtime.take_error() is None
    assert sum(b.system.locked.values()) == SIZE - (n - 1) * LAYER
    assert "error 2" in region.reason
    assert "the rest is locked into RAM" in caplog.messages[0]
    assert f"{(n - 1) * LAYER / 2**30:.6f} of" in b.degradations[0].what


@pytest.mark.parametrize("most", [0, 1, PAGE, LAYER, LAYER + PAGE, 3 * LAYER + 3 * PAGE + 5, SIZE])
def test_a_number_bounds_what_is_pinned(bench, most: int) -> None:
    b = bench(complement=most)
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    check_cover(region)
    whole = most // PAGE * PAGE
    assert sum(nbytes for _, nbytes in pinned(region)) == whole
    assert region.path == {0: "locked", SIZE: "pinned"}.get(whole, "sliced")
    assert sum(b.system.locked.values()) == SIZE - whole
    assert b.degradations == [], "the user asked for it"
    if whole < SIZE:
        assert "STRATA_COMPLEMENT_PIN_GIB" in region.reason


def test_the_machine_bounds_what_is_pinned(bench) -> None:
    b = bench(prepare=lambda s: setattr(s, "have", 4 * LAYER), margin=LAYER // 2)
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert sum(nbytes for _, nbytes in pinned(region)) == 3 * LAYER + LAYER // 2
    assert "are available" in b.degradations[0].why
    assert b.ledger.room(PINNED, small=True) == LAYER // 2, "the margin is for small buffers"
    again = b.allocator.reserve(SIZE, CUTS, "another use")
    assert sum(nbytes for _, nbytes in pinned(again)) == 3 * LAYER + LAYER // 2, "asked anew"


def test_a_known_limit_comes_before_what_the_machine_says(bench) -> None:
    policy = StartPolicy(pin_limit=2 * LAYER)
    for options, most in (({"policy": policy}, 2 * LAYER), ({"known": LAYER}, LAYER)):
        for purpose in (COMPLEMENT, ARENA, "a tier"):
            b = bench(margin=PAGE, **options)
            region = b.allocator.reserve(SIZE, CUTS, purpose)
            assert sum(nbytes for _, nbytes in pinned(region)) == most - PAGE
    b = bench(known=1 << 20, margin=1 << 40)
    assert b.ledger.room(PINNED) == (1 << 20) - (1 << 17), "the margin leaves seven eighths"


def test_the_arena_is_pinned_whole_unless_it_is_limited(bench) -> None:
    little = {"prepare": lambda s: setattr(s, "have", LAYER), "margin": 0}
    for arena, most in ((None, SIZE), (0, SIZE), ("auto", LAYER), (2 * LAYER, 2 * LAYER)):
        b = bench(arena=arena, **little)
        region = b.allocator.reserve(SIZE, CUTS, ARENA)
        assert sum(nbytes for _, nbytes in pinned(region)) == most
        assert region.path == "sliced"


def test_a_prefix_is_one_registration(bench, caplog) -> None:
    caplog.set_level(logging.INFO, "strata")
    for purpose in (ARENA, COMPLEMENT):
        b = bench(partial=True, partial_most=2 * LAYER + 7)
        region = b.allocator.reserve(SIZE, CUTS, purpose)
        check_cover(region)
        assert (region.path, pinned(region)) == ("pinned prefix", [(0, 2 * LAYER)])
        assert "page-locking pinned prefix" in caplog.messages[-1]
    b = bench(partial=True, arena=LAYER)
    assert pinned(b.allocator.reserve(SIZE, CUTS, ARENA)) == [(0, LAYER)]
    b = bench(partial=True, refuse={"register": 1})
    assert pinned(b.allocator.reserve(SIZE, CUTS, ARENA)) == []
    assert "host_alloc" not in b.runtime.calls()


def test_a_refused_lock_leaves_pageable_memory_and_names_the_limit(bench, caplog) -> None:
    caplog.set_level(logging.INFO, "strata")
    b = bench(complement=0, prepare=lambda s: setattr(s, "lock_most", 2 * LAYER))
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert region.path == "pageable"
    assert sum(b.system.locked.values()) == 2 * LAYER
    assert b.degradations[0].why == f"the limit is {2 * LAYER}"
    assert "page-locking path 3" in caplog.messages[0]
    assert "pageable" in caplog.messages[0]
    end = max(at + n for at, n in b.system.populated) - region.address
    assert end <= SIZE, "what cannot be locked was brought in as well"


def test_the_rest_of_path_2_is_locked_likewise(bench) -> None:
    b = bench(complement=LAYER, prepare=lambda s: setattr(s, "lock_most", LAYER))
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert pinned(region) == [(0, LAYER)]
    assert list(b.system.locked) == [region.address + LAYER]
    assert "not locked into RAM" in b.degradations[0].what


def test_what_the_ledger_refuses_is_not_asked_of_the_driver(bench) -> None:
    b = bench()
    b.allocator._settings = b.allocator._settings.__class__(known=3 * LAYER, margin=0)
    others = b.ledger.take(PINNED, LAYER, "somebody's rings", small=True)
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    assert len(pinned(region)) == 2
    assert b.runtime.calls()["register"] == 2
    others.release()


def test_memory_is_zero_and_keeps_what_is_written(bench) -> None:
    for settings in ({"complement": "all", "refuse_one": True}, {"complement": 0}, {}):
        b = bench(**settings)
        region = b.allocator.reserve(SIZE - 100, CUTS, COMPLEMENT)
        data = bytes_at(region.address, region.nbytes)
        assert not data.any()
        data[:] = np.arange(len(data)) % 251
        assert (data == np.arange(len(data)) % 251).all()
        b.allocator.release(region)
        assert b.ledger.used(RAM) == 0


def test_slices_may_be_filled_while_others_register(bench) -> None:
    b = bench(refuse={"register": 4})
    loan = b.allocator.prepare(SIZE, CUTS, COMPLEMENT)

    def fill(layer: int) -> None:
        loan.wait(layer * LAYER, LAYER)
        bytes_at(loan.address + layer * LAYER, LAYER)[:] = layer + 1

    threads = [threading.Thread(target=fill, args=(layer,)) for layer in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    region = loan.region()
    assert [bytes_at(region.address + cut, LAYER).min() for cut in CUTS] == [1, 2, 3, 4, 5]
    assert len(pinned(region)) == 3


def test_the_recorder_finds_what_is_written_too_early(bench) -> None:
    b = bench()
    loan = b.allocator.prepare(SIZE, CUTS, COMPLEMENT)
    loan.region()
    b.runtime.registered[:] = [(loan.address, LAYER)]
    bytes_at(loan.address, 1)[:] = 1
    with pytest.raises(DeviceError):
        b.runtime.register(loan.address + LAYER, LAYER)
    assert b.runtime.written_before == [(loan.address, LAYER)]
    b.runtime.written_before.clear()


@pytest.mark.parametrize("settings", [{"complement": 0}, {"complement": LAYER}, {}])
def test_pages_are_not_zeroed_after_they_were_written(bench, settings) -> None:
    """Where the system populates by writing zeros, that comes before the payload as well."""

    def slow(system) -> None:
        def populate(address: int, nbytes: int) -> None:
            time.sleep(0.05)
            touch(address, nbytes, PAGE)

        system.populate = populate

    b = bench(prepare=slow, refuse={"register": 3}, **settings)
    loan = b.allocator.prepare(SIZE, CUTS, COMPLEMENT)
    for cut in CUTS:
        loan.wait(cut, LAYER)
        bytes_at(loan.address + cut, LAYER)[:] = 7
    region = loan.region()
    assert bytes_at(region.address, SIZE).min() == 7


def test_giving_back_early_ends_whoever_waits(bench) -> None:
    b = bench()
    for _ in range(20):
        loan = b.allocator.prepare(SIZE, CUTS, COMPLEMENT)
        loan.close()
        loan.close()
        with pytest.raises(StrataError, match="given back"):
            loan.region()
        assert b.ledger.outstanding() == ()


def test_pages_that_cannot_be_had_are_an_error_that_leaves_nothing(bench) -> None:
    for settings in ({}, {"complement": 0}):
        b = bench(prepare=lambda s: setattr(s, "fail_populate", True), **settings)
        with pytest.raises(StrataError, match="cannot be had") as caught:
            b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
        assert "Cannot allocate memory" in caught.value.why
        assert b.ledger.outstanding() == ()


def test_memory_beyond_the_address_space_is_an_error_that_leaves_nothing(bench) -> None:
    b = bench()
    with pytest.raises(StrataError, match="cannot reserve"):
        b.allocator.reserve(1 << 62, [], COMPLEMENT)
    assert b.ledger.outstanding() == ()


@pytest.mark.parametrize("verb", ["unregister", "host_free"])
def test_giving_back_is_tried_again_after_a_pending_error(bench, verb: str) -> None:
    b = bench(complement="all", refuse_one=verb == "unregister", refuse={verb: 1})
    b.allocator.release(b.allocator.reserve(SIZE, CUTS, COMPLEMENT))
    assert b.runtime.calls()[verb] == 1 + (5 if verb == "unregister" else 1)


def test_memory_that_the_driver_keeps_is_not_unmapped(bench) -> None:
    b = bench(refuse={"unregister": (3, 4)})
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    with pytest.raises(DeviceError):
        b.allocator.release(region)
    assert bytes_at(region.address, SIZE).sum() == 0, "still mapped"
    assert b.ledger.used(PINNED) == 3 * LAYER
    for span in region.spans[2::-1]:
        b.runtime.unregister(span.address)
    b.system.free(b.system.held[region.address])
    for claim in b.ledger.outstanding():
        claim.release()


def test_a_span_holds_what_lies_in_it_whole(bench) -> None:
    b = bench(complement=2 * LAYER + PAGE)
    region = b.allocator.reserve(SIZE, CUTS, COMPLEMENT)
    first, second, third, rest = region.spans
    assert span_of(region, region.address, LAYER) is first
    assert span_of(region, region.address + LAYER - 1, 2) is None
    assert span_of(region, region.address + LAYER, LAYER) is second
    assert span_of(region, region.address - 1, 1) is None
    assert span_of(region, region.address + SIZE - 1, 2) is None
    assert reach(region, third.address + 5, PAGE - 5) == (True, third.alias + 5)
    assert reach(region, third.address + 5, PAGE - 4) == (False, None)
    assert reach(region, rest.address, 8) == (False, None)


def test_it_is_built_over_backends_with_devices_alone(bench, make_machine) -> None:
    b = bench()

    class Devices:
        runtime, ledger, devices = b.runtime, b.ledger, (0,)

    def context(backend) -> AllocatorContext:
        return AllocatorContext(
            machine=make_machine(),
            options={"pin_limit_gib": 1.0, "complement_pin_gib": 0.0},
            degrade=b.degradations.append,
            backend=backend,
        )

    policy = StartPolicy(contexts_first=True)
    allocator = build(context(Devices()), policy)
    assert allocator.start_policy == policy
    assert b.ledger.room(PINNED) == (1 << 30) - (1 << 27)
    region = allocator.reserve(SIZE, CUTS, ARENA)
    assert region.path == "sliced"
    allocator.release(region)
    allocator.close()
    with pytest.raises(PluginError, match="no runtime that could page-lock"):
        build(context(object()))
