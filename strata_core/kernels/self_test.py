"""The self-test of a lane: small rows whose bits are known, computed once at start.

A lane passes if it gives the bits of `golden_rows.bin`, which the exact mode made from the inputs
below; prompts on matrix units, whose order is their own, those that `exact_units` makes of them.
Inputs are whole numbers mixed by multiplication and put together from their bits, so that they are
the same on every machine. `tests/arithmetic/make_rows.py` writes the file.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
from attrs import frozen
from numpy.typing import NDArray

from strata_core.checkpoint.types import TYPES
from strata_core.errors import Degradation
from strata_core.kernels import exact_math
from strata_core.kernels.exact_quant import quantise
from strata_core.kernels.exact_units import rows_product

FILE = Path(__file__).with_name("golden_rows.bin")
"""float32 [types in the order of `TYPES`, TOKENS, ROWS], little endian."""

TOKENS, ROWS, COLUMNS = 2, 32, 256

Floats = NDArray[np.float32]

_HALVES = {"Q6_K": (208,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q4_1": (0, 2), "Q5_1": (0, 2)}
"""Where the half-precision scales of a block lie, for types that have others than one at 0."""


@frozen(eq=False)
class Golden:
    """A small product: `weight` uint8, ROWS rows of COLUMNS weights; `x` [TOKENS, COLUMNS].

    `out` [TOKENS, ROWS] is what every lane has to make of them.
    """

    type: str
    weight: NDArray[np.uint8]
    x: Floats
    out: Floats


@frozen(eq=False)
class Computed:
    """What a lane made of golden rows, and what it should be, both [tokens, ...].

    `name` says by which kernel, for which types.
    """

    name: str
    got: NDArray[np.generic]
    expected: NDArray[np.generic]

    def first_difference(self) -> str | None:
        """Where the first other bit is, in words; None where there is none."""
        got, expected = (np.frombuffer(a.tobytes(), np.uint8) for a in (self.got, self.expected))
        if np.array_equal(got, expected):
            return None
        element = int(np.flatnonzero(got != expected)[0]) // self.got.dtype.itemsize
        place = np.unravel_index(element, self.got.shape)
        if self.got.dtype == np.float32:
            return f"row {place[1]} of token {place[0]}"
        return f"the record of token {place[0]}"


REMEDY = (
    "try an empty folder as STRATA_CACHE_DIR; if that does not help, please report it with the "
    "output of strata doctor"
)
"""What to do about a lane that computes otherwise."""


@frozen
class LaneCheck:
    """How a lane passed: the names of what it computed, and of those with other bits.

    `where` says for each of `wrong` where the first other bit is.
    """

    lane: str
    computed: tuple[str, ...]
    wrong: tuple[str, ...]
    where: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every bit was right."""
        return not self.wrong

    @property
    def why(self) -> str:
        """What was wrong, in words."""
        pairs = zip(self.wrong, self.where, strict=True)
        return "other bits came from " + ", ".join(f"{n} (first in {at})" for n, at in pairs)

    def degradations(self, remedy: str = REMEDY) -> tuple[Degradation, ...]:
        """What to report about the lane: nothing where it is exact."""
        if self.exact:
            return ()
        return (
            Degradation(
                what=f"the lane {self.lane} does not compute the golden rows of its self-test",
                why=self.why,
                cost="its tokens may be wrong, and may depend on where experts lie (exact: false)",
                remedy=remedy,
            ),
        )


def check_lane(lane: str, computed: Iterable[Computed]) -> LaneCheck:
    """Compare, bit for bit, what a lane computed; a name may come several times."""
    names: dict[str, None] = {}
    wrong: dict[str, str] = {}
    for one in computed:
        names[one.name] = None
        where = one.first_difference()
        if where is not None:
            wrong.setdefault(one.name, where)
    return LaneCheck(lane, tuple(names), tuple(wrong), tuple(wrong.values()))


@cache
def golden(type_name: str) -> Golden:
    """The small product of a weight type; its arrays are shared and not to be changed."""
    number = list(TYPES).index(type_name)
    size = TOKENS * ROWS
    rows = np.frombuffer(FILE.read_bytes(), "<f4")[number * size : (number + 1) * size]
    return Golden(
        type_name, golden_weight(type_name), golden_activations(), rows.reshape(TOKENS, ROWS)
    )


@cache
def golden_on_units(type_name: str) -> Golden:
    """The same product in the order of matrix units, of a quantised type."""
    weight, x = golden_weight(type_name), golden_activations()
    out = rows_product(type_name, weight, ROWS, COLUMNS, quantise(x))
    return Golden(type_name, weight, x, out)


@cache
def golden_inner(gate: str, up: str, *, units: bool = False) -> Floats:
    """What lies between the two halves of an expert: `silu_mul` of golden rows [TOKENS, ROWS].

    `units`: in the order of matrix units.
    """
    rows = golden_on_units if units else golden
    made: Floats = exact_math.silu(rows(gate).out) * rows(up).out
    return made


def _mixed(count: int, seed: int) -> NDArray[np.uint64]:
    """Whole numbers without a pattern: the finaliser of SplitMix64 (Steele et al. 2014)."""
    n = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    n += np.uint64(seed << 32)
    n = (n ^ (n >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    n = (n ^ (n >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return n ^ (n >> np.uint64(31))


def golden_activations() -> Floats:
    """float32 [TOKENS, COLUMNS]: multiples of 1/256 between -8 and 8."""
    whole = (_mixed(TOKENS * COLUMNS, 1) >> np.uint64(52)).astype(np.int64) - 2048
    made: Floats = (whole.astype(np.float32) / np.float32(256)).reshape(TOKENS, COLUMNS)
    return made


def golden_weight(type_name: str) -> NDArray[np.uint8]:
    """The bytes of ROWS rows of COLUMNS weights: any integers, ordinary scales of both signs."""
    kind = TYPES[type_name]
    blocks = ROWS * COLUMNS // kind.block
    seed = 2 + list(TYPES).index(type_name)
    if kind.block == 1:
        # sign, an exponent of four values from 2^-5 on, any mantissa
        n = _mixed(blocks, seed)
        bits, mantissa, low = {"F32": (32, 23, 122), "F16": (16, 10, 10), "BF16": (16, 7, 122)}[
            type_name
        ]
        exponent = low + ((n >> np.uint64(40)) & np.uint64(3))
        value = (n & np.uint64((1 << mantissa) - 1)) | exponent << np.uint64(mantissa)
        value |= (n >> np.uint64(63)) << np.uint64(bits - 1)
        return value.astype(f"<u{bits // 8}").view(np.uint8)
    raw = (_mixed(blocks * kind.block_bytes, seed) >> np.uint64(56)).astype(np.uint8)
    made = raw.reshape(blocks, kind.block_bytes)
    scales = _mixed(blocks * 2, seed + 100).reshape(2, blocks)
    if type_name == "MXFP4":
        made[:, 0] = 120 + (scales[0] & np.uint64(7)).astype(np.uint8)
        return made.reshape(-1)
    for n, offset in zip(scales, _HALVES.get(type_name, (0,)), strict=False):
        half = np.uint64(0x2000) | (n & np.uint64(0x07FF)) | (n >> np.uint64(63)) << np.uint64(15)
        made[:, offset : offset + 2] = half.astype("<u2")[:, None].view(np.uint8)
    return made.reshape(-1)
