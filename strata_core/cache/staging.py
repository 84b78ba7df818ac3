"""Bytes on their way to a device: through two page-locked buffers, one read while one is copied."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held, undo_all
from strata_core.runtime import Runtime

PAGE = 4096
BUFFERS = 2


def staging_bytes(largest: int) -> int:
    """Bytes of one buffer that a source can read a blob of up to `largest` bytes into."""
    return max(1 << 20, (-(-largest // PAGE) + 1) * PAGE)


@define(eq=False)
class Staging:
    """Two buffers and the streams of each device that empty them. One thread at a time.

    Ordered only by `drain`: what was put is on the device when that returns.
    """

    runtime: Runtime
    nbytes: int
    addresses: tuple[int, ...]
    _held: Held
    _streams: dict[tuple[int, int], int] = field(factory=dict, init=False)
    _busy: list[int | None] = field(factory=lambda: [None] * BUFFERS, init=False)
    _turn: int = field(default=0, init=False)

    @classmethod
    def make(cls, held: Held, largest: int) -> Staging:
        """Buffers for blobs of up to `largest` bytes. Raises Refused."""
        each = staging_bytes(largest)
        address = held.pinned(each * BUFFERS, "buffers between files and devices")
        places = tuple(address + i * each for i in range(BUFFERS))
        return cls(held.runtime, each, places, held)

    def put(self, device: int, target: int, data: NDArray[np.uint8]) -> None:
        """Copy an array to a device, through the buffers piece by piece."""
        for start in range(0, data.nbytes, self.nbytes):
            piece = data[start : start + self.nbytes]

            def write(buffer: NDArray[np.uint8], piece: NDArray[np.uint8] = piece) -> int:
                buffer[: piece.nbytes] = piece
                return 0

            self.read(device, target + start, piece.nbytes, write)

    def read(
        self,
        device: int,
        target: int,
        nbytes: int,
        write: Callable[[NDArray[np.uint8]], int],
    ) -> None:
        """Have `write` fill a buffer, and copy `nbytes` to a device from where it says they begin.

        `write` is given the whole buffer, which is page-aligned.
        """
        turn = self._turn
        self._turn = (turn + 1) % BUFFERS
        self._empty(turn)
        address = self.addresses[turn]
        start = write(bytes_at(address, self.nbytes))
        stream = self.stream(device, turn)
        self.runtime.copy(target, address + start, nbytes, stream)
        self._busy[turn] = stream

    def direct(self, device: int, target: int, source: int, nbytes: int) -> None:
        """Copy from page-locked memory without a buffer; it must stay as it is until `drain`."""
        self.runtime.copy(target, source, nbytes, self.stream(device))

    def drain(self) -> None:
        """Wait until everything is on its device."""
        for stream in self._streams.values():
            self.runtime.synchronize(stream)
        self._busy = [None] * BUFFERS

    def close(self) -> None:
        """Wait, and free streams and buffers, whatever fails of it."""
        streams, self._streams = list(self._streams.values()), {}
        steps = [partial(self.runtime.synchronize, stream) for stream in streams]
        steps += [partial(self.runtime.destroy_stream, stream) for stream in streams]
        undo_all(self.runtime, [*steps, partial(self._held.release, self.addresses[0])])

    def stream(self, device: int, turn: int = 0) -> int:
        """The stream that empties a buffer into a device, which `drain` waits for."""
        key = (device, turn)
        if key not in self._streams:
            self._streams[key] = self.runtime.create_stream(device)
        return self._streams[key]

    def _empty(self, turn: int) -> None:
        stream, self._busy[turn] = self._busy[turn], None
        if stream is not None:
            self.runtime.synchronize(stream)
