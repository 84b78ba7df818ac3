"""What the settings ask of devices: which are used, what each is to hold, and for whom that is."""

from __future__ import annotations

from strata_core.config import Settings
from strata_core.errors import Degradation, UsageError
from strata_core.interfaces import AllocatorRecord, BackendRecord
from strata_core.kernels.device.options import used_devices
from strata_core.machine import Machine
from strata_core.memory.rules import PinSettings
from strata_core.plan.devices import Accelerator
from strata_core.plan.moving import Pace
from strata_core.setting_device import MOST_HELPERS
from strata_core.setting_table import SETTINGS

_SIMULATED = "sim"


def accelerator(
    settings: Settings, machine: Machine, backend: BackendRecord, allocator: AllocatorRecord
) -> Accelerator | None:
    """The devices to plan for; None where the backend has none of its own. Raises UsageError."""
    if backend.devices is None:
        return None
    options = settings.options()
    PinSettings.of(options)  # a plan refuses what a start would
    used = used_devices(options, backend.devices(machine, options))
    helpers = tuple(options[f"expert_cache_device{i}"] for i in range(1, MOST_HELPERS + 1))
    return Accelerator(
        devices=used,
        budget=_bytes(settings.vram_budget),
        reserve=None if settings.vram_reserve_mib is None else settings.vram_reserve_mib << 20,
        cache=_count(settings.expert_cache),
        helpers=tuple(_count(helper) for helper in helpers),
        pins=allocator.pins(machine, options) if allocator.pins else None,
        bulk_pins={
            "arena": _bytes(settings.arena_pin_gib or None),
            "sliced-pinned": _bytes(settings.complement_pin_gib),
        },
        resident=_bytes(settings.resident_budget_gib),
        pace=Pace.of(options),
    )


def without_use(settings: Settings, backend: BackendRecord) -> tuple[Degradation, ...]:
    """A degradation for each setting about devices that has nobody to heed it.

    Raises UsageError where a flag or an argument gave it.
    """
    found = []
    for setting in SETTINGS:
        if setting.group != "device" or setting.key not in settings.given():
            continue
        simulated = setting.key.startswith("sim_")
        if (simulated and backend.name == _SIMULATED) or (not simulated and backend.devices):
            continue
        why = (
            f"it is about the simulated devices, and the backend is {backend.name}"
            if simulated
            else f"backend {backend.name} has no devices of its own"
        )
        way = "choose a backend with devices with --backend"
        found.append(_without_effect(settings, setting.key, why, way))
    return tuple(found)


def without_residents(settings: Settings, source: str) -> tuple[Degradation, ...]:
    """As `without_use`, for the budget of resident experts where the source keeps none."""
    key = "resident_budget_gib"
    if source == "sliced-pinned" or key not in settings.given():
        return ()
    why = f"it is about the resident experts, and the source is {source}"
    return (_without_effect(settings, key, why, "give --resident-experts as well"),)


def _without_effect(settings: Settings, key: str, why: str, way: str) -> Degradation:
    """The degradation for a setting that nobody heeds; UsageError where a flag gave it."""
    origin = settings.origin(key)
    name = origin.split(" ", 1)[-1] if not origin.startswith("file") else key
    if origin.startswith(("flag", "argument")):
        raise UsageError(f"{name} has no effect here", why, f"leave it out, or {way}")
    return Degradation(
        what=f"{name} ({origin}) has no effect",
        why=why,
        cost="what it was meant to set is as if it were not given",
        remedy=f"remove it, or {way}",
    )


def _count(asked: int | str | None) -> int | None:
    """A number of experts, None for auto."""
    return asked if isinstance(asked, int) else None


def _bytes(size: float | str | None) -> int | None:
    """GiB as bytes; None, for any amount, where it is a word or nothing."""
    return int(size * 2**30) if isinstance(size, int | float) else None
