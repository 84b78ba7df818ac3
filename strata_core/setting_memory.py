"""The settings about host memory that is page-locked, and about what is kept there."""

from __future__ import annotations

from strata_core.setting import Setting, made

_MOST_GIB = 2**20

MEMORY_SETTINGS: tuple[Setting, ...] = (
    made(
        "resident_budget_gib",
        "gib",
        "memory",
        "With --resident-experts: the most memory for the experts that no device holds, in GiB. "
        "The others, which the profile ranks last, are read from the mapped file. Default: what "
        "all of them need.",
        high=_MOST_GIB,
    ),
    made(
        "complement_pin_gib",
        "gib",
        "device",
        "How much of the resident experts' memory is page-locked for the devices: all (until the "
        "driver refuses), at most so many GiB, or 0 (none: it is locked into RAM). Default: what "
        "the machine's limit allows.",
        choices=("all",),
        flag=None,
        high=_MOST_GIB,
    ),
    made(
        "pin_margin_gib",
        "gib",
        "device",
        "GiB below the machine's limit at which page-locking stops by itself; small buffers may "
        "still use them.",
        default=4.0,
        flag=None,
        high=_MOST_GIB,
    ),
    made(
        "pin_limit_gib",
        "gib",
        "device",
        "Host memory that the driver page-locks in all, in GiB, where it is known better than what "
        "Strata finds out or assumes.",
        flag=None,
        high=_MOST_GIB,
    ),
    made(
        "arena_pin_gib",
        "gib",
        "device",
        "How much of the arena is page-locked: auto (what the machine's limit allows), at most so "
        "many GiB, or 0 (all of it). Default: all of it.",
        choices=("auto",),
        flag=None,
        high=_MOST_GIB,
    ),
    made(
        "partial_pin",
        "switch",
        "device",
        "Page-lock one piece from the beginning of the experts' memory, instead of slices.",
        default=False,
        flag=None,
    ),
    made(
        "partial_pin_gib",
        "gib",
        "device",
        "The size of that piece in GiB. Default: what may be page-locked otherwise.",
        flag=None,
        above=True,
        high=_MOST_GIB,
    ),
    made(
        "large_pages",
        "switch",
        "device",
        "Take large pages from the system's pool for memory that is page-locked, where it has "
        "enough of them and lets this account have them.",
        default=False,
        flag=None,
    ),
    made(
        "tier_verify",
        "switch",
        "diagnostics",
        "With --source tiered-file or sliced-pinned: compare every copy of an expert in memory "
        "with the file, which is read once more for it; those that come back from a device too.",
        default=False,
        flag=None,
    ),
    made(
        "test_complement_refuse",
        "switch",
        "device",
        "Refuse the resident experts' memory as one page-locked allocation, as some drivers do.",
        default=False,
        flag=None,
    ),
)
"""Rows of the table of settings."""
