"""The device kernels on the host: functions of the table's names that call the compiled CPU steps.

The simulated accelerator's device memory is host memory, so an address in an argument block is used
as it is. What a launch comes to (the steps' own argument blocks) is kept, because a graph launches
the same blocks again and again.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.kernels.cpu.library import Library, Step
from strata_core.kernels.cpu.linear import CHUNK
from strata_core.kernels.cpu.steps import NOTHING_LATCHED
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.fuse import parts_of, plain_keys
from strata_core.kernels.device.fused_table import FUSED
from strata_core.kernels.device.layout import (
    CELL,
    ENTRY,
    HELPER,
    HIT,
    HOST,
    LANES,
    LINK,
    inner_bytes,
    record_bytes,
)
from strata_core.kernels.device.table import DEVICE_KERNELS, unpack
from strata_core.memory.address import bytes_at
from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim.args import Args
from strata_core.testing.sim.lanes import choose_lanes, fill_entries
from strata_core.testing.sim.prompt_kernels import PROMPT_KERNELS, PROMPT_STEPS
from strata_core.testing.sim.runtime import SimRuntime

Ready = Callable[[], None]
"""A launch with everything worked out; calling it does the work."""

HostKernel = Callable[[SimRuntime, int, Launch], None]


@frozen(eq=False)
class _Kernel:
    """One name of the table for the simulator: it is loaded, and then called."""

    kernels: HostKernels

    def load(self, key: KernelKey) -> None:
        self.kernels.load(key)

    def waits(self, launch: Launch) -> bool:
        return bool(unpack(launch.kernel.name, launch.args).get("answer"))

    def __call__(self, runtime: SimRuntime, device: int, launch: Launch) -> None:
        self.kernels.run(runtime, device, launch)


class HostKernels:
    """The functions for one simulated accelerator; one thread at a time, as launches are eager."""

    def __init__(self, library: Library) -> None:
        self._library = library
        self._run = library.runner()
        self._ready: dict[tuple[int, Launch], Ready] = {}

    def mapping(self) -> Mapping[str, HostKernel]:
        """A function for every name of the device kernel table."""
        return dict.fromkeys(DEVICE_KERNELS, _Kernel(self))

    def load(self, key: KernelKey) -> None:
        """Compile the step behind a kernel, where it has one."""
        if key.name in FUSED:
            for part in plain_keys(key):
                self.load(part)
        elif key.name not in ("assign", "claim", "signal", *PROMPT_KERNELS):
            self._library.address(Step(key.name, key.parameters))
        for name, parameters in PROMPT_STEPS.get(key.name, ()):
            self._library.address(Step(name, tuple(key.parameters[i] for i in parameters)))

    def run(self, runtime: SimRuntime, device: int, launch: Launch) -> None:
        """Do what a launch asks, at once, on this thread."""
        ready = self._ready.get((device, launch))
        if ready is None:
            parts = [self._part(runtime, device, part) for part in parts_of(launch)]
            ready = self._ready[device, launch] = parts[0] if len(parts) == 1 else _all(parts)
        ready()

    def _part(self, runtime: SimRuntime, device: int, launch: Launch) -> Ready:
        args, name = Args.of(launch, runtime, device), launch.kernel.name
        if name in PROMPT_KERNELS:
            return PROMPT_KERNELS[name](self, args, *launch.kernel.parameters)
        make: Callable[..., Ready] = getattr(self, f"_{name}")
        return make(args, *launch.kernel.parameters)

    def run_step(
        self, name: str, parameters: tuple[str | int, ...], args: Sequence[int], units: int
    ) -> None:
        """A compiled step over all its units, now."""
        block = np.array([_signed(a) for a in args], np.int64)
        self._run(self._library.address(Step(name, parameters)), _address(block), 0, units)

    def _step(self, name: str, args: Sequence[int], units: int, *parameters: str | int) -> Ready:
        """A compiled step over all its units."""
        function = self._library.address(Step(name, parameters))
        block = np.array([_signed(a) for a in args], np.int64)

        def ready() -> None:
            self._run(function, block.ctypes.data, 0, units)

        return ready

    # rows of weights

    def _embed(self, a: Args, type_name: str) -> Ready:
        args = [a.ids, a.table, a.out, a.width, a.stride]
        step = self._step("embed", args, a.tokens, type_name)
        return _linked(step, a, "table", a.tokens * a.stride)

    def _linear(self, a: Args, type_name: str) -> Ready:
        quantised = type_name in UNPACK
        pitch = record_bytes(a.columns) if quantised else 4 * a.columns
        cells = np.array([a.tokens], np.int64)
        xs, ys = _places(a.x, pitch, a.tokens), _places(a.out, 4 * a.rows, a.tokens)
        length = a.columns // 32 if quantised else a.columns
        args = [a.weight, a.stride, length, *map(_address, (cells, xs, ys)), a.rows, CHUNK, a.bias]
        step = self._step("linear", args, -(-a.rows // CHUNK), type_name)
        return _keeping(step, cells, xs, ys)

    def _gate_up(self, a: Args, gate: str, up: str, down: str) -> Ready:
        quantised = gate in UNPACK
        pitch = record_bytes(a.columns) if quantised else 4 * a.columns
        xs = np.repeat(_places(a.x, pitch, a.count // a.top_k), a.top_k)
        ys = _places(a.inner, inner_bytes(a.rows), a.count)
        length = a.columns // 32 if quantised else a.columns
        strides = (a.gate_stride, a.up_stride)
        address = self._library.address(Step("gate_up", (gate, up, down)))

        def ready() -> None:
            mine, groups = _groups(a)
            _note_experts(a, (a.gate_stride + a.up_stride) * a.rows)
            here = (xs[mine], ys[mine])
            args = [_address(groups), *map(_address, here), *strides, length, a.rows, CHUNK]
            block = np.array([*args, a.status, a.op], np.int64)
            self._run(address, _address(block), 0, len(mine) * -(-a.rows // CHUNK))

        return ready

    def _down(self, a: Args, type_name: str) -> Ready:
        quantised = type_name in UNPACK
        xs = _places(a.inner, inner_bytes(a.columns), a.count)
        length = a.columns // 32 if quantised else a.columns
        address = self._library.address(Step("down", (type_name,)))

        def ready() -> None:
            mine, groups = _groups(a)
            rows = [a.host(int(r)) for r in _entries(a.entries, a.count)["row"][mine]]
            here = (xs[mine], np.array(rows, np.int64))
            _note_experts(a, a.stride * a.rows)
            helping = int((_entries(a.entries, a.count)["lane"][mine] >= HELPER).sum())
            a.link(written=4 * a.rows * helping)
            args = [_address(groups), *map(_address, here), a.stride, 0, length, a.rows, CHUNK]
            block = np.array([*args, 0, 0], np.int64)
            self._run(address, _address(block), 0, len(mine) * -(-a.rows // CHUNK))

        return ready

    # rows of buffers

    def _rms_norm(self, a: Args) -> Ready:
        eps = int(np.float32(a.values["eps"]).view(np.int32))
        args = [a.x, a.out, a.weight, a.runs, a.dim, eps]
        return self._step("rms_norm", args, a.rows)

    def _quantise(self, a: Args) -> Ready:
        args = [a.x, a.records, a.width, record_bytes(a.width), a.status, a.op]
        return _linked(self._step("quantise", args, a.rows), a, "x", 4 * a.rows * a.width)

    def _rope(self, a: Args) -> Ready:
        args = [a.x, a.cos, a.sin, a.heads, a.head_dim, a.half]
        return self._step("rope", args, a.tokens)

    def _add(self, a: Args) -> Ready:
        return self._step("add", [a.x, a.y, a.x, a.width], a.rows)

    def _silu_mul(self, a: Args) -> Ready:
        return self._step("silu_mul", [a.gate, a.up, a.out, a.width], a.rows)

    def _gate_add(self, a: Args) -> Ready:
        return self._step("gate_add", [a.x, a.y, a.gate, a.width], a.rows)

    def _gather(self, a: Args) -> Ready:
        return self._step("gather", [a.x, a.index, a.out, a.width], a.rows)

    def _route(self, a: Args) -> Ready:
        args = [a.logits, a.picks, a.weights, a.experts, a.top_k, a.renormalise, a.status, a.op]
        return self._step("route", args, a.tokens)

    # attention

    def _kv_append(self, a: Args, kv_type: str) -> Ready:
        token = [a.positions, a.places, a.layer_offset]
        args = [a.k, a.v, a.width, *token, a.status, a.op]
        return self._step("kv_append", args, a.tokens, kv_type)

    def _attention(self, a: Args, kv_type: str, head_dim: int) -> Ready:
        splits = np.array([a.splits], np.int64)
        shape = [a.layer_offset, a.width, a.kv_heads, a.group, a.window, _address(splits)]
        args = [a.q, a.partials, a.positions, a.places, *shape]
        units = a.tokens * a.kv_heads * a.splits
        return _keeping(self._step("attention", args, units, kv_type, head_dim), splits)

    def _merge(self, a: Args, head_dim: int) -> Ready:
        splits = np.array([a.splits], np.int64)
        args = [a.out, a.partials, a.positions, a.heads, a.window, _address(splits)]
        return _keeping(self._step("merge", args, a.tokens, head_dim), splits)

    # experts

    def _combine(self, a: Args) -> Ready:
        """The step wants its rows side by side, so they are brought together first."""
        count = a.tokens * a.top_k
        rows = np.zeros((count, a.width), np.float32)
        args = [a.x, _address(rows), a.weights, a.width, a.top_k]
        step = self._step("combine", args, a.tokens)

        def ready() -> None:
            if a.answer:
                _await_host(a)
            entries = _entries(a.entries, count)
            for row, place in zip(rows, entries["row"], strict=True):
                row[:] = bytes_at(a.host(int(place)), 4 * a.width).view(np.float32)
            step()
            a.link(read=4 * a.width * int((entries["lane"] >= HOST).sum()))

        return ready

    def _assign(self, a: Args) -> Ready:
        count = a.tokens * a.top_k

        def ready() -> None:
            picks = _ints(a.picks, count)
            cells = bytes_at(a.cells, CELL.itemsize * (int(picks.max()) + 1)).view(CELL)
            lanes = choose_lanes(picks.tolist(), cells, _ints(a.share, count + 1))
            entries = _entries(a.entries, count)
            entries["lane"] = lanes
            fill_entries(entries, picks, cells, a.outputs, (a.rows, a.host_rows))
            counts = bytes_at(a.counts, 8 * LANES).view(np.uint64)
            counts += np.bincount(lanes, minlength=LANES).astype(np.uint64)
            if a.mail_picks:
                _ints(a.mail_picks, count)[:] = picks
                a.link(written=4 * count)
            if a.mail_word:
                nbytes = 4 * a.tokens * a.inputs
                bytes_at(a.mail_x, nbytes)[:] = bytes_at(a.x, nbytes)
                _ints(a.mail_lanes, count)[:] = lanes
                _ints(a.mail_host, count)[:] = np.where(lanes == HOST, picks, -1)
                _words(a.mail_word)[0] = _words(a.round)[0]
                a.link(written=nbytes + 8 * count + 8)

        return ready

    def _claim(self, a: Args) -> Ready:
        def ready() -> None:
            picks, lanes = _ints(a.mail_picks, a.count), _ints(a.mail_lanes, a.count)
            cells = bytes_at(a.cells, CELL.itemsize * (int(picks.max()) + 1)).view(CELL)
            entries = _entries(a.entries, a.count)
            # to the helper its own entries are hits, whatever it is called on the first device
            entries["lane"] = np.where(lanes == a.lane, HIT, HOST)
            fill_entries(entries, picks, cells, a.outputs, (a.host_rows, a.host_rows))
            entries["lane"] = lanes

        return ready

    def _signal(self, a: Args) -> Ready:
        def ready() -> None:
            _words(a.word)[0] = _words(a.value)[0]
            a.link(written=8)

        return ready


def _all(parts: Sequence[Ready]) -> Ready:
    """What a fused launch comes to: its parts, one after the other."""

    def ready() -> None:
        for part in parts:
            part()

    return ready


def _await_host(a: Args) -> None:
    """As the device's kernels do: until the host answers, someone latches, or the bound is over."""
    answer, number = _words(a.answer), _words(a.round)
    late = bytes_at(a.late, 4).view(np.uint32)
    began = time.monotonic_ns()
    while late[0] == NOTHING_LATCHED and answer[0] != number[0]:
        # an answer that came while this thread was held up has come in time
        if time.monotonic_ns() - began > a.bound and answer[0] != number[0]:
            late[0] = a.layer
        a.runtime.let_others_go_on()


def _groups(a: Args) -> tuple[NDArray[np.intp], NDArray[np.int64]]:
    """Entries that this device computes, and a group of the CPU's plan for each."""
    table = _entries(a.entries, a.count)
    mine = np.flatnonzero(table["gate"])
    groups = np.zeros((len(mine) + 1, 4), np.int64)
    for part, name in enumerate(("gate", "up", "down")):
        groups[:-1, part] = [a.host(int(v)) for v in table[name][mine]]
    groups[:, 3] = np.arange(len(mine) + 1)
    return mine, groups


def _note_experts(a: Args, nbytes: int) -> None:
    """Count what the experts of the link's lane cost it: each is read once for all its tokens."""
    table = _entries(a.entries, a.count)
    firsts = table["first"] == np.arange(a.count)
    a.link(read=nbytes * int((firsts & (table["lane"] == LINK)).sum()))


def _entries(address: int, count: int) -> NDArray[Any]:
    return bytes_at(address, ENTRY.itemsize * count).view(ENTRY)


def _ints(address: int, count: int) -> NDArray[np.int32]:
    return bytes_at(address, 4 * count).view(np.int32)


def _words(address: int) -> NDArray[np.int64]:
    return bytes_at(address, 8).view(np.int64)


def _places(base: int, pitch: int, count: int) -> NDArray[np.int64]:
    """Addresses of rows that are `pitch` bytes apart."""
    return np.arange(count, dtype=np.int64) * pitch + _signed(base)


def _address(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)


def _signed(value: int) -> int:
    return ctypes.c_int64(value).value


def _linked(ready: Ready, a: Args, name: str, nbytes: int) -> Ready:
    """The same, counting `nbytes` over the link where an argument is host memory."""
    if name not in a.on_host:
        return ready

    def counted() -> None:
        ready()
        a.link(read=nbytes)

    return counted


def _keeping(ready: Ready, *arrays: NDArray[Any]) -> Ready:
    """The same, holding on to arrays whose addresses it uses."""

    def kept(_held: tuple[NDArray[Any], ...] = arrays) -> None:
        ready()

    return kept
