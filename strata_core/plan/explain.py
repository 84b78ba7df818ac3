"""A plan in words, and the error of one that does not fit."""

from __future__ import annotations

from strata_core.errors import DoesNotFit
from strata_core.plan.plan import Plan, gib


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
