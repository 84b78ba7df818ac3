"""What a started model has taken of each kind of memory, as `plan.actual` sets it beside a plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from strata_core.engine.start.staged import KnowsRegions, StagedBackend
from strata_core.interfaces import Allocator, Backend, Region
from strata_core.machine.process import process_memory
from strata_core.memory.ledger import PINNED, RAM, Claim, vram
from strata_core.plan.actual import Actual
from strata_core.plan.plan import Plan
from strata_core.plan.sizes import (
    BROUGHT,
    CHUNK,
    DENSE,
    EMBEDDING,
    EXPERTS,
    KV,
    RING,
    SLOTS,
    SMALL,
    WORK,
    gib,
)
from strata_core.sources import tiered_file

_BEGINNINGS = (
    ("the dense weights", DENSE),
    ("the keys and values", KV),
    ("an expert cache", SLOTS),
    ("the token embedding", EMBEDDING),
    ("buffers of activations", WORK),
    ("buffers of prompts", CHUNK),
    ("experts of prompts", BROUGHT),
    ("a helper's buffers", WORK),
    ("buffers that experts change places through", SMALL),
)
"""How claims call what plans have a name for."""


def actual(backend: Backend, allocator: Allocator, plan: Plan, *, simulated: bool) -> Actual:
    """Bytes by tier of the plan; a tier that nobody counts is left out.

    Of mapped files only dense weights that are computed with where they lie count as RAM; the
    memory of `simulated` devices is not RAM, though it lies there.
    """
    regions = allocator.regions() if isinstance(allocator, KnowsRegions) else ()
    taken: dict[str, int] = {}
    items: dict[str, Mapping[str, int]] = {}
    if isinstance(backend, StagedBackend):
        ledger = backend.ledger
        for kind, pool in _pools(backend, plan).items():
            taken[kind] = ledger.used(pool)
            items[kind] = _by_name(ledger.outstanding(pool), {r.purpose for r in regions})
        items["ram"] = _by_name(ledger.outstanding(RAM), {r.purpose for r in regions})
    memory = process_memory()
    if memory is not None:
        dense = sum(item.nbytes for item in plan.tier("ram").items if item.name == DENSE)
        devices = sum(nbytes for kind, nbytes in taken.items() if kind.startswith("vram"))
        own = memory.own - (devices if simulated else 0)
        taken["ram"] = max(0, own) + min(memory.mapped, dense)
    return Actual(
        taken=taken,
        items=items,
        host=sum(region.nbytes for region in regions),
        pinned=sum(_pinned(region) for region in regions),
        paths=tuple(_said(region) for region in regions),
    )


def _pools(backend: StagedBackend, plan: Plan) -> dict[str, str]:
    """The ledger's pools by the tiers of the plan."""
    used = {f"{backend.runtime.label}{i}": vram(i) for i in backend.options.wanted_devices}
    found = {tier.name: used[tier.label] for tier in plan.tiers if tier.label in used}
    return {**found, "pinned": PINNED}


def _by_name(claims: Iterable[Claim], regions: set[str]) -> dict[str, int]:
    """Bytes by the names that plans have for them; what they have none for keeps its own."""
    found: dict[str, int] = {}
    for claim in claims:
        name = _name(claim, regions)
        found[name] = found.get(name, 0) + claim.nbytes
    return found


def _name(claim: Claim, regions: set[str]) -> str:
    if claim.purpose == tiered_file.RING and claim.pool == RAM:
        return RING
    if claim.purpose in regions:
        return EXPERTS
    for beginning, name in _BEGINNINGS:
        if claim.purpose.startswith(beginning):
            return name
    return SMALL if claim.small else claim.purpose


def _pinned(region: Region) -> int:
    return sum(span.nbytes for span in region.spans if span.pinned)


def _said(region: Region) -> str:
    amount = f"{gib(_pinned(region))} of {gib(region.nbytes)}"
    return f"{region.purpose}: {region.path}, {amount} page-locked"
