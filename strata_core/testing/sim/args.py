"""The arguments of a launch, as the host finds what their addresses name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from strata_core.kernels.device.table import DEVICE_KERNELS, unpack
from strata_core.runtime import Launch
from strata_core.testing.sim.runtime import SimRuntime


def pointers(launch: Launch) -> list[int]:
    """The device addresses in a launch's argument block, for the simulator to check."""
    kinds = DEVICE_KERNELS[launch.kernel.name].args
    values = unpack(launch.kernel.name, launch.args)
    return [int(values[name]) for name, kind in kinds.items() if kind == "ptr"]


STORED = frozenset({("assign", "rows"), ("assign", "host_rows"), ("claim", "host_rows")})
"""Addresses that a kernel passes on and does not use itself."""


@frozen(eq=False)
class Args:
    """The arguments of a launch by name, addresses as the host finds them; and who launches it."""

    values: Mapping[str, int | float]
    runtime: SimRuntime
    device: int
    on_host: frozenset[str]

    def __getattr__(self, name: str) -> int:
        value: Any = self.values[name]
        return int(value)

    @classmethod
    def of(cls, launch: Launch, runtime: SimRuntime, device: int) -> Args:
        """Decode a launch; every address must be live memory that the device reaches."""
        name = launch.kernel.name
        values, on_host = unpack(name, launch.args), set()
        for key, kind in DEVICE_KERNELS[name].args.items():
            if kind == "ptr" and values[key] and (name, key) not in STORED:
                place = runtime.places.reach(device, int(values[key]), 1, name)
                values[key] = place.address
                if place.device is None:
                    on_host.add(key)
        return cls(values, runtime, device, frozenset(on_host))

    def host(self, address: int) -> int:
        """Where the host finds what the device finds at an address."""
        if self.runtime.hardware.aliases == "same":
            return address
        return self.runtime.places.reach(self.device, address, 1, "a kernel").address

    def link(self, *, read: int = 0, written: int = 0) -> None:
        """Tell what went over the device's link."""
        self.runtime.note_link(self.device, read=read, written=written)
