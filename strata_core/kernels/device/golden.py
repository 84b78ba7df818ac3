"""Golden rows for a device's kernels: what is uploaded, what is launched, what has to come of it.

One image holds all of it: weights, activations and tables first written on the host, and room for
what the kernels make. It lies at one address of the device, and the same bytes in page-locked
memory, where the kernels of experts read the weights once more as the link's lane does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np
from attrs import define, field

from strata_core.kernels import exact
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.golden_image import Floats, Image, Wanted
from strata_core.kernels.device.layout import (
    ENTRY,
    HIT,
    HOST,
    LINK,
    RECORD_BYTES,
    STATUS_BYTES,
    WAVE,
    inner_bytes,
    record_bytes,
)
from strata_core.kernels.device.prompt_table import (
    MATRIX_NAMES,
    OF_FLOATS,
    ON_MATRIX_UNITS,
    within,
)
from strata_core.kernels.device.table import gate_up_warps, make_launch
from strata_core.kernels.self_test import (
    COLUMNS,
    ROWS,
    TOKENS,
    Golden,
    golden,
    golden_activations,
    golden_inner,
    golden_on_units,
)
from strata_core.runtime import KernelKey, Launch

TOP_K = 2
"""Experts of a token that the test of `combine` puts together."""

EPS = float(np.float32(1e-6))

_WEIGHTS = np.array([[0.625, 0.375], [0.8125, 0.1875]], np.float32) * np.float32(1.1)
"""Router weights [TOKENS, TOP_K], not short ones."""


@define(eq=False)
class GoldenWork:
    """Launches that compute golden rows, for an image at the device's address `base`.

    `seen` is where the device finds the host's copy of the image, 0 where it finds it nowhere: then
    the link's lane is left out. `room` is the shared memory that a block may have. Sizes depend on
    neither address.
    """

    base: int
    seen: int
    room: int
    image: Image = field(init=False)
    launches: list[Launch] = field(factory=list, init=False)
    _status: int = field(default=0, init=False)

    def __attrs_post_init__(self) -> None:
        self.image = Image(self.base)
        name = "the word for values that are not finite"
        status = np.full((1, STATUS_BYTES // 4), -1, np.int32).view(np.float32)
        self._status = self.image.floats(name, HIT, status, status)

    def add(self, keys: Iterable[KernelKey]) -> None:
        """Test kernels; those that are not in `TESTED` are passed over."""
        for key in keys:
            make = _MAKERS.get(key.name)
            if make is not None:
                make(self, *(str(p) for p in key.parameters))

    def _launch(self, name: str, *parameters: str, **values: float) -> None:
        self.launches.append(within(make_launch(name, parameters, **values), self.room))

    # inputs

    def _weight(self, type_name: str) -> tuple[int, int]:
        """(offset, stride) of a golden weight."""
        weight = golden(type_name).weight
        return self.image.put(weight, f"weight {type_name}"), len(weight) // ROWS

    def _quantised(self, name: str, floats: Floats, pitch: int) -> int:
        """Offset of records that the device makes of float rows, `pitch` bytes apart."""
        if name not in self.image.starts:
            rows, width = floats.shape
            source = self.image.at(floats, f"{name} floats")
            self.image.starts[name] = start = self.image.take(rows * pitch)
            whole = pitch == record_bytes(width)
            for row in range(1 if whole else rows):
                self._launch(
                    "quantise",
                    x=source + 4 * width * row,
                    records=self.base + start + pitch * row,
                    status=self._status,
                    rows=rows if whole else 1,
                    width=width,
                    op=0,
                )
        return self.image.starts[name]

    def _x(self, type_name: str, pitch: int = record_bytes(COLUMNS)) -> int:
        """Address of the golden activations as a weight of a type takes them."""
        floats = golden_activations()
        if type_name in UNPACK:
            return self.base + self._quantised(f"records {pitch}", floats, pitch)
        return self.image.at(floats, "x")

    def _inner(self, type_name: str) -> int:
        """The same as inner activations of an expert."""
        assert inner_bytes(COLUMNS) == 4 * COLUMNS, "float rows lie side by side"
        return self._x(type_name, inner_bytes(COLUMNS))

    # products of dense weights

    def _linear(self, type_name: str) -> None:
        self._product("linear", (type_name,), (1, TOKENS))

    def _prompt_linear(self, kernel: str, type_name: str) -> None:
        self._product(kernel, (type_name,), (TOKENS,))

    def _linear_add(self, type_name: str) -> None:
        self._product("linear_add", (type_name,), (1, TOKENS))

    def _product(self, kernel: str, types: tuple[str], counts: Sequence[int]) -> None:
        made = _rows_of(kernel)(types[0])
        start, stride = self._weight(types[0])
        name = " ".join((kernel, *types))
        for tokens in counts:
            more = {}
            if kernel == "linear_add":
                before = made.x[:tokens, :ROWS]
                more["sum"] = self.image.floats(name, HIT, before + made.out[:tokens], before)
            self._launch(
                kernel,
                *types,
                weight=self.base + start,
                x=self._x(types[0]),
                out=self.image.floats(name, HIT, made.out[:tokens]),
                bias=0,
                stride=stride,
                tokens=tokens,
                rows=ROWS,
                columns=COLUMNS,
                **more,
            )

    def _products(self, *types: str) -> None:
        name = " ".join(("products", *types))
        for tokens in (1, TOKENS):
            values: dict[str, int] = {}
            for n, type_name in zip("abc", types, strict=True):
                start, stride = self._weight(type_name)
                values[f"weight_{n}"], values[f"stride_{n}"] = self.base + start, stride
                values[f"out_{n}"] = self.image.floats(name, HIT, golden(type_name).out[:tokens])
                values[f"bias_{n}"], values[f"rows_{n}"] = 0, ROWS
            x = self._x(types[0])
            self._launch("products", *types, x=x, tokens=tokens, columns=COLUMNS, **values)

    # experts

    def _lanes(self) -> list[tuple[int, int]]:
        """The lanes that read an expert's bytes, and where these are for each."""
        return [(HIT, self.base), *([(LINK, self.seen)] if self.seen else [])]

    def _entries(self, count: int, parts: Sequence[int], rows: Sequence[int], lane: int) -> int:
        """Address of `count` entries of one expert."""
        table = np.zeros(count, ENTRY)
        for name, address in zip(("gate", "up", "down"), parts, strict=True):
            table[name] = address
        table["row"], table["lane"] = rows, lane
        return self.image.at(table)

    def _gate_up(self, gate: str, up: str, down: str) -> None:
        parts = [self._weight(t) for t in (gate, up, down)]
        for lane, base in self._lanes():
            for count in (1, TOKENS):
                places = [base + start for start, _ in parts]
                self._launch(
                    "gate_up",
                    gate,
                    up,
                    down,
                    entries=self._entries(count, places, [0] * count, lane),
                    x=self._x(gate),
                    inner=self._made("gate_up", lane, (gate, up, down), count),
                    status=self._status,
                    gate_stride=parts[0][1],
                    up_stride=parts[1][1],
                    count=count,
                    top_k=1,
                    rows=ROWS,
                    columns=COLUMNS,
                    op=0,
                    warps=gate_up_warps(parts[0][1], parts[1][1], self.room),
                )

    def _made(self, kernel: str, lane: int, types: tuple[str, str, str], count: int) -> int:
        """Address of room for the inner rows that a kernel makes of gate and up."""
        units, name = kernel in MATRIX_NAMES, " ".join((kernel, *types))
        inner, pitch = golden_inner(*types[:2], units=units), inner_bytes(ROWS)
        expected: Floats | int
        expected, nbytes = inner[:count], 4 * ROWS
        if types[2] in UNPACK:
            records = " ".join(("inner", *types[:2], "on units" if units else ""))
            expected = self._quantised(records, inner, RECORD_BYTES)
            nbytes = RECORD_BYTES
        start = self.image.take(count * pitch)
        self.image.wanted.append(Wanted(name, lane, start, pitch, nbytes, count, expected))
        return self.base + start

    def _down(self, type_name: str) -> None:
        start, stride = self._weight(type_name)
        for lane, base in self._lanes():
            for count in (1, TOKENS):
                out = self.image.floats(f"down {type_name}", lane, golden(type_name).out[:count])
                rows = [out + 4 * ROWS * n for n in range(count)]
                self._launch(
                    "down",
                    type_name,
                    entries=self._entries(count, [base + start] * 3, rows, lane),
                    inner=self._inner(type_name),
                    stride=stride,
                    count=count,
                    rows=ROWS,
                    columns=COLUMNS,
                )

    def _wave(self, *types: str) -> dict[str, int]:
        """The tables of a prompt's wave of one expert that every token picked."""
        wave = np.zeros(1, WAVE)
        for name, type_name in zip(("gate", "up", "down"), types, strict=True):
            wave[name] = self.base + self._weight(type_name)[0]
        return {
            "wave": self.image.at(wave, " ".join(("wave", *types))),
            "starts": self.image.at(np.array([0, TOKENS], np.int32), "starts"),
            "order": self.image.at(np.arange(TOKENS, dtype=np.int32), "order"),
            "experts": 1,
            "spread": 1,
            "rows": ROWS,
            "columns": COLUMNS,
        }

    def _prompt_gate_up(self, kernel: str, gate: str, up: str, down: str) -> None:
        self._launch(
            kernel,
            gate,
            up,
            down,
            x=self._x(gate),
            inner=self._made(kernel, HIT, (gate, up, down), TOKENS),
            status=self._status,
            gate_stride=self._weight(gate)[1],
            up_stride=self._weight(up)[1],
            top_k=1,
            op=0,
            **self._wave(gate, up, down),
        )

    def _prompt_down(self, kernel: str, type_name: str) -> None:
        self._launch(
            kernel,
            type_name,
            inner=self._inner(type_name),
            out=self.image.floats(f"{kernel} {type_name}", HIT, _rows_of(kernel)(type_name).out),
            stride=self._weight(type_name)[1],
            **self._wave(type_name, type_name, type_name),
        )

    # putting experts' rows together

    def _combine(self) -> None:
        shared, x, _ = self._combined("combine")
        self._launch("combine", x=x, tokens=TOKENS, width=ROWS, top_k=TOP_K, **shared)

    def _combine_norm(self) -> None:
        shared, x, sums = self._combined("combine_norm")
        gain = golden_activations()[0, 128 : 128 + ROWS]
        self._launch(
            "combine_norm",
            x=x,
            out=self.image.floats("combine_norm", HIT, exact.rms_norm(sums, gain, ROWS, EPS)),
            gain=self.image.at(gain, "gain"),
            records=0,
            status=self._status,
            rows=TOKENS,
            dim=ROWS,
            top_k=TOP_K,
            eps=EPS,
            op=0,
            **shared,
        )

    def _combined(self, name: str) -> tuple[dict[str, int], int, Floats]:
        """Arguments of every kernel that combines, the address of x, and what it becomes.

        The rows of the last token come from page-locked memory, as those of other lanes do.
        """
        activations, count = golden_activations(), TOKENS * TOP_K
        before, rows = activations[:, :ROWS], activations[:, ROWS : ROWS * (1 + TOP_K)]
        start = self.image.put(rows, "rows")
        places = [self.base + start + 4 * ROWS * n for n in range(count)]
        entries = np.zeros(count, ENTRY)
        if self.seen:
            far = count - TOP_K
            places[far:] = [self.seen + start + 4 * ROWS * n for n in range(far, count)]
            entries["lane"][far:] = HOST
        entries["row"], entries["first"] = places, np.arange(count)
        sums = exact.combine(before, rows.reshape(TOKENS, TOP_K, ROWS), _WEIGHTS)
        shared = {
            "entries": self.image.at(entries),
            "weights": self.image.at(_WEIGHTS, "router weights"),
            **self._answered(),
        }
        return shared, self.image.floats(name, HIT, sums, before), sums

    def _answered(self) -> dict[str, int]:
        """Arguments of a wait for the host that is over: it has answered round 1 already."""
        number = np.array([1], np.int64)
        answer = self.image.put(number, "answer")
        return {
            "answer": self.seen + answer if self.seen else 0,
            "round": self.image.at(number, "round"),
            "late": self.image.at(np.array([0xFFFFFFFF], np.uint32), "late"),
            "bound": 0,
            "layer": 0,
        }


def _rows_of(kernel: str) -> Callable[[str], Golden]:
    """The golden rows of a kernel that multiplies: matrix units have an order of their own."""
    return golden_on_units if kernel in MATRIX_NAMES else golden


def _of_prompts(plain: str, kernel: str) -> Callable[..., None]:
    """Tests a kernel of prompts, or (`kernel`) what takes its place."""
    make = getattr(GoldenWork, f"_{plain}")
    return lambda work, *types: make(work, kernel, *types)


_PLAIN = ("linear", "linear_add", "products", "gate_up", "down", "combine", "combine_norm")

_OF_PROMPTS = {
    plain: name for plain, (name, _) in ON_MATRIX_UNITS.items() if plain != "prompt_attention"
}
"""Attention is not among them: on matrix units it has no golden bits (docs/arithmetic.md, 11)."""

_MAKERS: Mapping[str, Callable[..., None]] = {
    **{name: getattr(GoldenWork, f"_{name}") for name in _PLAIN},
    **{name: _of_prompts(name, name) for name in _OF_PROMPTS},
    **{other: _of_prompts(name, other) for name, other in _OF_PROMPTS.items()},
    **{other: _of_prompts(name, other) for name, other in OF_FLOATS.items()},
}

TESTED = frozenset({"quantise", *_MAKERS})
"""Kernels that multiply weights or put together what came of it; `quantise` is part of most."""
