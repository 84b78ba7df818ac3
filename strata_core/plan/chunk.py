"""How many tokens of a prompt are computed together: so many that computing covers what is copied.

A chunk brings every expert that the first device does not hold, once, however long it is; what it
computes grows with its tokens. Copies run beside computing, so a chunk takes the longer of the two,
and one that computes for as long as it copies wastes neither. Longer ones gain nothing but take
VRAM, and a prompt is cut into fewer of them. Pure.

Left out, since both make a chunk compute for longer: attention, which grows with the context, and
tiles of few tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any

from attrs import asdict, evolve, frozen

from strata_core.plan.lending import lendable
from strata_core.plan.sizes import EXPERTS, Sizes, gib
from strata_core.plan.speed import Rate

if TYPE_CHECKING:
    from strata_core.plan.plan import Plan, PlanRequest
    from strata_core.runtime import Device

MOST = 8192
"""The longest chunk that is taken without being asked for."""

USUAL = 4096
"""Tokens of a chunk where nothing has to be copied: products then have whole tiles.

Of 128 experts, 8 of which are asked for, each has 256 of them: 7 % more tokens a second than with
chunks of 2048 were measured (docs/experiments.md, section 12).
"""

COVERED = 0.75
"""A chunk is long enough that computes for this part of the time that it copies."""

SHARE = 16
"""A chunk's buffers take at most such a part of the device's memory, unless it was asked for."""

STAGED = 7e9
"""Bytes a second that come to a device by way of page-locked buffers: out of other host memory."""


@frozen(kw_only=True)
class Balance:
    """A chunk of `tokens`, and the arithmetic behind it.

    It brings `experts`, `nbytes` together, in `copy_s`, and computes `ops` for each token, which
    takes `compute_s` in all, at the rates `link` and `compute`. `because` says why it is as long.
    """

    tokens: int
    because: str
    experts: int
    nbytes: int
    copy_s: float
    ops: int
    compute_s: float
    link: Rate
    compute: Rate

    @property
    def tokens_s(self) -> float:
        """Tokens a second of a long prompt, attention left out: the bound of these rates."""
        return self.tokens / max(self.copy_s, self.compute_s, 1e-9)

    def as_json(self) -> dict[str, Any]:
        """As a member of the plan's document."""
        return asdict(self) | {"bound_tok_s": self.tokens_s}

    def __str__(self) -> str:
        brought = "it brings no experts"
        if self.experts:
            brought = (
                f"it brings {self.experts} experts, {gib(self.nbytes)} in {_ms(self.copy_s)} with "
                f"a link of {self.link.bytes_s / 1e9:.1f} GB/s ({self.link.origin})"
            )
        return (
            f"chunks of {self.tokens} tokens ({self.because}): {brought}, and computes for "
            f"{_ms(self.compute_s)} at {self.compute.bytes_s / 1e12:.3g} TOP/s "
            f"({self.compute.origin})"
        )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def balance(request: PlanRequest, plan: Plan) -> Balance | None:
    """What a chunk of the request copies and computes; None where that is not known."""
    sizes, pace = request.sizes, request.pace
    if not plan.caches or not sizes.chunk or pace is None or pace.compute is None:
        return None
    cached = min(plan.caches[0].experts, sizes.count)
    brought = sizes.count - cached + lendable(cached, sizes.count, sizes.layers)
    nbytes = sizes.blobs(brought)
    return Balance(
        tokens=sizes.chunk,
        because=request.chunk_because,
        experts=brought,
        nbytes=nbytes,
        copy_s=_copy_s(request, plan, nbytes),
        ops=sizes.token_ops,
        compute_s=sizes.chunk * sizes.token_ops / pace.compute.bytes_s,
        link=pace.rates["link"],
        compute=pace.compute,
    )


def _copy_s(request: PlanRequest, plan: Plan, nbytes: int) -> float:
    """Seconds of bringing so many bytes: from page-locked memory, other memory, and the file."""
    pace, experts = request.pace, max(1, request.sizes.experts)
    assert pace is not None, "callers know of rates"
    held = sum(item.nbytes for item in plan.tier("ram").items if item.name == EXPERTS)
    if plan.source == "mmap":
        held = pace.cached
    in_ram = min(1.0, held / (experts if plan.source == "arena" else max(1, nbytes)))
    pinned = plan.pinning.nbytes / max(1, plan.pinning.of) if plan.pinning else 0.0
    link, file = pace.rates["link"].bytes_s, pace.rates["file"].bytes_s
    staged = min(link, STAGED)
    return nbytes * (in_ram * (pinned / link + (1 - pinned) / staged) + (1 - in_ram) / file)


def suiting(
    found: Iterable[Sizes], request: PlanRequest, make: Callable[[PlanRequest], Plan]
) -> tuple[Sizes, str, Iterator[Sizes]]:
    """The sizes with the chunk that suits, why, and those with shorter chunks.

    `found` has sizes with shorter and shorter chunks; `make` plans a request. A chunk that nobody
    asked for never keeps a model from fitting that a shorter one leaves room for.
    """
    sizes, because, rest = _balanced(found, request, make)
    if _has_room(sizes, request, make):
        return sizes, because, rest
    others = list(rest)
    for number, shorter in enumerate(others):
        if _has_room(shorter, request, make):
            label = _first(request).label
            because = f"as long as {label} has room for beside the rest"
            return shorter, because, iter(others[number + 1 :])
    return sizes, because, iter(others)


def _first(request: PlanRequest) -> Device:
    assert request.accelerator is not None, "callers ask for devices where there are some"
    return request.accelerator.devices[0]


def _has_room(sizes: Sizes, request: PlanRequest, make: Callable[[PlanRequest], Plan]) -> bool:
    """Whether the first device has room for a chunk and everything else."""
    return not make(evolve(request, sizes=sizes)).tier("vram0").short_by


def _balanced(
    found: Iterable[Sizes], request: PlanRequest, make: Callable[[PlanRequest], Plan]
) -> tuple[Sizes, str, Iterator[Sizes]]:
    """The chunk by what it copies and computes, and by its part of the device's memory."""
    accelerator = request.accelerator
    assert accelerator is not None, "callers ask for devices where there are some"
    candidates = iter(found)
    sizes, most = next(candidates), accelerator.room(0) // SHARE
    because = "the longest" if sizes.chunk >= MOST else "as long as the context"
    for shorter in candidates:
        if sizes.prompt <= most:
            candidates = chain([shorter], candidates)
            break
        sizes = shorter
        because = f"as long as a {SHARE}th of {_first(request).label}'s memory has room for"
    for shorter in candidates:
        if shorter.chunk < USUAL or not _covered(shorter, request, make):
            return sizes, because, chain([shorter], candidates)
        sizes = shorter
        because = f"the shortest from {USUAL} on that covers its copies"
    return sizes, because, iter(())


def _covered(sizes: Sizes, request: PlanRequest, make: Callable[[PlanRequest], Plan]) -> bool:
    """Whether a chunk computes for long enough beside its copies; nothing known counts as so."""
    asked = evolve(request, sizes=sizes)
    found = balance(asked, make(asked))
    return found is None or found.compute_s >= COVERED * found.copy_s
