"""What the user asked of devices, from the options of a backend's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import frozen

from strata_core.cache.amount import Amount, Wish
from strata_core.errors import UsageError
from strata_core.kernels.device.dispatch import Asked
from strata_core.kernels.device.exchange import MOST_HELPERS
from strata_core.plan.moving import Pace
from strata_core.runtime import Device

GIB, MIB = 1 << 30, 1 << 20


@frozen
class DeviceOptions:
    """`device` computes the model, `helpers` are the devices of helpers 1 to 3.

    `cache` and `helper_caches` say how many experts each holds, `budget` the most bytes to take of
    the first device, `link_share` the part of the misses that goes over the link: 0 to 1, or "auto"
    for the split by which link and CPU end at the same time. `pace` is how fast experts of the
    first device's cache change places with others, `dispatch` how rounds of several lanes run.
    """

    device: int
    helpers: tuple[int, ...]
    cache: Wish
    helper_caches: tuple[Wish, ...]
    budget: int | None
    link_share: float | Literal["auto"]
    pace: Pace
    dispatch: Asked

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
    chosen = [device.index for device in used_devices(options, devices)]
    mib = options.get("vram_reserve_mib")
    # the default gives way on small devices; a value of one's own is kept to the letter
    reserve = None if mib is None else int(mib) * MIB
    helpers = tuple(chosen[1:])
    wishes = []
    for number in range(1, MOST_HELPERS + 1):
        key = f"expert_cache_device{number}"
        wish = Wish(_amount(options.get(key), 0), reserve, "--" + key.replace("_", "-"))
        wishes.append(wish)
    budget, share = options.get("vram_budget"), options.get("pcie_frac")
    return DeviceOptions(
        device=chosen[0],
        helpers=helpers,
        cache=Wish(_amount(options.get("expert_cache"), "auto"), reserve, "--expert-cache"),
        helper_caches=tuple(wishes),
        budget=None if budget is None else int(float(budget) * GIB),
        link_share="auto" if share in (None, "auto") else float(share),
        pace=Pace.of(options),
        dispatch=options.get("dispatch") or "auto",
    )


def _amount(value: Any, default: Amount) -> Amount:
    if value is None:
        return default
    return "auto" if value == "auto" else int(value)


def used_devices(options: Mapping[str, Any], there: Sequence[Device]) -> tuple[Device, ...]:
    """The devices to use: the first computes, the others help. Raises UsageError.

    `options` are settings by key, `there` the devices that a runtime lists.
    """
    named = options.get("device")
    if not there:
        raise UsageError(
            "the backend has no device",
            "it lists none on this machine",
            "`strata plugins` shows what was found; choose another backend with --backend",
        )
    by_index = {device.index: device for device in there}
    chosen = tuple(by_index) if not named else tuple(named)
    for index in chosen:
        if index not in by_index:
            known = ", ".join(f"{device.index} ({device.label})" for device in there)
            raise UsageError(
                f"--device {index}: there is no such device",
                f"there are {known}",
                "give indices of those, separated by commas",
            )
    used = tuple(by_index[index] for index in chosen)
    if named and len(used) > MOST_HELPERS + 1:
        raise UsageError(
            f"--device names {len(used)} devices, and {MOST_HELPERS + 1} can be used",
            f"one computes the model, and there are at most {MOST_HELPERS} helpers",
            f"name at most {MOST_HELPERS + 1}",
        )
    for number in range(1, MOST_HELPERS + 1):
        asked = options.get(f"expert_cache_device{number}")
        if asked not in (0, None) and number >= len(used):
            raise UsageError(
                f"--expert-cache-device{number} {asked} has no device to be on",
                f"helper {number} would be device number {number + 1} of those that are used: "
                + ", ".join(device.label for device in used),
                "leave it out, or name more devices with --device",
            )
    return used[: MOST_HELPERS + 1]
