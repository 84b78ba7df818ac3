"""The adapters' shared-memory budgets, read through real COM tables that a test lays out."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from strata_core.memory.platform import SharedRoom
from strata_core.memory.platform.dxgi import Description, MemoryInfo, read_rooms

GIB = 1 << 30
NOT_FOUND = 0x887A0002 - (1 << 32)
NO_INTERFACE = 0x80004002 - (1 << 32)
POINTER = ctypes.c_void_p
FACTORY = bytes.fromhex("78ae0a776ff2ba4da829253c83d1b387")
ADAPTER_3 = bytes.fromhex("a467596492131043a7988053ce3e93fd")


class Com:
    """An object with a table of methods in memory; counts its references."""

    def __init__(self, methods: dict[int, tuple[Callable[..., int], list[Any]]]) -> None:
        self.references = 1
        methods = {2: (self._release, []), **methods}
        self._kept = {
            place: ctypes.CFUNCTYPE(ctypes.c_int32, POINTER, *types)(method)
            for place, (method, types) in methods.items()
        }
        self._table = (POINTER * 32)()
        for place, function in self._kept.items():
            self._table[place] = ctypes.cast(function, POINTER).value
        self._object = POINTER(ctypes.addressof(self._table))
        self.address = ctypes.addressof(self._object)

    def _release(self, _this: int) -> int:
        self.references -= 1
        return self.references


class Adapter(Com):
    def __init__(self, name: str, budget: int, used: int, *, flags: int = 0, old: bool = False):
        self.name, self.budget, self.used, self.flags, self.old = name, budget, used, flags, old
        super().__init__(
            {
                0: (self._query, [POINTER, POINTER]),
                10: (self._describe, [POINTER]),
                14: (self._memory, [ctypes.c_uint32, ctypes.c_uint32, POINTER]),
            }
        )

    def _query(self, _this: int, identifier: int, target: int) -> int:
        assert ctypes.string_at(identifier, 16) == ADAPTER_3
        if self.old:
            return NO_INTERFACE
        self.references += 1
        POINTER.from_address(target).value = self.address
        return 0

    def _describe(self, _this: int, target: int) -> int:
        description = Description.from_address(target)
        text = self.name.encode("utf-16-le") + b"\0\0junk"
        ctypes.memmove(description.name, text, len(text))
        description.flags = self.flags
        return 0

    def _memory(self, _this: int, node: int, segment: int, target: int) -> int:
        assert (node, segment) == (0, 1), "not the shared segment"
        info = MemoryInfo.from_address(target)
        info.budget, info.usage = self.budget, self.used
        return 0


class Library:
    """dxgi.dll with a factory over some adapters."""

    def __init__(self, adapters: list[Adapter], status: int = 0) -> None:
        self.adapters, self.status = adapters, status
        self.factory = Com({12: (self._adapter, [ctypes.c_uint32, POINTER])})

    def __call__(self, name: str) -> Library:
        assert name == "dxgi"
        return self

    def CreateDXGIFactory1(self, identifier, target) -> int:  # noqa: N802
        assert bytes(identifier) == FACTORY
        target._obj.value = self.factory.address
        return self.status

    def _adapter(self, _this: int, index: int, target: int) -> int:
        if index >= len(self.adapters):
            return NOT_FOUND
        self.adapters[index].references += 1
        POINTER.from_address(target).value = self.adapters[index].address
        return 0

    def check_released(self) -> None:
        assert self.factory.references == 0
        assert {adapter.references for adapter in self.adapters} <= {1}


def test_every_hardware_adapter_has_its_room() -> None:
    library = Library(
        [
            Adapter("GPU One", 31 * GIB, 2 * GIB),
            Adapter("Basic Render Driver", 99 * GIB, 0, flags=2),
            Adapter("GPU Two", 31 * GIB, 40 * GIB),
            Adapter("Old One", 5 * GIB, 0, old=True),
        ]
    )
    rooms = read_rooms(library)
    assert rooms == (
        SharedRoom("GPU One", 31 * GIB, 2 * GIB),
        SharedRoom("GPU Two", 31 * GIB, 40 * GIB),
    )
    assert [room.room for room in rooms] == [29 * GIB, 0]
    library.check_released()


def test_without_adapters_or_budgets_nothing_is_known() -> None:
    for adapters in ([], [Adapter("Old One", 1, 0, old=True)]):
        library = Library(adapters)
        assert read_rooms(library) is None
        library.check_released()
    assert read_rooms(Library([], status=NOT_FOUND)) is None


@pytest.mark.parametrize("error", [OSError, AttributeError])
def test_a_system_without_dxgi_knows_nothing(error: type[Exception]) -> None:
    def load(name: str) -> Any:
        raise error(name)

    assert read_rooms(load) is None
