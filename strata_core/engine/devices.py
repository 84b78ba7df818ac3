"""What the settings ask of devices: which are used, what each is to hold, and for whom that is."""

from __future__ import annotations

from collections.abc import Mapping

from strata_core.config import Settings
from strata_core.errors import Degradation, UsageError
from strata_core.interfaces import AllocatorRecord, BackendRecord
from strata_core.kernels.device.options import used_devices
from strata_core.machine import Machine
from strata_core.memory.limits import PinLimit, available_limit, known_limit
from strata_core.memory.rules import ARENA, COMPLEMENT, PinSettings
from strata_core.plan.devices import Accelerator, Bulk
from strata_core.plan.moving import Pace
from strata_core.setting import Setting
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
    pins = PinSettings.of(options)  # a plan refuses what a start would
    used = used_devices(options, backend.devices(machine, options))
    helpers = tuple(options[f"expert_cache_device{i}"] for i in range(1, MOST_HELPERS + 1))
    return Accelerator(
        devices=used,
        budget=_bytes(settings.vram_budget),
        reserve=None if settings.vram_reserve_mib is None else settings.vram_reserve_mib << 20,
        cache=_count(settings.expert_cache),
        helpers=tuple(_count(helper) for helper in helpers),
        pins=allocator.pins(machine, options) if allocator.pins else None,
        bulk={
            "arena": _bulk(pins, ARENA, machine),
            "sliced-pinned": _bulk(pins, COMPLEMENT, machine),
            "tiered-file": _bulk(pins, "", machine),
        },
        resident=_bytes(settings.resident_budget_gib),
        pace=Pace.of(options),
    )


def is_simulated(backend: BackendRecord) -> bool:
    """Whether a backend's devices are the CPU."""
    return backend.name == _SIMULATED


def _bulk(pins: PinSettings, purpose: str, machine: Machine) -> Bulk:
    """How memory for a purpose may be page-locked, as the allocator will have it."""
    rule = pins.rule(purpose)
    limit = PinLimit()
    if rule.limit != "none" and pins.known is not None:
        limit = known_limit(pins.known, pins.margin, "STRATA_PIN_LIMIT_GIB is")
    elif rule.limit == "machine":
        limit = available_limit(machine.memory_available, 0, pins.margin)
    return Bulk(
        most=rule.most,
        limit=None if limit.nbytes is None else max(0, limit.nbytes - limit.margin),
        because=limit.because,
        one=rule.one_first and not rule.refuse_one,
        prefix=rule.prefix,
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
        if (simulated and is_simulated(backend)) or (not simulated and backend.devices):
            continue
        why = (
            f"it is about the simulated devices, and the backend is {backend.name}"
            if simulated
            else f"backend {backend.name} has no devices of its own"
        )
        way = "choose a backend with devices with --backend"
        found.append(_without_effect(settings, setting.key, why, way))
    return tuple(found)


_HEEDED: Mapping[str, tuple[str, ...]] = {
    "resident_budget_gib": ("sliced-pinned",),
    "complement_pin_gib": ("sliced-pinned",),
    "test_complement_refuse": ("sliced-pinned",),
    "arena_pin_gib": ("arena",),
    "partial_pin": ("arena", "sliced-pinned"),
    "partial_pin_gib": ("arena", "sliced-pinned"),
    "tier_verify": ("tiered-file", "sliced-pinned"),
}
"""The sources that heed a setting about host memory, for settings that not all of them heed."""


def without_source(
    settings: Settings, source: str, backend: BackendRecord
) -> tuple[Degradation, ...]:
    """As `without_use`, for settings about the host memory of other sources than the chosen one."""
    found = []
    for setting in SETTINGS:
        heeded = _HEEDED.get(setting.key)
        if heeded is None or source in heeded or setting.key not in settings.given():
            continue
        if setting.group == "device" and not backend.devices:
            continue  # `without_use` has told of it
        if _is_off(setting, settings):
            continue
        names = " or ".join(heeded)
        way = "give --resident-experts as well"
        if heeded != ("sliced-pinned",):
            way = f"choose {' or '.join(f'--source {name}' for name in heeded)}"
        why = f"it is about the source {names}, and the source is {source}"
        found.append(_without_effect(settings, setting.key, why, way))
    return tuple(found)


def _is_off(setting: Setting, settings: Settings) -> bool:
    """Whether a switch is given as what it is anyway."""
    return setting.kind == "switch" and settings.options()[setting.key] == setting.default


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
