"""Runs of plain launches to fused ones, and back.

A run is recognised by its kernels, one behind the other, and by their arguments: what two of them
call by one name of the fused kernel's must be the same value. So a wrong order, another buffer or
another number of rows is no such run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from attrs import evolve

from strata_core.kernels.device.fused_entry import Fused, Part
from strata_core.kernels.device.fused_table import FUSED
from strata_core.kernels.device.segments import Item, Segment
from strata_core.kernels.device.table import DEVICE_KERNELS, make_launch, unpack
from strata_core.runtime import KernelKey, Launch


def fuse(segment: Segment) -> Segment:
    """The same segment in fewer launches, each that follows a launch starting early."""
    items: list[Item] = []
    at = 0
    while at < len(segment.items):
        found, length = _found_at(segment.items, at)
        items.append(found)
        at += length
    return Segment(start_early(items), segment.layer)


def start_early(items: Sequence[Item]) -> list[Item]:
    """The same items, every launch early that has a launch right before it."""
    follows = [False, *(isinstance(item, Launch) for item in items)]
    return [
        evolve(item, early=early) if isinstance(item, Launch) else item
        for item, early in zip(items, follows, strict=False)
    ]


def parts_of(launch: Launch) -> tuple[Launch, ...]:
    """The plain launches that a fused one stands for; the launch itself where it is plain."""
    fused = FUSED.get(launch.kernel.name)
    if fused is None:
        return (launch,)
    values = unpack(launch.kernel.name, launch.args)
    named = dict(zip(fused.kernel.parameters, launch.kernel.parameters, strict=True))
    run = next(run for run in fused.runs if all(values[name] for name in _marks(fused, run)))
    return tuple(_part(part, values, named) for part in run)


def plain_keys(key: KernelKey) -> set[KernelKey]:
    """The plain kernels that one may stand for."""
    fused = FUSED[key.name]
    named = dict(zip(fused.kernel.parameters, key.parameters, strict=True))
    return {
        KernelKey(part.kernel, tuple(named[n] for n in part.parameters))
        for run in fused.runs
        for part in run
    }


def _marks(fused: Fused, run: Sequence[Part]) -> list[str]:
    """Addresses that a run has and the shortest run of the kernel has not."""
    always = _called(fused.runs[-1])
    kinds = fused.kernel.args
    return [n for n in _called(run) - always if kinds[n] == "ptr" and not n.startswith("bias")]


def _called(run: Sequence[Part]) -> set[str]:
    """The fused kernel's names of a run's arguments."""
    names = (part.args.get(n, n) for part in run for n in DEVICE_KERNELS[part.kernel].args)
    return {name for name in names if isinstance(name, str)}


def _part(part: Part, values: Mapping[str, int | float], named: Mapping[str, str | int]) -> Launch:
    args = {}
    for name in DEVICE_KERNELS[part.kernel].args:
        called = part.args.get(name, name)
        args[name] = values[called] if isinstance(called, str) else called
    return make_launch(part.kernel, tuple(named[n] for n in part.parameters), **args)


def _found_at(items: Sequence[Item], at: int) -> tuple[Item, int]:
    """What stands at a place, fused as far as it goes, and how many items that is."""
    best: tuple[Item, int] = items[at], 1
    for fused in FUSED.values():
        for run in fused.runs:
            here = items[at : at + len(run)]
            if len(run) > best[1] and len(here) == len(run):
                launch = _matched(fused, run, here)
                if launch is not None:
                    best = launch, len(run)
    return best


def _matched(fused: Fused, run: Sequence[Part], items: Sequence[Item]) -> Launch | None:
    """The fused launch of items that are such a run."""
    values: dict[str, int | float] = {}
    named: dict[str, str | int] = {}
    for part, item in zip(run, items, strict=True):
        if not isinstance(item, Launch) or item.kernel.name != part.kernel:
            return None
        for name, value in zip(part.parameters, item.kernel.parameters, strict=True):
            if named.setdefault(name, value) != value:
                return None
        for name, number in unpack(part.kernel, item.args).items():
            called = part.args.get(name, name)
            wanted = values.setdefault(called, number) if isinstance(called, str) else called
            if wanted != number:
                return None
    first = next(iter(named.values()), 0)
    parameters = tuple(named.get(name, first) for name in fused.kernel.parameters)
    values = {name: values.get(name, 0) for name in fused.kernel.args}
    if not fused.fits(values, parameters):
        return None
    return make_launch(fused.kernel.name, parameters, **values)
