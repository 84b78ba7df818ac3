"""Requests for plans on devices of any size, beside a model of 1,000 experts of 2 MiB."""

from __future__ import annotations

from strata_core.plan.devices import Accelerator
from strata_core.plan.plan import PlanRequest, Sizes
from strata_core.runtime import Device

MIB = 1 << 20
SIZES = Sizes(
    dense=300 * MIB,
    experts=2000 * MIB,
    kv_position=MIB // 4,
    workspace=20 * MIB,
    count=1000,
    embedding=100 * MIB,
    small=10 * MIB,
    helper_workspace=8 * MIB,
)


def device(index: int, mib: int) -> Device:
    return Device(
        index=index,
        label=f"DEV{index}",
        name="a device",
        architecture="x",
        total=mib * MIB,
        units=1,
        warp=32,
    )


def request(*mib: int, more: dict[str, object] | None = None, **asked: object) -> PlanRequest:
    asked.setdefault("reserve", 0)
    devices = tuple(device(i, size) for i, size in enumerate(mib))
    values: dict[str, object] = {
        "sizes": SIZES,
        "ram": 8000 * MIB,
        "ram_origin": "available",
        "reserve": 0,
        "trained": 1024,
        "accelerator": Accelerator(devices=devices, **asked),
    }
    return PlanRequest(**{**values, **(more or {})})
