"""Records that serve everywhere and build nothing."""

from __future__ import annotations

from strata_core.interfaces import AllocatorRecord, BackendRecord, SourceRecord, Usable


def anywhere(machine):
    return Usable("always")


def cannot_build(context):
    raise AssertionError("a dummy is never built")


def backend(name, **fields):
    sound = {"summary": "A dummy", "api": (1, 0), "probe": anywhere, "build": cannot_build}
    return BackendRecord(name=name, **{**sound, **fields})


def allocator(name, serves, **fields):
    sound = {"summary": "A dummy", "api": (1, 0), "probe": anywhere, "build": cannot_build}
    return AllocatorRecord(name=name, serves=serves, **{**sound, **fields})


def source(name, **fields):
    sound = {"summary": "A dummy", "api": (1, 0), "probe": anywhere, "build": cannot_build}
    return SourceRecord(name=name, **{**sound, **fields})
