"""Runs cases of device kernels on any runtime and compares what comes out, bit by bit.

A case says which kernel, which buffers lie where, which addresses stand in buffers, and what to
look at afterwards. The same case runs on the simulated accelerator, whose kernels are the CPU's
compiled steps (the oracle), and on what is tested. Every buffer is followed by bytes that nothing
may write.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from attrs import field, frozen

from strata_core.kernels.device.layout import ENTRY, RECORD_BYTES
from strata_core.kernels.device.prompt_table import within
from strata_core.kernels.device.table import make_launch
from strata_core.memory.address import address_of
from strata_core.runtime import KernelKey

RECORD = np.dtype([("q", "<i2", (256,)), ("d", "<f4", (8,)), ("sum", "<i4", (8,))])
"""A record of 256 activations, as the CPU lays it out and as cases hold it."""

GUARD = 256


@frozen
class Ref:
    """An address in an argument block: a buffer's, and so many bytes in."""

    name: str
    offset: int = 0


@frozen(eq=False)
class Buffer:
    """Contents before the launch. `pitch`: bytes from one row of records to the next."""

    data: np.ndarray
    host: bool = False
    pitch: int = 0


@frozen(eq=False)
class Case:
    """One launch. `links` are addresses in buffers: (buffer, byte offset, what stands there).

    `looks` are the buffers to compare, each with what brings it into a comparable form.
    """

    label: str
    key: KernelKey
    buffers: dict[str, Buffer]
    args: dict[str, int | float | Ref]
    looks: dict[str, Callable[[np.ndarray], np.ndarray]]
    links: list[tuple[str, int, Ref]] = field(factory=list)


def same(array: np.ndarray) -> np.ndarray:
    """Compare a buffer as it is."""
    return array


def pack_planes(records: np.ndarray) -> np.ndarray:
    """Records as the device kernels lay them out: uint8 [rows, records, 576]."""
    q = records["q"].reshape(*records.shape, 8, 2, 16).astype(np.int32)
    planes = np.stack([q >> 7, q & 127], axis=-4)  # [.., plane, block, half, 16]
    pieces = np.moveaxis(planes, -3, -2)  # [.., plane, half, block, 16]
    out = np.zeros((*records.shape, RECORD_BYTES), np.uint8)
    out[..., :512] = pieces.astype(np.uint8).reshape(*records.shape, 512)
    out[..., 512:544] = np.ascontiguousarray(records["d"]).view(np.uint8)
    out[..., 544:] = np.ascontiguousarray(records["sum"]).view(np.uint8)
    return out


def unpack_planes(raw: np.ndarray) -> np.ndarray:
    """The reverse of `pack_planes`."""
    out = np.zeros(raw.shape[:-1], RECORD)
    pieces = raw[..., :512].reshape(*raw.shape[:-1], 2, 2, 8, 16)
    planes = np.moveaxis(pieces, -2, -3)  # [.., plane, block, half, 16]
    high, low = planes[..., 0, :, :, :].view(np.int8), planes[..., 1, :, :, :]
    q = high.astype(np.int32) * 128 + low
    out["q"] = q.reshape(*raw.shape[:-1], 256)
    out["d"] = np.ascontiguousarray(raw[..., 512:544]).view("<f4")
    out["sum"] = np.ascontiguousarray(raw[..., 544:]).view("<i4")
    return out


class Bench:
    """One runtime with a stream. `planes`: whether its kernels lay records out in planes."""

    def __init__(self, runtime, *, planes: bool, device: int = 0) -> None:
        self.runtime, self.planes, self.device = runtime, planes, device
        runtime.open_context(device)
        self.stream = runtime.create_stream(device)

    def run(
        self,
        case: Case,
        before: Callable[[dict[str, int], dict[str, np.ndarray]], None] | None = None,
    ) -> dict[str, np.ndarray]:
        """The buffers to look at, after the launch. Raises AssertionError for a stray write.

        `before` is called right before the launch with where each buffer lies and its bytes.
        """
        runtime, taken = self.runtime, []
        raw = {name: self._encode(buffer) for name, buffer in case.buffers.items()}
        places: dict[str, tuple[int, int]] = {}
        try:
            for name, buffer in case.buffers.items():
                places[name] = self._take(raw[name].size + GUARD, buffer.host)
                taken.append((places[name][0], buffer.host))
            for name, offset, ref in case.links:
                value = np.array([places[ref.name][1] + ref.offset], np.uint64)
                raw[name][offset : offset + 8] = value.view(np.uint8)
            for name, data in raw.items():
                self._put(places[name][0], np.concatenate([data, np.full(GUARD, 0xA5, np.uint8)]))
            values = {
                name: places[value.name][1] + value.offset if isinstance(value, Ref) else value
                for name, value in case.args.items()
            }
            runtime.load(self.device, [case.key])
            if before is not None:
                before({name: place for name, (_, place) in places.items()}, raw)
            launch = make_launch(case.key.name, case.key.parameters, **values)
            room = runtime.devices()[self.device].shared
            runtime.launch(within(launch, room), self.stream)
            runtime.synchronize(self.stream)
            back = {name: self._get(places[name][0], raw[name].size + GUARD) for name in raw}
        except Exception:
            runtime.take_error()
            raise
        finally:
            for address, host in taken:
                if host:
                    runtime.host_free(address)
                else:
                    runtime.free(self.device, address)
        for name, data in back.items():
            assert (data[-GUARD:] == 0xA5).all(), f"{case.label}: written behind {name}"
            if name not in case.looks:
                assert (data[:-GUARD] == raw[name]).all(), f"{case.label}: {name} was changed"
        found = {name: self._decode(case.buffers[name], back[name][:-GUARD]) for name in case.looks}
        for array in found.values():
            if array.dtype == ENTRY:
                array["row"] = _named(array["row"], places, raw)
        return {name: look(found[name]) for name, look in case.looks.items()}

    def _take(self, nbytes: int, host: bool) -> tuple[int, int]:
        """(address for copies, address for the kernel) of memory."""
        if host:
            address = self.runtime.host_alloc(nbytes)
            return address, self.runtime.alias(address, self.device)
        address = self.runtime.alloc(self.device, nbytes)
        return address, address

    def _put(self, address: int, data: np.ndarray) -> None:
        self.runtime.copy(address, address_of(data), data.size, self.stream)
        self.runtime.synchronize(self.stream)

    def _get(self, address: int, nbytes: int) -> np.ndarray:
        back = np.empty(nbytes, np.uint8)
        self.runtime.copy(address_of(back), address, nbytes, self.stream)
        self.runtime.synchronize(self.stream)
        return back

    def _encode(self, buffer: Buffer) -> np.ndarray:
        data = np.ascontiguousarray(buffer.data)
        if data.dtype != RECORD:
            return data.reshape(-1).view(np.uint8).copy()
        rows, count = data.shape
        out = np.zeros((rows, buffer.pitch or count * RECORD_BYTES), np.uint8)
        body = pack_planes(data) if self.planes else data.view(np.uint8)
        out[:, : count * RECORD_BYTES] = body.reshape(rows, -1)
        return out.reshape(-1)

    def _decode(self, buffer: Buffer, raw: np.ndarray) -> np.ndarray:
        data = buffer.data
        if data.dtype != RECORD:
            return raw.view(data.dtype).reshape(data.shape)
        rows, count = data.shape
        body = raw.reshape(rows, -1)[:, : count * RECORD_BYTES].reshape(rows, count, RECORD_BYTES)
        if self.planes:
            return unpack_planes(body)
        return np.ascontiguousarray(body).view(RECORD).reshape(rows, count)


def _named(addresses, places, raw) -> np.ndarray:
    """Addresses as (number of the buffer, offset in it), which no runtime changes."""
    out = addresses.copy()
    for number, (name, (_, start)) in enumerate(places.items()):
        inside = (addresses >= start) & (addresses < start + max(raw[name].size, 1))
        out[inside] = (number << 40) + (addresses[inside] - np.uint64(start))
    return out


def difference(expected: dict[str, np.ndarray], got: dict[str, np.ndarray]) -> str:
    """The first place where two results differ, in words; empty where none does."""
    for name, want in expected.items():
        have = got[name]
        if want.dtype.names:
            parts = {f"{name}.{f}": (want[f], have[f]) for f in want.dtype.names}
        else:
            parts = {name: (want, have)}
        for label, (a, b) in parts.items():
            bits = [np.ascontiguousarray(v).reshape(-1) for v in (a, b)]
            words = [v.view(f"u{v.dtype.itemsize}") for v in bits]
            wrong = np.flatnonzero(words[0] != words[1])
            if wrong.size:
                at = int(wrong[0])
                place = tuple(int(i) for i in np.unravel_index(at, a.shape))
                return (
                    f"{label}{place}: {bits[1][at]!r} instead of {bits[0][at]!r}"
                    f" ({wrong.size} of {words[0].size} differ)"
                )
    return ""
