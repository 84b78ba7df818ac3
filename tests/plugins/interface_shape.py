"""The names, parameters and fields of the interface for every plugin, one a line.

python tests/plugins/interface_shape.py > tests/plugins/interface.txt
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import attrs

MODULES = (
    "strata_core.abilities",
    "strata_core.errors",
    "strata_core.hookspecs",
    "strata_core.interfaces",
    "strata_core.sources.fetching",
)
"""Those that docs/interface.md gives every plugin, but for the machine's facts."""


def shape() -> list[str]:
    """The lines, in the order of the modules' text."""
    return [line for name in MODULES for line in _of_module(name)]


def breaks(old: Iterable[str], new: Iterable[str]) -> list[str]:
    """What a plugin written for `old` could miss in `new`, or stumble over."""
    before, now = dict.fromkeys(old), dict.fromkeys(new)
    known = {line.split(" ")[0] for line in before}
    found = [f"gone: {line}" for line in before if line not in now]
    for line in now:
        owner, member = line.split(" ", 1)
        wanted = not member.startswith(("class ", "def ")) and not member.endswith(" = ...")
        if line not in before and owner in known and wanted:
            found.append(f"asked for, or without a default: {line}")
    return found


def _of_module(name: str) -> Iterator[str]:
    module = importlib.import_module(name)
    for key, value in vars(module).items():
        if key.startswith("_") or getattr(value, "__module__", name) != name:
            continue
        if inspect.isclass(value):
            yield f"{name} class {key}"
            yield from _of_class(f"{name}:{key}", value)
        elif inspect.isfunction(value):
            yield f"{name} def {key}"
            yield from _of_function(f"{name}:{key}", value)


def _of_class(place: str, kind: type) -> Iterator[str]:
    """Fields, and methods: what a plugin has to `supply`, of a protocol, or may call."""
    if attrs.has(kind):
        fields = [item for item in attrs.fields(kind) if item.init and item.name[0] != "_"]
        for index, item in enumerate(fields):
            default = "" if item.default is attrs.NOTHING else " = ..."
            number = "-" if item.kw_only else index
            yield f"{place} {number} {item.name}: {item.type}{default}"
    protocol = getattr(kind, "_is_protocol", False)
    if "__init__" in vars(kind) and not protocol and not attrs.has(kind):
        yield from _of_function(f"{place}.__init__", vars(kind)["__init__"])
    for key, member in vars(kind).items():
        if key.startswith("_"):
            continue
        word = "supply" if protocol else "def"
        if isinstance(member, property):
            yield f"{place} {word} {key}"
        elif inspect.isfunction(member):
            yield f"{place} {word} {key}"
            yield from _of_function(f"{place}.{key}", member)


def _of_function(place: str, function: Any) -> Iterator[str]:
    signature = inspect.signature(function)
    for index, item in enumerate(signature.parameters.values()):
        if item.name == "self":
            continue
        default = "" if item.default is item.empty else " = ..."
        number = index if item.kind is item.POSITIONAL_OR_KEYWORD else "-"
        yield f"{place} {number} {item.name}: {item.annotation}{default}"
    yield f"{place} -> {signature.return_annotation}"


if __name__ == "__main__":
    print("\n".join(shape()))
