"""The facts as JSON: which fields there are, what each may hold, and errors that name the field."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from attrs import frozen

from strata_core.errors import UsageError


@frozen
class Adapter:
    """A display adapter or processing accelerator on PCI.

    `vendor` and `device` are the PCI ids as "0x" and four lower-case hexadecimal digits; `address`
    is the PCI address ("0000:65:00.0"), or "" where the system does not say.
    """

    vendor: str
    device: str
    address: str = ""


@frozen
class HugePages:
    """Explicit huge pages of one size, and how transparent ones are set.

    `size` is the bytes of one page, `total` and `free` count pages of the pool; `transparent` is
    "always", "madvise", "never", or "" where there are none.
    """

    size: int
    total: int
    free: int
    transparent: str = ""


class _Wrong(Exception):
    """A value that its field cannot hold; `place` leads to it from the field, if it lies deeper."""

    def __init__(self, expected: str, value: object, place: str = "") -> None:
        super().__init__(expected)
        self.expected = expected
        self.value = value
        self.place = place


Parser = Callable[[Any], Any]


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _Wrong("text", value)
    return value


def _word(value: object) -> str:
    if not isinstance(value, str) or not value.strip():
        raise _Wrong("text that is not empty", value)
    return value


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _Wrong("true or false", value)
    return value


def _count(minimum: int) -> Parser:
    def parse(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value < 2**63:
            raise _Wrong(f"a whole number, {minimum} or more", value)
        return value

    return parse


def _page_size(value: object) -> int:
    size: int = _count(1)(value)
    if size & (size - 1):
        raise _Wrong("a power of two", value)
    return size


def _cores(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _Wrong("a number of cores", value)
    if not 0 < value < 2**63:
        raise _Wrong("a number of cores above 0", value)
    return float(value)


def _wsl(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value not in (1, 2):
        raise _Wrong("1, 2 or null", value)
    return value


def _pci_id(value: object) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"0x[0-9a-f]{4}", value):
        raise _Wrong('"0x" and four lower-case hexadecimal digits', value)
    return value


def _optional(parse: Parser) -> Parser:
    return lambda value: None if value is None else parse(value)


def _tuple(parse: Parser) -> Parser:
    def parse_all(value: object) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise _Wrong("a list", value)
        items = []
        for index, item in enumerate(value):
            try:
                items.append(parse(item))
            except _Wrong as wrong:
                place = f"[{index}]{wrong.place}"
                raise _Wrong(wrong.expected, wrong.value, place) from None
        return tuple(items)

    return parse_all


def _record(make: Callable[..., Any], members: Mapping[str, Parser], optional: str) -> Parser:
    def parse(value: object) -> Any:
        if not isinstance(value, dict):
            raise _Wrong(f"an object with {', '.join(members)}", value)
        for name in value:
            if name not in members:
                raise _Wrong(f"one of {', '.join(members)}", name, f".{name}")
        values = {}
        for name, parse_member in members.items():
            if name not in value:
                if name == optional:
                    continue
                raise _Wrong("a value, but it is missing", None, f".{name}")
            try:
                values[name] = parse_member(value[name])
            except _Wrong as wrong:
                raise _Wrong(wrong.expected, wrong.value, f".{name}{wrong.place}") from None
        return make(**values)

    return parse


_ADAPTER = _record(Adapter, {"vendor": _pci_id, "device": _pci_id, "address": _text}, "address")
_HUGE_PAGES = _record(
    HugePages,
    {"size": _page_size, "total": _count(0), "free": _count(0), "transparent": _text},
    "transparent",
)

FACTS: Mapping[str, Parser] = {
    "os": _word,
    "release": _text,
    "architecture": _word,
    "python": _text,
    "logical_cores": _count(1),
    "physical_cores": _count(1),
    "ram_installed": _count(1),
    "ram_available": _count(0),
    "page_size": _page_size,
    "wsl": _optional(_wsl),
    "container": _tuple(_text),
    "cpu_model": _text,
    "cpu_flags": _tuple(_text),
    "cpu_quota": _optional(_cores),
    "cgroup_memory_limit": _optional(_count(0)),
    "cgroup_memory_room": _optional(_count(0)),
    "memlock_limit": _optional(_count(0)),
    "huge_pages": _optional(_HUGE_PAGES),
    "adapters": _optional(_tuple(_ADAPTER)),
    "kernel_log": _flag,
}
"""Every fact by name, and the parser of its JSON value."""


def parse_document(
    document: object, file: str, form: tuple[str, int], required: Collection[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(facts by name, observations by key) of a document written by `Machine.to_json`.

    `form` is the (name, version) that the document must state; `required` are the facts it must
    hold. Raises UsageError naming `file` and the field.
    """
    place = ""
    if isinstance(document, dict) and "format" not in document and "machine" in document:
        document, place = document["machine"], "machine."
    if not isinstance(document, dict):
        raise _error(file, place or "document", "an object", document)
    name, version = form
    for field, expected in (("format", name), ("version", version)):
        value = document.get(field)
        if type(value) is not type(expected) or value != expected:
            raise _error(file, place + field, repr(expected).replace("'", '"'), value)
    for field in document:
        if field not in ("format", "version", "facts", "observed"):
            raise _error(file, f"{place}{field}", "format, version, facts or observed", field)
    facts, observed = document.get("facts"), document.get("observed", {})
    if not isinstance(facts, dict):
        raise _error(file, f"{place}facts", "an object", facts)
    if not isinstance(observed, dict):
        raise _error(file, f"{place}observed", "an object", observed)
    return _parse_facts(facts, file, f"{place}facts.", required), observed


def _parse_facts(
    facts: Mapping[str, Any], file: str, place: str, required: Collection[str]
) -> dict[str, Any]:
    for name in facts:
        if name not in FACTS:
            raise _error(file, place + name, "a fact that this version knows", name)
    values = {}
    for name, parse in FACTS.items():
        if name not in facts and name in required:
            raise _error(file, place + name, "a value, but it is missing", None)
        if name not in facts:
            continue
        try:
            values[name] = parse(facts[name])
        except _Wrong as wrong:
            raise _error(file, place + name + wrong.place, wrong.expected, wrong.value) from None
    return values


def _error(file: str, field: str, expected: str, value: object) -> UsageError:
    shown = repr(value)
    if len(shown) > 60:
        shown = shown[:57] + "..."
    return UsageError(
        f"{file}: {field.rstrip('.')} cannot be used",
        f"expected {expected}; found {shown}",
        "record the machine again with `strata doctor --json`, or correct this field",
    )
