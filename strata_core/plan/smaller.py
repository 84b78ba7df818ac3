"""Requests that ask for less of devices, for a plan that does not fit on them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from attrs import evolve

from strata_core.plan.devices import Accelerator, fitting, fixed, held
from strata_core.plan.sizes import Sizes

if TYPE_CHECKING:
    from strata_core.plan.plan import PlanRequest

Flags = dict[str, int | str]


def smaller(request: PlanRequest) -> Iterator[tuple[Flags, PlanRequest]]:
    """Flags that ask for less, with the request that they make, the smallest change first.

    `request` names its source and its context; whether any of them fits is for the caller to see.
    """
    accelerator = request.accelerator
    assert accelerator is not None, "callers ask for devices where there are some"
    helpers = tuple(_helpers(accelerator, request.sizes))
    less = evolve(accelerator, helpers=helpers)
    asked = zip(accelerator.helpers, helpers, strict=True)
    beside = {
        f"--expert-cache-device{number}": count
        for number, (before, count) in enumerate(asked, 1)
        if count != before and count is not None
    }
    for source in dict.fromkeys((request.source, "mmap")):
        for sizes in (request.sizes, *request.chunks):
            flags: Flags = {} if source == request.source else {"--source": source or ""}
            if sizes.chunk != request.sizes.chunk:
                flags["--prefill"] = sizes.chunk
            changed = evolve(request, source=source, sizes=sizes, accelerator=less)
            yield from _on_the_first({**flags, **beside}, changed, less)


def _on_the_first(
    given: Flags, request: PlanRequest, accelerator: Accelerator
) -> Iterator[tuple[Flags, PlanRequest]]:
    """The same with a smaller cache of the first device, and with a shorter context."""
    sizes, context = request.sizes, request.context or 0
    left = accelerator.have(0) - fixed(accelerator, sizes)
    caches = [accelerator.cache]
    if accelerator.cache is not None:
        fewer = fitting(accelerator, sizes, left - sizes.kv_position * context)
        caches += sorted({min(fewer, accelerator.cache), 0}, reverse=True)
    for cache in dict.fromkeys(caches):
        room = left - held(accelerator, sizes, cache or 0)
        for length in (context, min(context, room // max(1, sizes.kv_position))):
            flags = dict(given)
            if cache is not None and cache != accelerator.cache:
                flags["--expert-cache"] = cache
            if length != context:
                flags["--max-context"] = length
            if flags and length >= 1:
                less = evolve(accelerator, cache=cache)
                yield flags, evolve(request, context=length, accelerator=less)


def _helpers(accelerator: Accelerator, sizes: Sizes) -> Iterator[int | None]:
    """The most experts, of those asked for, that fit on each device that helps."""
    for number, wanted in enumerate(accelerator.helpers, 1):
        if wanted is None or number >= len(accelerator.devices):
            yield wanted
        else:
            room = accelerator.have(number) - sizes.helper_workspace
            yield min(wanted, sizes.fitting(room))
