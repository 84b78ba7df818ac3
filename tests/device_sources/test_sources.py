"""The device sources: which files there are, and that what they define is used."""

from __future__ import annotations

import re
from collections import Counter

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.sources import FILES, HEADERS, HERE, MORE_HEADERS

DEFINED = re.compile(
    r"^[ \t]*#define (\w+)"  # a macro
    r"|^DEV [\w \*]*?(\w+)\("  # a function of the device
    r"|^(?:struct|enum|typedef) (?:\w+ )*?(\w+)(?: \{|;)",
    re.MULTILINE,
)
GUARD = re.compile(r"STRATA_\w+_H")


def test_every_source_is_named():
    named = {*FILES, *HEADERS, *(name for more in MORE_HEADERS.values() for name in more)}
    assert {file.name for file in HERE.iterdir()} == named


def test_nothing_is_defined_that_nothing_uses():
    text = "".join(re.sub(r"//.*", "", file.read_text("utf-8")) for file in HERE.iterdir())
    words = Counter(re.findall(r"\w+", text))
    defined = Counter(
        name
        for found in DEFINED.findall(text)
        for name in found
        if name and not GUARD.fullmatch(name)
    )
    assert {"ROOMY", "store_block", "Routing", "Stored", "TILE"} <= defined.keys()
    unused = {name for name, times in defined.items() if words[name] <= times}
    assert unused - TYPES.keys() == set(), "types are named where a kernel is asked for"
