"""What a hook may return: a list of sound records of its role, for this interface version."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from strata_core import __version__
from strata_core.interfaces import (
    API,
    AllocatorRecord,
    BackendRecord,
    Capabilities,
    Record,
    Role,
    SourceRecord,
)

HOOKS: Mapping[str, tuple[Role, type[Record]]] = {
    "strata_backends": ("backend", BackendRecord),
    "strata_allocators": ("allocator", AllocatorRecord),
    "strata_expert_sources": ("source", SourceRecord),
}
"""Hook name -> the role it fills and the record it returns."""

RESERVED = frozenset({"auto"})
"""Names that the command line gives another meaning."""


class Unsound(Exception):
    """Says what is wrong with a hook's result, in one line."""


def check_result(hook: str, result: object) -> list[Record]:
    """The records of a hook's `result`. Raises Unsound.

    A result that is a generator or a coroutine is closed, so that it leaves no warning behind.
    """
    _, kind = HOOKS[hook]
    if not isinstance(result, list):
        close = getattr(result, "close", None)
        if callable(close) and type(result).__name__ in ("generator", "coroutine"):
            close()
        raise Unsound(f"{hook} returned {_a(result)}, not a list of {kind.__name__}")
    for index, item in enumerate(result):
        place = f"item {index} of {hook}"
        if type(item) is not kind:
            raise Unsound(f"{place} is {_a(item)}, not a {kind.__name__}")
        problem = _problem(item)
        if problem:
            raise Unsound(f"{place}, named {item.name!r}: {problem}")
    return result


def api_problem(record: Record) -> str:
    """Why a record's interface version cannot be used here, or ""."""
    major, minor = record.api
    if major == API[0] and minor <= API[1]:
        return ""
    return (
        f"written for interface version {major}.{minor}; "
        f"strata-core {__version__} has {API[0]}.{API[1]}"
    )


def _a(value: object) -> str:
    word = type(value).__name__
    return "None" if value is None else f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _problem(record: Record) -> str:
    """The first field that does not hold what `interfaces` says, or ""."""
    checks = {**_CHECKS, **(_ALLOCATOR if isinstance(record, AllocatorRecord) else {})}
    if isinstance(record, SourceRecord):
        checks |= _SOURCE
    if isinstance(record, BackendRecord):
        checks |= _BACKEND
    for name, (expected, check) in checks.items():
        value = getattr(record, name)
        if not check(value):
            return f"{name} must be {expected}, not {value!r}"
    if record.name in record.supersedes:
        return "supersedes must not hold the record's own name"
    return ""


def _is_name(value: object) -> bool:
    return (
        isinstance(value, str)
        and re.fullmatch(r"[a-z0-9][a-z0-9_-]*", value) is not None
        and value not in RESERVED
    )


def _is_names(value: object) -> bool:
    return isinstance(value, tuple) and all(_is_name(item) for item in value)


def _is_line(value: object) -> bool:
    return isinstance(value, str) and value != "" and len(value.splitlines()) == 1


def _is_version(value: object) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and all(type(item) is int and item >= 0 for item in value)
    )


def _is_able(value: object) -> bool:
    return (
        type(value) is Capabilities
        and isinstance(value.kv_types, tuple)
        and value.kv_types != ()
        and all(isinstance(kind, str) for kind in value.kv_types)
        and (value.types is None or isinstance(value.types, frozenset))
    )


Check = tuple[str, Callable[[object], bool]]

_CHECKS: Mapping[str, Check] = {
    "name": ('lower-case letters, digits, "-" and "_", and not "auto"', _is_name),
    "summary": ("one line of text", _is_line),
    "api": ("(major, minor) of two whole numbers", _is_version),
    "supersedes": ("a tuple of names", _is_names),
    "fallback": ("True or False", lambda value: isinstance(value, bool)),
    "probe": ("callable", callable),
    "build": ("callable", callable),
}
_ALLOCATOR: Mapping[str, Check] = {
    "serves": ("a tuple of at least one name", lambda value: _is_names(value) and value != ()),
    "pins": ("callable or None", lambda value: value is None or callable(value)),
}
_BACKEND: Mapping[str, Check] = {
    "automatic": ("True or False", lambda value: isinstance(value, bool)),
    "devices": ("callable or None", lambda value: value is None or callable(value)),
    "capabilities": ("Capabilities with at least one KV type", _is_able),
}
_SOURCE: Mapping[str, Check] = {
    "claims": ("callable or None", lambda value: value is None or callable(value)),
}
