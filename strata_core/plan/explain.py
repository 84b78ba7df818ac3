"""A plan in words: its text, what it makes worse, and the error of one that does not fit."""

from __future__ import annotations

from strata_core.errors import Degradation, DoesNotFit
from strata_core.plan.plan import Plan, PlanRequest, gib, keeps_experts_in_ram


def explain(plan: Plan) -> str:
    """The plan as lines of text: need and have for each tier, then the decisions."""
    lines = []
    for tier in plan.tiers:
        if not tier.items:
            continue
        have = f"have {gib(tier.have)}"
        if tier.name == "ram":
            have += f" ({_ram_origin(plan)})"
        lines.append(f"{tier.name}: need {gib(tier.need)}, {have}" + _missing(tier.short_by))
        lines.extend(f"    {item.what:<36}{gib(item.nbytes):>12}" for item in tier.items)
    if plan.reserve_used:
        lines.append(
            f"reserve: {gib(plan.reserve_used)} of the {gib(plan.reserve)} to stay free is used "
            f"({plan.reserve_because})"
        )
    lines.append(f"source: {plan.source} ({plan.source_because})")
    lines.append(f"context: {plan.context} tokens ({plan.context_because})")
    if plan.options:
        lines.append("would fit:")
        lines.extend(f"    {option.flags}  (needs {gib(option.need)})" for option in plan.options)
    return "\n".join(lines)


def _ram_origin(plan: Plan) -> str:
    kept = plan.reserve and not plan.reserve_used
    return plan.ram_origin + (f", less the reserve of {gib(plan.reserve)}" if kept else "")


def _missing(short_by: int) -> str:
    return f", short by {gib(short_by)}" if short_by else ""


def plan_degradations(request: PlanRequest, plan: Plan) -> tuple[Degradation, ...]:
    """What the planner chose for want of memory, where the choice was its own."""
    found = []
    remedy = "free memory or lower STRATA_RAM_RESERVE_GIB" if plan.reserve else "give more memory"
    if request.source is None and not keeps_experts_in_ram(plan.source):
        found.append(
            Degradation(
                what="the experts are not kept in memory but read from the mapped file",
                why=plan.source_because,
                cost="an expert that has left the system's file cache is read from the disk again",
                remedy=remedy,
            )
        )
    if request.context is None and plan.context < request.trained:
        found.append(
            Degradation(
                what=f"the context is cut to {plan.context} tokens",
                why=plan.context_because,
                cost="what needs more tokens is refused",
                remedy=remedy + (", or name a length with --max-context" if plan.reserve else ""),
            )
        )
    return tuple(found)


def does_not_fit(plan: Plan, model: str) -> DoesNotFit:
    """The error for a plan that does not fit: the shortfall, and what would fit."""
    tier = next(tier for tier in plan.tiers if tier.short_by)
    return DoesNotFit(
        f"{model} does not fit: {tier.name} is short by {gib(tier.short_by)}",
        f"it needs {gib(tier.need)} and {gib(tier.have)} may be used ({_ram_origin(plan)})",
        "would fit: " + "; ".join(f"{o.flags} (needs {gib(o.need)})" for o in plan.options)
        if plan.options
        else "nothing smaller fits; a model with fewer or smaller weights is needed",
    )
