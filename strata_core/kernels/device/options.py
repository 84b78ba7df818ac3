"""What the user asked of devices, from the options of a backend's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from attrs import frozen

from strata_core.cache.amount import Amount, Wish
from strata_core.errors import UsageError
from strata_core.kernels.device.exchange import MOST_HELPERS
from strata_core.runtime import Device

GIB, MIB = 1 << 30, 1 << 20


@frozen
class DeviceOptions:
    """`device` computes the model, `helpers` are the devices of helpers 1 to 3.

    `cache` and `helper_caches` say how many experts each holds, `budget` the most bytes to take of
    the first device, `link_share` the part of the misses that goes over the link.
    """

    device: int
    helpers: tuple[int, ...]
    cache: Wish
    helper_caches: tuple[Wish, ...]
    budget: int | None
    link_share: float

    @property
    def wanted_helpers(self) -> tuple[int, ...]:
        """Numbers of the helpers that are to hold experts."""
        return tuple(n for n, wish in enumerate(self.helper_caches, 1) if wish.amount != 0)

    @property
    def wanted_devices(self) -> tuple[int, ...]:
        """Devices that are used, the first one first."""
        return (self.device, *(self.helpers[n - 1] for n in self.wanted_helpers))


def read_options(options: Mapping[str, Any], devices: Sequence[Device]) -> DeviceOptions:
    """The options, checked against the devices that there are. Raises UsageError."""
    chosen = _devices(options.get("device"), devices)
    mib = options.get("vram_reserve_mib")
    # the default gives way on small devices; a value of one's own is kept to the letter
    reserve = None if mib is None else int(mib) * MIB
    helpers = chosen[1 : 1 + MOST_HELPERS]
    wishes = []
    for number in range(1, MOST_HELPERS + 1):
        key = f"expert_cache_device{number}"
        wish = Wish(_amount(options.get(key), 0), reserve, "--" + key.replace("_", "-"))
        if wish.amount != 0 and number > len(helpers):
            raise UsageError(
                f"{wish.flag} has no device",
                f"{len(chosen)} of {len(devices)} devices are used, the first for the model itself",
                "leave it out, or name more devices with --device",
            )
        wishes.append(wish)
    budget, share = options.get("vram_budget"), options.get("pcie_frac")
    return DeviceOptions(
        device=chosen[0],
        helpers=helpers,
        cache=Wish(_amount(options.get("expert_cache"), "auto"), reserve, "--expert-cache"),
        helper_caches=tuple(wishes),
        budget=None if budget is None else int(float(budget) * GIB),
        link_share=0.0 if share in (None, "auto") else float(share),
    )


def _amount(value: Any, default: Amount) -> Amount:
    if value is None:
        return default
    return "auto" if value == "auto" else int(value)


def _devices(named: Sequence[int] | None, devices: Sequence[Device]) -> tuple[int, ...]:
    there = [d.index for d in devices]
    if not there:
        raise UsageError(
            "there is no device to compute on",
            "the runtime lists none",
            "`strata doctor` says what was found; --backend cpu needs none",
        )
    if not named:
        return tuple(there)
    missing = [i for i in named if i not in there]
    if missing:
        raise UsageError(
            f"--device names {', '.join(map(str, missing))}, which is not there",
            f"the devices are {', '.join(map(str, there))}",
            "name devices that are there",
        )
    return tuple(named)
