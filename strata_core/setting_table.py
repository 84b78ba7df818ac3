"""Every setting in one table, and how its values are read.

A setting has a key (the name in the settings file and in Python), a flag, an environment variable
and a kind. The command line builds its options from this table, `config.resolve` reads values by
it, and docs/cli.md is generated from it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

Group = Literal["choice", "memory", "model", "plugins", "diagnostics"]
Kind = Literal["name", "names", "switch", "integer", "real", "gib", "choice", "path", "text"]

LOADING: tuple[Group, ...] = ("choice", "memory", "model", "plugins", "diagnostics")
"""Groups of the commands that load a model."""

_LARGEST = 2**31 - 1


class BadValue(Exception):
    """A value that its setting's kind does not allow; the text says what would be allowed."""


@frozen(kw_only=True)
class Setting:
    """One setting.

    `flag` is None where there is none; a switch's flag takes no value. `env` is its environment
    variable. `kind` says how a value is read, together with `choices`, `low` and `high` (inclusive,
    or exclusive at the low end where `above`). Giving a switch with an `alias` means giving
    `source` that value. A `pending` setting belongs to a later version: it is not shown, and
    giving it is an error.
    """

    key: str
    help: str
    group: Group
    kind: Kind
    default: Any = None
    flag: str | None
    env: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = _LARGEST
    above: bool = False
    alias: str | None = None
    pending: bool = False

    def parse(self, value: Any) -> Any:
        """The typed value of a flag's or variable's text, or of a file's or caller's value.

        Raises BadValue with a sentence that says what is allowed.
        """
        return _PARSERS[self.kind](self, value)


def _name(_setting: Setting, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", value):
        raise BadValue("a name of letters, digits, '-', '_', '.' and ':' is wanted")
    return value


def _names(setting: Setting, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise BadValue("names separated by commas are wanted")
    return tuple(_name(setting, part.strip() if isinstance(part, str) else part) for part in parts)


def _switch(_setting: Setting, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, str) or value.lower() not in words:
        raise BadValue("it is switched by 1 or 0 (true or false, yes or no, on or off)")
    return words[value.lower()]


def _integer(setting: Setting, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(f"a whole number {_bounds(setting)} is wanted")
    _within(setting, value, "a whole number")
    return value


def _real(setting: Setting, value: Any) -> float:
    what = "a number of GiB" if setting.kind == "gib" else "a number"
    try:
        number = float(value) if isinstance(value, str | int | float) else nan
    except (ValueError, OverflowError):
        number = nan
    if isinstance(value, bool) or not isfinite(number):
        raise BadValue(f"{what} {_bounds(setting)} is wanted")
    return _within(setting, number, what)


def _within(setting: Setting, value: float, what: str) -> float:
    low = setting.low < value if setting.above else setting.low <= value
    if not (low and value <= setting.high):
        raise BadValue(f"{what} {_bounds(setting)} is wanted")
    return value


def _bounds(setting: Setting) -> str:
    text = f"{'above' if setting.above else 'of at least'} {setting.low:.15g}"
    if setting.high != _LARGEST:
        text += f" and at most {setting.high:.15g}"
    return text


def _choice(setting: Setting, value: Any) -> str:
    if value not in setting.choices:
        raise BadValue(f"it is one of {', '.join(setting.choices)}")
    return str(value)


def _path(_setting: Setting, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise BadValue("the path of a file is wanted")
    return Path(value)


def _text(_setting: Setting, value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue("text is wanted")
    return value


_PARSERS: dict[str, Callable[[Setting, Any], Any]] = {
    "name": _name,
    "names": _names,
    "switch": _switch,
    "integer": _integer,
    "real": _real,
    "gib": _real,
    "choice": _choice,
    "path": _path,
    "text": _text,
}


def _set(key: str, kind: Kind, group: Group, help: str, **more: Any) -> Setting:  # noqa: A002
    """A setting whose flag and variable follow from its key."""
    more.setdefault("flag", "--" + key.replace("_", "-"))
    more.setdefault("env", "STRATA_" + key.upper())
    metavars = {"gib": "GIB", "integer": "N", "real": "F", "name": "NAME", "path": "FILE"}
    more.setdefault("metavar", metavars.get(kind, ""))
    return Setting(key=key, kind=kind, group=group, help=help, **more)


def _later(key: str, kind: Kind = "text", **more: Any) -> Setting:
    """A setting of a later version: known by name, so that it is refused and never ignored."""
    return _set(key, kind, "model", "", pending=True, **more)


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
        "else the mapped file.",
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
        "threads",
        "integer",
        "choice",
        "Threads that compute on the CPU. Default: what the backend finds best.",
        low=1,
        high=4096,
    ),
    _set(
        "ram_budget",
        "gib",
        "memory",
        "The most host memory to take, at most what is available. Default: what is available; of "
        "it STRATA_RAM_RESERVE_GIB stays free unless what is asked for needs it.",
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
    _later("device"),
    _later("vram_budget"),
    _later("resident_experts", "switch", alias="sliced-pinned"),
    _later("low_ram", "switch", alias="tiered-file"),
    _later("no_low_ram", "switch"),
    _later("resident_budget_gib"),
    _later("expert_cache"),
    _later("expert_cache_device1"),
    _later("expert_cache_device2"),
    _later("expert_cache_device3"),
    _later("expert_profile"),
    _later("expert_profile_save"),
    _later("vram_reserve_mib"),
    _later("adapt_every"),
    _later("adapt_swaps"),
    _later("pcie_frac"),
    _later("prefill"),
    _later("exact_prompt", "switch"),
    _later("spec"),
    _later("spec_min_p"),
    _later("early_remote_contexts", flag=None),
    _later("complement_pin_gib", flag=None),
    _later("pin_margin_gib", flag=None),
    _later("test_complement_refuse", flag=None),
    _later("arena_pin_gib", flag=None),
    _later("partial_pin", flag=None),
    _later("partial_pin_gib", flag=None),
    _later("tier_verify", flag=None),
)
"""The table. Order is the order of `--help`."""

BY_KEY: dict[str, Setting] = {setting.key: setting for setting in SETTINGS}
