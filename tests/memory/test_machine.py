"""Allocator and ledger in any order of requests and refusals, on the simulated driver.

What must hold at every moment: regions and page-locked pieces never overlap; an alias leads to the
bytes it stands for and never beyond its span; what the ledger counts is what the driver and the
system hold; and in the end everything is given back.
"""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    rule,
)
from simulated import Bench

from strata_core.errors import Refused
from strata_core.interfaces import Region
from strata_core.memory.address import bytes_at
from strata_core.memory.ledger import PINNED, RAM
from strata_core.memory.rules import ARENA, COMPLEMENT, PinSettings
from strata_core.memory.spans import reach, span_of

PAGE = 4096
SIZES = st.integers(1, 40 * PAGE)
PINS = st.one_of(st.none(), st.just("all"), st.integers(0, 60 * PAGE))


class Memory(RuleBasedStateMachine):
    regions = Bundle("regions")
    claims = Bundle("claims")

    @initialize(
        budget=st.one_of(st.none(), st.integers(0, 80 * PAGE)),
        have=st.integers(0, 100 * PAGE),
        lockable=st.one_of(st.none(), st.integers(0, 50 * PAGE)),
        refused=st.dictionaries(
            st.sampled_from(["host_alloc", "register", "alias", "unregister", "host_free"]),
            st.sets(st.integers(1, 12).map(lambda n: 2 * n), max_size=4),
        ),
        aliases=st.sampled_from(["same", "apart", "none"]),
    )
    def begin(self, budget, have, lockable, refused, aliases) -> None:
        def prepare(system) -> None:
            system.have, system.lock_most = have, lockable

        self.bench = Bench(budget, refused, aliases, prepare, margin=5 * PAGE)
        self.held: list[Region] = []
        self.small: list = []

    @rule(
        target=regions,
        nbytes=SIZES,
        layer=st.integers(1, 20 * PAGE),
        purpose=st.sampled_from([COMPLEMENT, ARENA, "a tier"]),
        complement=PINS,
        arena=st.one_of(st.none(), st.just("auto"), st.integers(0, 60 * PAGE)),
        partial=st.booleans(),
        refuse_one=st.booleans(),
    )
    def reserve(self, nbytes, layer, purpose, complement, arena, partial, refuse_one):
        allocator = self.bench.allocator
        allocator._settings = PinSettings(
            complement=complement,
            arena=arena,
            partial=partial,
            refuse_one=refuse_one,
            margin=5 * PAGE,
        )
        loan = allocator.prepare(nbytes, range(0, nbytes, layer), purpose)
        loan.wait(0, nbytes)
        bytes_at(loan.address, nbytes)[:] = np.arange(nbytes) % 253 + len(self.held) % 2
        region = loan.region()
        assert region.nbytes == nbytes
        self.held.append(region)
        return region

    @rule(region=consumes(regions))
    def release(self, region: Region) -> None:
        number = self.held.index(region)
        data = bytes_at(region.address, region.nbytes)
        assert (
            len(set((data[: 253 * 10] - np.arange(min(region.nbytes, 2530)) % 253).tolist())) == 1
        )
        self.bench.allocator.release(region)
        del self.held[number]

    @rule(target=claims, nbytes=st.integers(1, 8 * PAGE), small=st.booleans())
    def claim(self, nbytes: int, small: bool):
        try:
            claim = self.bench.ledger.take(PINNED, nbytes, "a buffer", small=small)
        except Refused:
            return None
        self.small.append(claim)
        return claim

    @rule(claim=consumes(claims))
    def unclaim(self, claim) -> None:
        if claim is not None:
            claim.release()
            self.small.remove(claim)

    @invariant()
    def regions_and_spans_lie_apart(self) -> None:
        spans = sorted(
            ((s.address, s.nbytes) for region in self.held for s in region.spans),
            key=lambda s: s[0],
        )
        for (start, nbytes), (following, _) in itertools.pairwise(spans):
            assert start + nbytes <= following
        for region in self.held:
            at = region.address
            for span in region.spans:
                assert span.address == at
                at += span.nbytes
            assert at == region.address + region.nbytes

    @invariant()
    def aliases_lead_to_their_bytes_and_no_further(self) -> None:
        runtime = self.bench.runtime
        for region in self.held:
            for span in region.spans:
                last = span.address + span.nbytes - 1
                dma, alias = reach(region, last, 1)
                assert dma == span.pinned
                if alias is not None:
                    there = runtime.reach(0, alias, 1)
                    assert there[0] == bytes_at(last, 1)[0]
                assert span_of(region, last, 2) is None

    @invariant()
    def the_ledger_counts_what_is_held(self) -> None:
        ledger, account = self.bench.ledger, self.bench.runtime.account.pinned
        others = sum(claim.nbytes for claim in self.small)
        assert ledger.used(PINNED) - others == account.now
        rounded = sum(-(-region.nbytes // PAGE) * PAGE for region in self.held)
        assert ledger.used(RAM) == rounded
        pinned = sum(s.nbytes for region in self.held for s in region.spans if s.pinned)
        assert pinned <= account.now <= pinned + PAGE * len(self.held)

    @invariant()
    def no_error_is_left_pending(self) -> None:
        assert self.bench.runtime.take_error() is None

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            for claim in self.small:
                claim.release()
            self.bench.finish()


Memory.TestCase.settings = settings(max_examples=60, stateful_step_count=14, deadline=None)
TestMemory = Memory.TestCase
