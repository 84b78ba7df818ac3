"""The frozen record of a machine's facts, what is asked of it later, and both as JSON."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from attrs import NOTHING, asdict, field, fields, frozen

from strata_core.errors import PluginError
from strata_core.machine.fields import Adapter, HugePages, parse_document

FORMAT = "strata-machine"
FORMAT_VERSION = 1


@frozen(kw_only=True)
class Machine:
    """What is known about a computer. Sizes are bytes; None means that the fact is not known.

    `os` is "linux", "windows", "macos" or what Python calls another system, `release` its kernel's
    release, `architecture` "x86_64", "aarch64" or the system's own word in lower case. `wsl` is 1
    or 2 under the Windows Subsystem for Linux, else None; `container` the signs of a container.
    `cpu_flags` are the feature names that Linux uses, sorted. `logical_cores` and `physical_cores`
    count what this process may run on; `cpu_quota` is the CPU time a cgroup grants, in cores.
    `cgroup_memory_limit` is the smallest limit on the cgroup's path and `cgroup_memory_room` the
    least that a cgroup on that path still grants (file cache that can be dropped counts as free);
    both are None without a limit. `memlock_limit` is what may be locked into RAM, None where
    nothing limits it. `adapters` is None where the system cannot be asked, so that "none found"
    and "not known" differ. `kernel_log` says whether the kernel's log can be read.

    What a probe has to look up beyond these it asks through `observe`. A machine made by
    `from_json` is `replayed`: it answers what was recorded and never looks at this computer.
    Immutable but for the memory of `observe`; any thread may use it.
    """

    os: str
    release: str
    architecture: str
    python: str
    logical_cores: int
    physical_cores: int
    ram_installed: int
    ram_available: int
    page_size: int
    wsl: int | None = None
    container: tuple[str, ...] = ()
    cpu_model: str = ""
    cpu_flags: tuple[str, ...] = ()
    cpu_quota: float | None = None
    cgroup_memory_limit: int | None = None
    cgroup_memory_room: int | None = None
    memlock_limit: int | None = None
    huge_pages: HugePages | None = None
    adapters: tuple[Adapter, ...] | None = None
    kernel_log: bool = False
    replayed: bool = field(default=False, eq=False)
    observed: dict[str, Any] = field(factory=dict, eq=False, repr=False)

    @property
    def memory_installed(self) -> int:
        """RAM this process could ever have: what is installed, or the cgroup's limit if less."""
        return _least(self.ram_installed, self.cgroup_memory_limit)

    @property
    def memory_available(self) -> int:
        """RAM this process can have now: what is available, or the cgroup's room if less."""
        return _least(self.ram_available, self.cgroup_memory_room)

    def observe(self, key: str, ask: Callable[[], Any]) -> Any:
        """The answer to `key`: recorded if it was asked before, else what `ask()` returns now.

        An answer is JSON data and comes back as JSON would give it (tuples as lists), so that a
        live and a replayed machine answer alike. A replayed machine never runs `ask`; it answers
        None for a key that its recording lacks. What `ask` raises passes through and leaves no
        record. Two threads asking at once may both run `ask`; both get the first answer.
        """
        if key in self.observed or self.replayed:
            return self.observed.get(key)
        answer = ask()
        try:
            plain = json.loads(json.dumps(answer, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise PluginError(
                f"the observation {key!r} cannot be recorded",
                f"its answer is not JSON data: {error}",
                "return text, numbers, booleans, None, lists or dictionaries of these",
            ) from error
        return self.observed.setdefault(key, plain)

    def find_library(self, *names: str) -> str | None:
        """The first of `names` that the system can load: its name, "" if none, None if not known.

        The library is loaded and stays loaded; nothing in it is called. Not known happens on a
        replayed machine alone, where none of the names was found and one was never asked for.
        """
        known = True
        for name in names:
            there = self.observe(f"library:{name}", partial(_loads, name))
            if there:
                return name
            known = known and there is not None
        return "" if known else None

    def has_module(self, name: str) -> bool | None:
        """Whether Python finds the top-level module `name` (not imported); None if not known."""
        answer = self.observe(f"module:{name}", lambda: importlib.util.find_spec(name) is not None)
        return None if answer is None else bool(answer)

    def has_path(self, path: str) -> bool | None:
        """Whether `path` (absolute) exists; None if not known."""
        answer = self.observe(f"path:{path}", lambda: os.path.lexists(path))
        return None if answer is None else bool(answer)

    def to_json(self) -> dict[str, Any]:
        """All facts and observations as JSON data; `from_json` reads it back.

        Members: `format`, `version`, `facts` (the fields of this class by name, sizes in bytes,
        null where not known), `observed` (answers by key).
        """
        facts = asdict(self, filter=lambda item, _: item.name not in ("replayed", "observed"))
        return {
            "format": FORMAT,
            "version": FORMAT_VERSION,
            "facts": json.loads(json.dumps(facts)),
            "observed": dict(self.observed),
        }

    @classmethod
    def from_json(cls, document: object, file: str = "the machine's facts") -> Machine:
        """A replayed machine from `to_json`'s document, or one that holds it as `machine`.

        Facts that may be unknown can be left out. Raises UsageError naming `file` and the field;
        unknown fields are errors too, so that a misspelt fact is not passed over.
        """
        form = (FORMAT, FORMAT_VERSION)
        required = {item.name for item in fields(cls) if item.default is NOTHING}
        values, observed = parse_document(document, file, form, required)
        return cls(**values, replayed=True, observed=dict(observed))


def _least(first: int, second: int | None) -> int:
    return first if second is None else min(first, second)


def _loads(name: str) -> bool:
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True
