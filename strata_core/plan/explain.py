"""A plan in words: its text, what it makes worse, and the error of one that does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from strata_core.errors import Degradation, DoesNotFit
from strata_core.plan.devices import VRAM_BUDGET
from strata_core.plan.plan import RAM_BUDGET, Plan, PlanRequest, Tier, gib
from strata_core.plan.tier import tier_degradations


def explain(plan: Plan) -> str:
    """The plan as lines of text: need and have for each tier, then the decisions."""
    lines = []
    for tier in plan.tiers:
        if not tier.items:
            continue
        have = f"have {gib(tier.have)}"
        origin = _ram_origin(plan) if tier.name == "ram" else tier.origin
        have += f" ({origin})" if origin else ""
        lines.append(f"{_named(tier)}: need {gib(tier.need)}, {have}" + _missing(tier.short_by))
        lines.extend(f"    {item.what:<36}{gib(item.nbytes):>12}" for item in tier.items)
    if plan.reserve_used:
        lines.append(
            f"reserve: {gib(plan.reserve_used)} of the {gib(plan.reserve)} to stay free is used "
            f"({plan.reserve_because})"
        )
    lines.append(f"source: {plan.source} ({plan.source_because})")
    if plan.reads is not None:
        lines.append(f"reads: {plan.reads}")
    if plan.pinning is not None:
        lines.append(f"page-locking: {plan.pinning}")
    if plan.speed is not None:
        lines.append(f"decode: {plan.speed}")
    if plan.prompts is not None:
        lines.append(f"prompts: {plan.prompts}")
    lines.append(f"context: {plan.context} tokens ({plan.context_because})")
    if plan.options:
        lines.append("would fit:")
        lines.extend(f"    {option.flags}  (needs {gib(option.need)})" for option in plan.options)
    return "\n".join(lines)


def _named(tier: Tier) -> str:
    return f"{tier.name} ({tier.label})" if tier.label else tier.name


def _ram_origin(plan: Plan) -> str:
    kept = plan.reserve and not plan.reserve_used
    return plan.ram_origin + (f", less the reserve of {gib(plan.reserve)}" if kept else "")


def _missing(short_by: int) -> str:
    return f", short by {gib(short_by)}" if short_by else ""


def plan_degradations(request: PlanRequest, plan: Plan) -> tuple[Degradation, ...]:
    """What the planner chose for want of memory, where the choice was its own."""
    found: list[Degradation] = []
    remedy = "free memory or lower STRATA_RAM_RESERVE_GIB" if plan.reserve else "give more memory"
    found.extend(tier_degradations(request, plan))
    if request.source is None and plan.source == "mmap":
        found.append(
            Degradation(
                what="the experts are not kept in memory but read from the mapped file",
                why=plan.source_because,
                cost="an expert that has left the system's file cache is read from the disk again",
                remedy=remedy,
            )
        )
    if request.context is None and plan.context < request.trained:
        named = ", or name a length with --max-context" if plan.reserve else ""
        if request.accelerator:
            remedy, named = "name a length with --max-context; fewer experts are cached then", ""
            if request.sizes.chunk:
                named = "; or give shorter chunks with --prefill"
        found.append(
            Degradation(
                what=f"the context is cut to {plan.context} tokens",
                why=plan.context_because,
                cost="what needs more tokens is refused",
                remedy=remedy + named,
            )
        )
    return (*found, *_too_many(request), *_idle_helpers(request, plan))


def _too_many(request: PlanRequest) -> Iterator[Degradation]:
    """A cache for more experts than there are."""
    asked = request.accelerator.cache if request.accelerator else None
    if asked is not None and asked > request.sizes.count:
        yield Degradation(
            what=f"--expert-cache {asked} holds {request.sizes.count} experts",
            why="the model has no more",
            cost="none: every expert is in the cache",
            remedy=f"give at most {request.sizes.count}, or leave it out",
        )


def _idle_helpers(request: PlanRequest, plan: Plan) -> Iterator[Degradation]:
    """Helpers that were asked to hold more experts than are left for them."""
    asked = request.accelerator.helpers if request.accelerator else ()
    for number, (wanted, cache) in enumerate(zip(asked, plan.caches[1:], strict=False), 1):
        if wanted != 0 and not cache.experts:
            yield Degradation(
                what=f"{cache.device} holds no experts, though --expert-cache-device{number} asks",
                why="the devices before it hold all of them, or it has no room for one",
                cost="it does not help",
                remedy=f"leave --expert-cache-device{number} out, or lower --expert-cache",
            )
        elif wanted is not None and cache.experts < wanted:
            yield Degradation(
                what=f"--expert-cache-device{number} {wanted} holds {cache.experts} experts",
                why="the devices before it hold all others",
                cost=f"none: every expert is on a device, these on {cache.device}",
                remedy=f"give at most {cache.experts}, or auto",
            )


def does_not_fit(plan: Plan, model: str) -> DoesNotFit:
    """The error for a plan that does not fit: the shortfall, and what would fit."""
    tier = next(tier for tier in plan.tiers if tier.short_by)
    origin = _ram_origin(plan) if tier.name == "ram" else tier.origin
    return DoesNotFit(
        f"{model} does not fit: {_named(tier)} is short by {gib(tier.short_by)}",
        f"it needs {gib(tier.need)} and {gib(tier.have)} may be used ({origin})",
        "would fit: " + "; ".join(f"{o.flags} (needs {gib(o.need)})" for o in plan.options)
        if plan.options
        else _nothing_smaller(plan, tier),
    )


def _nothing_smaller(plan: Plan, tier: Tier) -> str:
    """What is left to do where no smaller request fits. A model's size is not what pins need."""
    if tier.name == "pinned":
        return (
            "raise what the driver may page-lock (STRATA_PIN_LIMIT_GIB, where it was given; "
            "--sim-pin-budget for simulated devices), use fewer devices with --device, or "
            "--backend cpu, which needs none"
        )
    ways = "free memory"
    if tier.name == "ram" and plan.ram_origin == RAM_BUDGET:
        ways = f"raise --ram-budget to {_flag(tier.need)}"
    elif tier.name != "ram":
        ways = "take a device with more memory (--sim-vram, for simulated ones)"
        if tier.origin.startswith(VRAM_BUDGET):
            ways = f"raise --vram-budget to {_flag(tier.need)}, where the device has it"
    return f"nothing smaller fits; {ways}, or take a model with fewer or smaller weights"


def _flag(nbytes: int) -> str:
    """GiB as a flag takes them, never less than the bytes."""
    return f"{ceil(nbytes * 100 / 2**30) / 100:g}"
