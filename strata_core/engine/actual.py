"""What a started model has taken of each kind of memory, as `plan.actual` sets it beside a plan."""

from __future__ import annotations

from strata_core.engine.start.staged import KnowsRegions, StagedBackend
from strata_core.interfaces import Allocator, Backend, Region
from strata_core.machine.process import process_memory
from strata_core.memory.ledger import PINNED, vram
from strata_core.plan.actual import Actual
from strata_core.plan.plan import Plan
from strata_core.plan.sizes import gib


def actual(backend: Backend, allocator: Allocator, plan: Plan, *, simulated: bool) -> Actual:
    """Bytes by tier of the plan; a tier that nobody counts is left out.

    Of mapped files only dense weights that are computed with where they lie count as RAM; the
    memory of `simulated` devices is not RAM, though it lies there.
    """
    taken = {}
    devices = 0
    if isinstance(backend, StagedBackend):
        used = {f"{backend.runtime.label}{i}": i for i in backend.options.wanted_devices}
        for tier in plan.tiers:
            if tier.label in used:
                taken[tier.name] = backend.ledger.used(vram(used[tier.label]))
                devices += taken[tier.name]
        taken[PINNED] = backend.ledger.used(PINNED)
    memory = process_memory()
    if memory is not None:
        dense = sum(i.nbytes for i in plan.tier("ram").items if i.what == "dense weights")
        own = memory.own - (devices if simulated else 0)
        taken["ram"] = max(0, own) + min(memory.mapped, dense)
    regions = allocator.regions() if isinstance(allocator, KnowsRegions) else ()
    return Actual(
        taken=taken,
        host=sum(region.nbytes for region in regions),
        pinned=sum(_pinned(region) for region in regions),
        paths=tuple(_said(region) for region in regions),
    )


def _pinned(region: Region) -> int:
    return sum(span.nbytes for span in region.spans if span.pinned)


def _said(region: Region) -> str:
    amount = f"{gib(_pinned(region))} of {gib(region.nbytes)}"
    return f"{region.purpose}: {region.path}, {amount} page-locked"
