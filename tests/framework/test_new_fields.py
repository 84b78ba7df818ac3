"""Fields of records that not every plugin sets: what they may hold, and their defaults."""

from __future__ import annotations

import pytest
from attrs import evolve

from strata_core.builtin import strata_allocators, strata_backends
from strata_core.plugins.records import Unsound, check_result

BACKEND, ALLOCATOR = strata_backends()[0], strata_allocators()[0]


def test_a_plugin_may_leave_them_out() -> None:
    assert (BACKEND.automatic, BACKEND.devices, ALLOCATOR.pins) == (True, None, None)
    assert check_result("strata_backends", [BACKEND]) == [BACKEND]
    assert check_result("strata_allocators", [ALLOCATOR]) == [ALLOCATOR]


@pytest.mark.parametrize(
    ("hook", "record", "field", "value"),
    [
        ("strata_backends", BACKEND, "automatic", 1),
        ("strata_backends", BACKEND, "automatic", None),
        ("strata_backends", BACKEND, "devices", ("SIM0",)),
        ("strata_allocators", ALLOCATOR, "pins", 1 << 30),
    ],
)
def test_anything_else_is_unsound(hook, record, field, value) -> None:
    with pytest.raises(Unsound, match=rf"item 0 of {hook}, named '\w+': {field} must be "):
        check_result(hook, [evolve(record, **{field: value})])
