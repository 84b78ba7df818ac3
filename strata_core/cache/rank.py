"""The order in which experts are worth a place: the most asked for first."""

from __future__ import annotations

from collections.abc import Iterable

from strata_core.cache.profile import Profile
from strata_core.interfaces import Expert


def ranking(profile: Profile | None, layers: Iterable[int], experts: int) -> tuple[Expert, ...]:
    """All experts of these layers, by the profile's counts; equal ones are spread over the layers.

    Without a profile all are equal.
    """
    spread = [Expert(layer, index) for index in range(experts) for layer in layers]
    if profile is not None:
        # sorting is stable, so that equal counts keep the order of before
        spread.sort(key=lambda expert: -profile.counts[expert.layer][expert.index])
    return tuple(spread)


def rates(profile: Profile | None, order: Iterable[Expert], chosen: float) -> tuple[float, ...]:
    """How often a token is expected to ask for each expert of `order`.

    `chosen` is the share of its layer's experts that a token asks for, which holds for each of them
    where nothing was counted.
    """
    if profile is None:
        return tuple(chosen for _ in order)
    totals = {layer: sum(row) for layer, row in profile.counts.items()}
    picked = chosen * profile.experts
    return tuple(
        picked * profile.counts[e.layer][e.index] / totals[e.layer] if totals[e.layer] else chosen
        for e in order
    )
