"""Entry points of what is installed, read so that no damaged distribution hides the others.

Nothing is imported here: an entry point is metadata until somebody loads it.
"""

from __future__ import annotations

import re
from importlib import metadata

from attrs import frozen


@frozen
class Unreadable:
    """A distribution that has entry points of the group, but none that can be read."""

    distribution: str
    version: str
    error: str


def entry_points_of(group: str) -> tuple[list[metadata.EntryPoint], list[Unreadable]]:
    """All installed entry points of `group`, and the distributions whose cannot be read.

    The library's own collection stops at the first malformed file of any distribution, so what it
    cannot do at once is done one distribution at a time.
    """
    try:
        return list(metadata.entry_points(group=group)), []
    except Exception:  # noqa: BLE001 - any installed distribution may be damaged in any way
        return _one_by_one(group)


def _one_by_one(group: str) -> tuple[list[metadata.EntryPoint], list[Unreadable]]:
    found: list[metadata.EntryPoint] = []
    unreadable: list[Unreadable] = []
    seen: set[str] = set()
    for distribution in metadata.distributions():
        try:
            name, version = distribution.metadata["Name"], distribution.version
            key = normal(name)
            if key in seen:
                continue
            seen.add(key)
        except Exception:  # noqa: BLE001, S112 - no name: nothing that could be reported
            continue
        try:
            found += [item for item in distribution.entry_points if item.group == group]
        except Exception as error:  # noqa: BLE001 - as above
            if f"[{group}]" in (distribution.read_text("entry_points.txt") or ""):
                text = f"its entry points cannot be read: {describe(error)}"
                unreadable.append(Unreadable(name, version, text))
    return found, unreadable


def origin_of(entry_point: metadata.EntryPoint) -> tuple[str, str]:
    """The distribution that an entry point came with, and its version; words where unknown."""
    distribution = entry_point.dist
    if distribution is None:
        return "(no distribution)", "?"
    try:
        name, version = distribution.metadata["Name"], distribution.version
    except Exception:  # noqa: BLE001 - damaged metadata must not hide the plugin
        name, version = None, None
    return name or "(no name)", version or "?"


def normal(name: str) -> str:
    """A distribution's name as package indexes compare names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def describe(error: BaseException) -> str:
    """An exception on one line of at most 400 characters; even its own text may fail."""
    try:
        text = " ".join(str(error).split())
    except Exception:  # noqa: BLE001 - a plugin's exception class may be broken as well
        text = "(its text cannot be had)"
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if len(line) <= 400 else line[:397] + "..."
