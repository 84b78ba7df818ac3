"""The part of a plan that is about devices: what lies in VRAM, what is page-locked, what RAM keeps.

Pure arithmetic from what is known of the devices without opening one. Counts of experts are planned
with the mean size of a blob; a start sizes its caches from what is really free.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import floor
from typing import TYPE_CHECKING

from attrs import evolve, field, frozen

from strata_core.plan.lending import lendable
from strata_core.plan.moving import Pace, spares
from strata_core.plan.sizes import (
    BASE_BYTES,
    BROUGHT,
    CHUNK,
    DENSE,
    EMBEDDING,
    EXPERTS,
    KV,
    PROGRAM,
    SLOTS,
    SMALL,
    WORK,
    Item,
    Sizes,
    Tier,
    gib,
)
from strata_core.runtime import Device

if TYPE_CHECKING:
    from strata_core.plan.plan import PlanRequest

_NOT_KNOWN = 1 << 62

VRAM_BUDGET = "--vram-budget"
"""Begins the `origin` of a tier that has what the user allowed."""

RESERVE_SHARE = 20
"""Without a reserve that was named, caches leave at most this part of a device free."""


@frozen(kw_only=True)
class Bulk:
    """How a source's memory for experts may be page-locked.

    `most` are the bytes that the settings allow, `limit` what may be page-locked of everything
    together, the margin already left out (None: any amount); `because` says what the limit is.
    `one`: it is asked for as one allocation first; `prefix`: one piece from its beginning.
    """

    most: int | None = None
    limit: int | None = None
    because: str = ""
    one: bool = False
    prefix: bool = False


@frozen
class Pinning:
    """The way in which the experts' memory is expected to be had, and how much is page-locked."""

    path: str
    nbytes: int
    of: int
    because: str = ""

    def __str__(self) -> str:
        text = f"{self.path}, {gib(self.nbytes)} of {gib(self.of)} page-locked"
        return f"{text} ({self.because})" if self.because else text


@frozen(kw_only=True)
class Accelerator:
    """The devices to plan for, and what was asked of them. Sizes are bytes.

    The first of `devices` computes the model, the others help. `budget` is the most to take of the
    first; `reserve` what caches of the size auto leave free on each, None for the default.
    `cache` is the number of experts that the first holds, `helpers` those of the others (missing:
    none); None stands for auto. `pins` is what the driver is expected to page-lock (None: any
    amount), `bulk` how the experts' memory may be, by source (missing: in any way); `resident` the
    most RAM for experts that no device holds (None: any). `pace` is how fast experts of the first
    device's cache change places with others.
    """

    devices: tuple[Device, ...]
    budget: int | None = None
    reserve: int | None = None
    cache: int | None = None
    helpers: tuple[int | None, ...] = ()
    pins: int | None = None
    bulk: Mapping[str, Bulk] = field(factory=dict)
    resident: int | None = None
    pace: Pace = field(factory=Pace)

    def have(self, number: int) -> int:
        """What may be taken of the device at `number`; as good as all where that is not known."""
        total = self.devices[number].total or _NOT_KNOWN
        return total if number or self.budget is None else min(total, self.budget)

    def kept(self, number: int) -> int:
        """What choices left to Strata leave free of it."""
        return default_reserve(self.devices[number].total) if self.reserve is None else self.reserve

    def room(self, number: int) -> int:
        """What choices left to Strata may take of it."""
        free = (self.devices[number].total or _NOT_KNOWN) - self.kept(number)
        return max(0, min(self.have(number), free))


def default_reserve(total: int) -> int:
    """What caches leave free of a device with `total` bytes where nothing else was named."""
    return min(700 << 20, total // RESERVE_SHARE)


@frozen
class Cache:
    """Experts that a device is to hold; `spare` empty slots are beside theirs."""

    device: str
    experts: int
    nbytes: int
    spare: int = 0


@frozen(kw_only=True)
class Layout:
    """Where everything goes for one source and one context."""

    vram: tuple[Tier, ...]
    pinned: Tier
    ram: tuple[Item, ...]
    caches: tuple[Cache, ...]
    pinning: Pinning | None = None


def lay_out(request: PlanRequest, source: str, context: int) -> Layout:
    """The tiers that devices lead to."""
    accelerator, sizes = _accelerator(request), request.sizes
    pinned = _embedding_pinned(accelerator, sizes)
    counts = _counts(request, context)
    names = [device.label for device in accelerator.devices]
    caches = tuple(
        Cache(name, count, sizes.blobs(count)) for name, count in zip(names, counts, strict=True)
    )
    spare = spares(counts[0], sizes.count, accelerator.pace.at_once)
    caches = (evolve(caches[0], spare=spare), *caches[1:])
    small = _small(accelerator, sizes, spare)
    beside = small + BASE_BYTES + (sizes.embedding if pinned else 0)
    host = _host_experts(request, source, sum(counts), spare, beside)
    pinning = _pinning(accelerator, sizes, source, host, small)
    return Layout(
        vram=tuple(
            _vram(request, number, cache, context)
            for number, cache in enumerate(caches)
            if number == 0 or cache.experts
        ),
        pinned=_pinned(accelerator, sizes, pinning, small),
        ram=(
            *((Item("experts", host, EXPERTS),) if host else ()),
            *((Item("token embedding", sizes.embedding, EMBEDDING),) if pinned else ()),
            Item("small page-locked buffers", small, SMALL),
            Item("program", BASE_BYTES, PROGRAM),
        ),
        caches=caches,
        pinning=pinning,
    )


def most_context(request: PlanRequest) -> tuple[int, str]:
    """Tokens whose keys and values fit into VRAM beside the rest, and what they are told to fit in.

    Beside a cache of the size auto they get half of what is left; negative where nothing is.
    """
    accelerator, sizes = _accelerator(request), request.sizes
    where = f"what is left of {accelerator.devices[0].label}"
    if sizes.chunk:
        where += f" beside chunks of {sizes.chunk} tokens, which take {gib(sizes.prompt)}"
    left = accelerator.room(0) - fixed(accelerator, sizes)
    if accelerator.cache is None:
        left, where = left // 2, f"half of {where}; the rest holds experts"
    else:
        left -= held(accelerator, sizes, accelerator.cache)
    return left // max(1, sizes.kv_position), where


def _accelerator(request: PlanRequest) -> Accelerator:
    assert request.accelerator is not None, "callers ask for devices where there are some"
    return request.accelerator


def _embedding_pinned(accelerator: Accelerator, sizes: Sizes) -> bool:
    """Whether the token embedding is expected outside VRAM; a tied table never is."""
    fits = accelerator.pins is None or sizes.embedding + sizes.small <= accelerator.pins
    return bool(sizes.embedding) and fits


def fixed(accelerator: Accelerator, sizes: Sizes) -> int:
    """What the first device holds whatever the context and the cache."""
    apart = sizes.embedding if _embedding_pinned(accelerator, sizes) else 0
    return sizes.dense - apart + sizes.workspace + sizes.prompt


def held(accelerator: Accelerator, sizes: Sizes, cached: int) -> int:
    """What a cache of so many experts, with its empty slots, takes of the first device.

    Prompts take buffers for experts beside it where the cache has none to lend.
    """
    count = min(cached, sizes.count)
    spare = spares(count, sizes.count, accelerator.pace.at_once)
    return sizes.blobs(count) + sizes.blobs(spare) + sizes.own_buffers(cached)


def fitting(accelerator: Accelerator, sizes: Sizes, nbytes: int) -> int:
    """Experts of the first device's cache that fit into `nbytes` with its empty slots."""
    slots = sizes.fitting(nbytes)
    own = sizes.own_buffers(slots)
    slots = sizes.fitting(nbytes - own) if own else slots
    return _beside_spares(slots, sizes.count, accelerator.pace.at_once)


def _counts(request: PlanRequest, context: int) -> list[int]:
    """Experts that each device is to hold, in the devices' order."""
    accelerator, sizes = _accelerator(request), request.sizes
    left = sizes.count
    counts = []
    for number, _ in enumerate(accelerator.devices):
        wanted: int | None = accelerator.cache
        taken = fixed(accelerator, sizes) + sizes.kv_position * context
        if number:
            helpers = accelerator.helpers
            wanted = helpers[number - 1] if number <= len(helpers) else 0
            taken = sizes.helper_workspace
        if wanted is None:
            room = accelerator.room(number) - taken
            # what cannot be known is not promised: the cache is made once the device is open
            most = sizes.fitting(room) if number else fitting(accelerator, sizes, room)
            wanted = most if room < _NOT_KNOWN // 2 else 0
        counts.append(max(0, min(wanted, left)))
        left -= counts[-1]
    return counts


def _beside_spares(fitting: int, total: int, at_once: int) -> int:
    """Of so many slots, those that hold an expert where some stay empty."""
    for count in range(fitting, 0, -1):
        if count + spares(count, total, at_once) <= fitting:
            return count
    return fitting


def _vram(request: PlanRequest, number: int, cache: Cache, context: int) -> Tier:
    accelerator, sizes = _accelerator(request), request.sizes
    slots = f"{cache.experts} of {sizes.count} experts"
    slots += f" and {cache.spare} empty slots" if cache.spare else ""
    experts = (Item(slots, cache.nbytes + sizes.blobs(cache.spare), SLOTS),)
    if number:
        items = (*experts, Item("working memory", sizes.helper_workspace, WORK))
    else:
        apart = sizes.embedding if _embedding_pinned(accelerator, sizes) else 0
        own = sizes.own_buffers(cache.experts)
        items = (
            Item("dense weights", sizes.dense - apart, DENSE),
            Item(f"keys and values of {context} tokens", sizes.kv_position * context, KV),
            Item("working memory", sizes.workspace, WORK),
            *_of_prompts(sizes, own),
            *(experts if cache.experts else ()),
        )
    have, device = accelerator.have(number), accelerator.devices[number]
    if not device.total and (number or accelerator.budget is None):
        need = sum(item.nbytes for item in items)
        return Tier(f"vram{number}", items, need, device.label, "its size is known once it is open")
    origin = f"of {gib(device.total)}; caches leave {gib(accelerator.kept(number))} free"
    if not number and accelerator.budget is not None:
        origin = f"{VRAM_BUDGET} {gib(accelerator.budget)}, {origin}"
    return Tier(f"vram{number}", items, have, device.label, origin)


def _of_prompts(sizes: Sizes, own: int) -> Iterator[Item]:
    """What prompts take of the first device; `own` bytes of buffers for experts."""
    if sizes.chunk:
        yield Item(f"a prompt's chunk of {sizes.chunk} tokens", sizes.prompt, CHUNK)
    if own:
        yield Item("experts of prompts on their way", own, BROUGHT)


def _small(accelerator: Accelerator, sizes: Sizes, spare: int) -> int:
    """Bytes of small page-locked buffers."""
    small = sizes.small + (sizes.table if accelerator.pace.at_once else 0)
    if not spare:
        return small
    embedding = sizes.embedding if _embedding_pinned(accelerator, sizes) else 0
    fits = accelerator.pins is None or small + embedding + sizes.moving <= accelerator.pins
    return small + sizes.moving if fits else small


def _host_experts(request: PlanRequest, source: str, cached: int, spare: int, beside: int) -> int:
    """Bytes of experts that the source keeps in RAM, of which `beside` bytes are something else."""
    accelerator, sizes = _accelerator(request), request.sizes
    if source == "arena":
        return sizes.experts
    if source != "sliced-pinned" or cached >= sizes.count:
        return 0
    outside = sizes.blobs(sizes.count - cached + spare)
    # what prompts borrow the slots of is kept there meanwhile, as far as that has room
    lent = sizes.blobs(lendable(cached, sizes.count, sizes.layers))
    outside += max(0, min(lent, request.room - beside - outside))
    return outside if accelerator.resident is None else min(outside, accelerator.resident)


def _pinning(
    accelerator: Accelerator, sizes: Sizes, source: str, host: int, small: int
) -> Pinning | None:
    """How the experts' memory is expected to be had; None where there is none.

    `small` bytes are page-locked before it, beside the embedding.
    """
    if not host:
        return None
    embedding = sizes.embedding if _embedding_pinned(accelerator, sizes) else 0
    rule = accelerator.bulk.get(source, Bulk())
    before = small + embedding
    known = accelerator.pins
    bounds = [
        (host, ""),
        (rule.most, "what the settings allow"),
        (None if rule.limit is None else rule.limit - before, rule.because),
        (None if known is None else known - before, "what the driver is known to lock"),
    ]
    most, because = min(
        ((size, text) for size, text in bounds if size is not None), key=lambda item: item[0]
    )
    bulk = max(0, most)
    path = "path 2, in slices"
    if not bulk:
        path = "path 3, locked at most"
    elif rule.prefix:
        path = "pinned prefix"
    elif rule.one and bulk == host:
        path = "path 1, one allocation"
    return Pinning(path, bulk, host, because)


def with_bulk(request: PlanRequest, layout: Layout, source: str, nbytes: int) -> Layout:
    """The same for a source that keeps so many bytes of host memory for experts."""
    accelerator = _accelerator(request)
    spare = layout.caches[0].spare if layout.caches else 0
    small = _small(accelerator, request.sizes, spare)
    pinning = _pinning(accelerator, request.sizes, source, nbytes, small)
    pinned = _pinned(accelerator, request.sizes, pinning, small)
    return evolve(layout, pinning=pinning, pinned=pinned)


def _pinned(accelerator: Accelerator, sizes: Sizes, pinning: Pinning | None, small: int) -> Tier:
    """What is expected to be page-locked."""
    items = [Item("small buffers", small, SMALL)]
    if _embedding_pinned(accelerator, sizes):
        items.append(Item("token embedding", sizes.embedding, EMBEDDING))
    if pinning is not None:
        share = floor(100 * pinning.nbytes / pinning.of)
        what = f"{share} % of the experts in RAM ({pinning.path})"
        items.append(Item(what, pinning.nbytes, EXPERTS))
    need = sum(item.nbytes for item in items)
    have = need if accelerator.pins is None else accelerator.pins
    origin = "no limit is known" if accelerator.pins is None else "what the driver is known to lock"
    return Tier("pinned", tuple(items), have, "", origin)
