"""The settings about devices, what is kept in their memory, and the simulated ones."""

from __future__ import annotations

from strata_core.setting import Setting, made

MOST_HELPERS = 3
"""Devices beside the first that may hold experts."""

_MOST_GIB = 2**20
_MOST_ROUNDS = 2**20


def _helper(number: int) -> Setting:
    return made(
        f"expert_cache_device{number}",
        "count",
        "device",
        f"Experts that helper device {number} holds besides: how many, or auto for what fits. "
        "They are the ones that the profile ranks next. Default: 0.",
        choices=("auto",),
        default=0,
    )


DEVICE_SETTINGS: tuple[Setting, ...] = (
    made(
        "device",
        "indices",
        "device",
        "Devices to use, by index: the first computes the model, the others are its helpers 1, 2 "
        "and 3. Default: all, in their order.",
        high=255,
    ),
    made(
        "expert_cache",
        "count",
        "device",
        "Experts that the first device holds: how many, or auto for what fits beside the rest and "
        "the reserve.",
        choices=("auto",),
        default="auto",
    ),
    *(_helper(number) for number in range(1, MOST_HELPERS + 1)),
    made(
        "expert_profile",
        "path",
        "memory",
        "A profile of which experts this model asks for, by which caches and tiers are filled. "
        "Default: what earlier runs asked for, with --source tiered-file or with a cache that "
        "follows the text; else experts are spread evenly over the layers.",
    ),
    made(
        "expert_profile_save",
        "path",
        "memory",
        "Write what this run asks for, added to the profile it was given, to this file at its end.",
    ),
    made(
        "adapt_every",
        "integer",
        "device",
        "Rounds after which experts that are asked for more change places with those in the first "
        "device's cache that are asked for less; 0: they never do.",
        default=4,
        high=_MOST_ROUNDS,
    ),
    made(
        "adapt_swaps",
        "integer",
        "device",
        "The most experts that change places each time; only those that gain by it do.",
        default=96,
        low=1,
        high=_MOST_ROUNDS,
    ),
    made(
        "vram_budget",
        "gib",
        "device",
        "The most memory to take of the first device. Default: what is free, less the reserve.",
        above=True,
        high=_MOST_GIB,
    ),
    made(
        "vram_reserve_mib",
        "integer",
        "device",
        "MiB of every device that caches of the size auto leave free. Default: 700, but at most "
        "a twentieth of the device's memory.",
        high=_MOST_GIB,
    ),
    made(
        "pcie_frac",
        "share",
        "device",
        "The share, 0 to 1, of the experts that no device holds which the first device fetches "
        "over the link; the CPU computes the others meanwhile. auto: the split by which both end "
        "at the same time, by rates measured at start. Tokens do not depend on it.",
        choices=("auto",),
        default="auto",
        high=1,
    ),
    made(
        "dispatch",
        "choice",
        "device",
        "How rounds run in which the CPU or a helper takes part: stepped (a launch for each layer) "
        "or doorbell (one launch, the device waits for the CPU's part of each layer). auto: the "
        "faster one, by rounds timed at start, where the driver allows either. Tokens do not "
        "depend on it.",
        choices=("auto", "stepped", "doorbell"),
        default="auto",
    ),
    made(
        "early_remote_contexts",
        "switch",
        "device",
        "Open every device's context before anything is placed (1), or each when it is needed (0). "
        "Default: what the allocator asks for.",
        flag=None,
    ),
    made(
        "sim_vram",
        "gib",
        "device",
        "Memory of each device of the backend sim.",
        default=8.0,
        above=True,
        high=_MOST_GIB,
    ),
    made(
        "sim_pin_budget",
        "gib",
        "device",
        "Host memory that the backend sim's driver pins before it refuses. Default: no limit.",
        high=_MOST_GIB,
    ),
    made(
        "sim_devices",
        "integer",
        "device",
        "Devices of the backend sim.",
        default=1,
        low=1,
        high=16,
    ),
)
"""Rows of the table of settings."""
