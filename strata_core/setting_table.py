"""Every setting in one table.

The command line builds its options from this table, `config.resolve` reads values by it, and
docs/cli.md is generated from it.
"""

from __future__ import annotations

from strata_core.setting import LOADING, BadValue, Group, Kind, Setting
from strata_core.setting import later as _later
from strata_core.setting import made as _set
from strata_core.setting_device import DEVICE_SETTINGS
from strata_core.setting_memory import MEMORY_SETTINGS

__all__ = ["BY_KEY", "LOADING", "SETTINGS", "BadValue", "Group", "Kind", "Setting"]

SETTINGS: tuple[Setting, ...] = (
    _set(
        "backend",
        "name",
        "choice",
        "What computes: a backend's name (`strata plugins` lists them), or auto.",
        default="auto",
    ),
    _set(
        "allocator",
        "name",
        "choice",
        "What gives host memory: an allocator's name, or auto.",
        default="auto",
    ),
    _set(
        "source",
        "name",
        "choice",
        "Where experts are read from: a source's name, or auto: the arena where it fits in memory, "
        "else a tier of it on a machine with little memory, else the mapped file.",
        default="auto",
    ),
    _set(
        "mmap_experts",
        "switch",
        "choice",
        "The same as --source mmap.",
        default=False,
        alias="mmap",
    ),
    _set(
        "resident_experts",
        "switch",
        "choice",
        "The same as --source sliced-pinned.",
        default=False,
        alias="sliced-pinned",
    ),
    _set(
        "low_ram",
        "switch",
        "choice",
        "The same as --source tiered-file: the most-read experts in memory, the others read from "
        "the file past the system's cache.",
        default=False,
        alias="tiered-file",
    ),
    _set(
        "no_low_ram",
        "switch",
        "choice",
        "Do not choose --source tiered-file, whatever the machine's memory.",
        default=False,
    ),
    _set(
        "threads",
        "integer",
        "choice",
        "Threads that compute on the CPU. Default: what the backend finds best.",
        low=1,
        high=4096,
    ),
    *DEVICE_SETTINGS,
    _set(
        "ram_budget",
        "gib",
        "memory",
        "The most host memory to take, at most what is available; experts that do not fit in it "
        "are read from the file. Default: what is available; of it STRATA_RAM_RESERVE_GIB stays "
        "free unless what is asked for needs it.",
        above=True,
        high=2**20,
    ),
    _set(
        "ram_reserve_gib",
        "gib",
        "memory",
        "Host memory that the source and the context stay clear of where they are left to Strata, "
        "in GiB. --ram-budget takes its place.",
        default=6.0,
        flag=None,
        high=2**20,
    ),
    *MEMORY_SETTINGS,
    _set(
        "max_context",
        "integer",
        "model",
        "Room for this many tokens of prompt and continuation. Default: the trained length, or "
        "what fits.",
        low=1,
    ),
    _set(
        "kv",
        "choice",
        "model",
        "Type of the stored keys and values. Default: the backend's (cpu: fp16; reference: fp32).",
        choices=("fp32", "fp16", "int8"),
    ),
    _set(
        "prefill",
        "count",
        "model",
        "Tokens of a prompt that are computed together, or auto: 512, and on devices as many as "
        "compute for as long as they copy, 4096 to 8192 where memory allows.",
        choices=("auto",),
        default="auto",
        low=1,
        high=16384,
    ),
    _set(
        "exact_prompt",
        "switch",
        "model",
        "Compute prompts of any length as windows, so that every backend gives the same bits. On "
        "cpu and reference prompts have those bits anyway.",
        default=False,
    ),
    _set(
        "cache_dir",
        "path",
        "model",
        "Folder for kernels compiled for this processor. Default: strata in the user's folder for "
        "caches.",
        flag=None,
        metavar="DIR",
    ),
    _set(
        "block_plugins",
        "names",
        "plugins",
        "Names of plugins not to load, separated by commas.",
        default=(),
        flag=None,
        metavar="NAME,...",
    ),
    _set(
        "dump_first_logits",
        "path",
        "diagnostics",
        "Write the float32 logits of the first generated position to this .npy file.",
        flag=None,
    ),
    _set(
        "verify_reads",
        "choice",
        "diagnostics",
        "Which experts of a pack are compared with their hashes when a source reads them. Default: "
        "sample, the first of each layer and one in 64 of the others.",
        default="sample",
        choices=("all", "sample", "off"),
    ),
    _later("spec"),
    _later("spec_min_p"),
)
"""The table. Order is the order of `--help`."""

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
