"""Keys and values of sequences in device memory: one allocation a sequence, kept for the next."""

from __future__ import annotations

from attrs import define, field, frozen

from strata_core.interfaces import Limits
from strata_core.kernels.cpu.attention import KV_BYTES
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.program import Program
from strata_core.memory.held import Held


@frozen(eq=False)
class KvRoom:
    """Room for one sequence: its address, and the addresses in the order of PLACE_FIELDS."""

    address: int
    place: tuple[int, ...]


@define(eq=False)
class KvRooms:
    """Rooms for sequences of `limits.context` positions on one device. Contents are undefined.

    A position is written before it is read, so nothing has to be cleared.
    """

    held: Held
    device: int
    program: Program
    limits: Limits
    _free: list[KvRoom] = field(factory=list, init=False)

    def take(self) -> KvRoom:
        """A room. Raises Refused."""
        return self._free.pop() if self._free else self._make()

    def give(self, room: KvRoom) -> None:
        """Give a room back, for the next sequence."""
        self._free.append(room)

    def ready(self) -> None:
        """Make room for one sequence now, so that nothing else takes the memory."""
        if not self._free:
            self._free.append(self._make())

    def _make(self) -> KvRoom:
        regions = self._regions()
        purpose = f"the keys and values of {self.limits.context} positions"
        regions.base = address = self.held.device(self.device, regions.nbytes, purpose)
        names = ("k", "v", "k_scales", "v_scales")
        return KvRoom(address, tuple(regions.at(n) for n in names))

    def _regions(self) -> Regions:
        program, kv_type = self.program, self.limits.kv_type
        positions = program.kv_layers * self.limits.context
        values = positions * program.kv_width * KV_BYTES[kv_type]
        scales = positions * (program.kv_width // 32) * 2 if kv_type == "int8" else 0
        regions = Regions()
        for name, nbytes in (("k", values), ("v", values), ("k_scales", scales)):
            regions.add(name, nbytes)
        regions.add("v_scales", scales)
        return regions
