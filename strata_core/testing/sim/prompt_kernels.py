"""The device kernels of prompts on the host: the compiled CPU steps, entries grouped by expert."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from strata_core.kernels.cpu.linear import CHUNK
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.layout import PARTIAL_HEAD, WAVE, inner_bytes, record_bytes
from strata_core.kernels.device.prompt_table import ON_MATRIX_UNITS
from strata_core.kernels.exact import SPLIT
from strata_core.memory.address import bytes_at
from strata_core.testing.sim import unit_kernels

if TYPE_CHECKING:
    from strata_core.testing.sim.args import Args
    from strata_core.testing.sim.host_kernels import HostKernels

Ready = Callable[[], None]

TOKENS = 64
"""Tokens whose partial sums of attention are held at once."""

_PLAIN_STEPS: Mapping[str, tuple[tuple[str, tuple[int, ...]], ...]] = {
    "prompt_linear": (("linear", (0,)),),
    "prompt_floats": (("linear", (0,)),),
    "prompt_attention": (("attention", (0, 1)), ("merge", (1,))),
    "prompt_gate_up": (("gate_up", (0, 1, 2)),),
    "prompt_down": (("down", (0,)),),
    "prompt_combine": (("combine", ()),),
}

PROMPT_STEPS = {
    **_PLAIN_STEPS,
    ON_MATRIX_UNITS["prompt_attention"][0]: _PLAIN_STEPS["prompt_attention"],
}
"""The CPU's steps behind each kernel, and which of its parameters each is compiled for."""


def _linear(kernels: HostKernels, a: Args, type_name: str) -> Ready:
    pitch = record_bytes(a.columns) if type_name in UNPACK else 4 * a.columns
    length = a.columns // 32 if type_name in UNPACK else a.columns

    def ready() -> None:
        tokens = np.array([a.tokens], np.int64)
        xs, ys = _rows(a.x, pitch, a.tokens), _rows(a.out, 4 * a.rows, a.tokens)
        places = [_at(array) for array in (tokens, xs, ys)]
        args = [a.weight, a.stride, length, *places, a.rows, CHUNK, a.bias]
        kernels.run_step("linear", (type_name,), args, -(-a.rows // CHUNK))

    return ready


def _attention(kernels: HostKernels, a: Args, kv_type: str, head_dim: int) -> Ready:
    heads = a.kv_heads * a.group

    def ready() -> None:
        positions = _ints(a.positions, a.tokens)
        most = int(positions.max()) // SPLIT + 1
        partials = np.zeros((TOKENS, heads, most, PARTIAL_HEAD + head_dim), np.float32)
        splits = np.array([most], np.int64)
        for first in range(0, a.tokens, TOKENS):
            count = min(TOKENS, a.tokens - first)
            row = first * 4 * heads * head_dim
            here = [a.positions + 4 * first, a.places + 32 * first]
            shape = [a.layer_offset, a.width, a.kv_heads, a.group, a.window, _at(splits)]
            args = [a.q + row, _at(partials), *here, *shape]
            units = count * a.kv_heads * most
            kernels.run_step("attention", (kv_type, head_dim), args, units)
            last = [heads, a.window, _at(splits)]
            args = [a.out + row, _at(partials), here[0], *last]
            kernels.run_step("merge", (head_dim,), args, count)

    return ready


def _group(_kernels: HostKernels, a: Args) -> Ready:
    def ready() -> None:
        picks = _ints(a.picks, a.count)
        starts = _ints(a.starts, a.experts + 1)
        starts[0] = 0
        starts[1:] = np.cumsum(np.bincount(picks, minlength=a.experts))
        _ints(a.order, a.count)[:] = np.argsort(picks, kind="stable")

    return ready


def _gate_up(kernels: HostKernels, a: Args, gate: str, up: str, down: str) -> Ready:
    pitch = record_bytes(a.columns) if gate in UNPACK else 4 * a.columns
    length = a.columns // 32 if gate in UNPACK else a.columns

    def ready() -> None:
        entries, groups = _wave(a)
        xs = a.x + (entries // a.top_k) * pitch
        ys = a.inner + entries * inner_bytes(a.rows)
        args = [_at(groups), _at(xs), _at(ys), a.gate_stride, a.up_stride]
        units = (len(groups) - 1) * -(-a.rows // CHUNK)
        args += [length, a.rows, CHUNK, a.status, a.op]
        kernels.run_step("gate_up", (gate, up, down), args, units)

    return ready


def _down(kernels: HostKernels, a: Args, type_name: str) -> Ready:
    length = a.columns // 32 if type_name in UNPACK else a.columns

    def ready() -> None:
        entries, groups = _wave(a)
        xs = a.inner + entries * inner_bytes(a.columns)
        ys = a.out + entries * (4 * a.rows)
        args = [_at(groups), _at(xs), _at(ys), a.stride, 0, length, a.rows, CHUNK]
        units = (len(groups) - 1) * -(-a.rows // CHUNK)
        kernels.run_step("down", (type_name,), [*args, 0, 0], units)

    return ready


def _combine(kernels: HostKernels, a: Args) -> Ready:
    def ready() -> None:
        args = [a.x, a.rows, a.weights, a.width, a.top_k]
        kernels.run_step("combine", (), args, a.tokens)

    return ready


_PLAIN: Mapping[str, Callable[..., Ready]] = {
    "prompt_linear": _linear,
    "prompt_floats": _linear,
    "prompt_attention": _attention,
    "prompt_group": _group,
    "prompt_gate_up": _gate_up,
    "prompt_down": _down,
    "prompt_combine": _combine,
}

_OWN: Mapping[str, Callable[..., Ready]] = {
    "matrix_linear": unit_kernels.linear,
    "matrix_gate_up": unit_kernels.gate_up,
    "matrix_down": unit_kernels.down,
    ON_MATRIX_UNITS["prompt_attention"][0]: _attention,
}
"""Products on matrix units have an order of their own, which has no compiled steps."""

PROMPT_KERNELS: Mapping[str, Callable[..., Ready]] = {**_PLAIN, **_OWN}
"""What makes a launch of each name ready."""


def _wave(a: Args) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The entries of a wave's experts, and a group of the CPU's plan for each expert with some."""
    wave: NDArray[Any] = bytes_at(a.wave, WAVE.itemsize * a.experts).view(WAVE)
    most = int(wave["expert"].max()) + 2
    starts = _ints(a.starts, most)
    found: list[NDArray[np.int64]] = []
    groups, total = [], 0
    for cell in wave:
        begin, end = (int(v) for v in starts[int(cell["expert"]) :][:2])
        if begin == end:
            continue
        groups.append([int(cell[name]) for name in ("gate", "up", "down")] + [total])
        found.append(_ints(a.order + 4 * begin, end - begin).astype(np.int64))
        total += end - begin
    groups.append([0, 0, 0, total])
    return np.concatenate([*found, np.zeros(0, np.int64)]), np.array(groups, np.int64)


def _rows(base: int, pitch: int, count: int) -> NDArray[np.int64]:
    return np.arange(count, dtype=np.int64) * pitch + base


def _ints(address: int, count: int) -> NDArray[np.int32]:
    return bytes_at(address, 4 * count).view(np.int32)


def _at(array: NDArray[Any]) -> int:
    return int(array.ctypes.data)
