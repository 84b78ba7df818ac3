"""An image of golden work: bytes at one address of a device, and what has to come of its rows."""

from __future__ import annotations

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.kernels.device.layout import RECORD_BYTES
from strata_core.kernels.device.regions import ALIGNMENT
from strata_core.kernels.self_test import Computed

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]


@frozen(eq=False)
class Wanted:
    """Rows in the image, `nbytes` of each `pitch`, and what they have to be.

    `expected` is float32 [rows, n], or where in the image the same number of records lie that the
    device made by another kernel.
    """

    name: str
    lane: int
    start: int
    pitch: int
    nbytes: int
    rows: int
    expected: Floats | int

    def computed(self, image: Bytes) -> Computed:
        """What became of them."""
        rows = self._rows(image, self.start, self.pitch)
        if isinstance(self.expected, int):
            return Computed(self.name, rows, self._rows(image, self.expected, RECORD_BYTES))
        return Computed(self.name, np.ascontiguousarray(rows).view(np.float32), self.expected)

    def _rows(self, image: Bytes, start: int, pitch: int) -> Bytes:
        return image[start : start + self.rows * pitch].reshape(self.rows, pitch)[:, : self.nbytes]


@define(eq=False)
class Image:
    """Parts that are uploaded and room that kernels write to, each at its offset.

    Addresses are those of the device, where the image lies at `base`.
    """

    base: int
    nbytes: int = field(default=0, init=False)
    wanted: list[Wanted] = field(factory=list, init=False)
    starts: dict[str, int] = field(factory=dict, init=False)
    _parts: list[tuple[int, Bytes]] = field(factory=list, init=False)

    def take(self, nbytes: int) -> int:
        """Offset of room, which is zero before the kernels run."""
        start = self.nbytes
        self.nbytes += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return start

    def put(self, array: NDArray[np.generic], name: str = "") -> int:
        """Offset of an array; with a name that is there already, of that one."""
        if name not in self.starts or not name:
            raw = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            start = self.take(raw.nbytes)
            self._parts.append((start, raw))
            if not name:
                return start
            self.starts[name] = start
        return self.starts[name]

    def at(self, array: NDArray[np.generic], name: str = "") -> int:
        """Address of an array, as `put`."""
        return self.base + self.put(array, name)

    def floats(self, name: str, lane: int, expected: Floats, initial: Floats | None = None) -> int:
        """Address of float rows that a kernel writes, or changes from `initial`."""
        rows, nbytes = len(expected), expected.nbytes // len(expected)
        start = self.take(expected.nbytes) if initial is None else self.put(initial)
        self.wanted.append(Wanted(name, lane, start, nbytes, nbytes, rows, expected))
        return self.base + start

    def write(self, image: Bytes) -> None:
        """Write what is uploaded, `nbytes` of it."""
        image[: self.nbytes] = 0
        for start, part in self._parts:
            image[start : start + part.nbytes] = part

    def computed(self, image: Bytes, lane: int) -> list[Computed]:
        """What came back of a lane."""
        return [one.computed(image) for one in self.wanted if one.lane == lane]
