"""From the stored bytes of eight blocks to integers and scales, one `Unpack` per weight type.

`w` yields one block of 32 as two vectors of sixteen int16 in the order of the weights. They are the
weights of docs/arithmetic.md but for what is cheaper to settle once for eight blocks: where `bias`
is not 0 the sum still lacks `-bias * sum(q)`; odd blocks may come multiplied by 2^odd_shift (their
nibbles stay where they lie); Q6_K comes multiplied by its scales. All sums still fit int32, and so
are exact. Scales come as vectors of eight, one lane a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from attrs import frozen

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.cpu.emit import F32, F32X8, I8, I16, I16X16, I32, I32X8, I64, Emit, V, vec
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.exact_quant import MXFP4_VALUES

I8X16 = vec(I8, 16)
I8X8 = vec(I8, 8)
FIFTH_BITS = [1 << i for i in range(15)] + [-(1 << 15)]
"""Bit i of a 16-bit word, as signed constants."""


@frozen
class Scales:
    """What eight blocks are scaled by, eight lanes each; None where the type has no such thing.

    `scale` int32 multiplies the integer sum, `low` int32 the activation sum; `d` and `m` are float.
    """

    d: V
    m: V | None = None
    scale: V | None = None
    low: V | None = None


Context = Any
"""What `open` computes once per eight blocks and hands to `w` and `scales`."""


@frozen
class Unpack:
    """How one type is taken apart. `open(e, target, p)` comes first; `p` is where 8 blocks lie."""

    open: Callable[[Emit, Target, V], Context]
    w: Callable[[Emit, Target, Context, int], tuple[V, V]]
    scales: Callable[[Emit, Target, Context], Scales]
    bias: int = 0
    sign: int = 0
    odd_shift: int = 0

    def sums(self, e: Emit, total: V) -> V:
        """The blocks' sums of eight lanes, without the factor that odd blocks still carry."""
        if not self.odd_shift:
            return total
        return total.sar(e.const(I32X8, [0, self.odd_shift] * 4))

    def value(self, e: Emit, scales: Scales, block: int, ints: V) -> V:
        """Single weights of a block as floats, from eight of its integers as int32."""
        if self.bias:
            ints = ints - self.bias
        if self.odd_shift and block % 2:
            ints = ints.sar(self.odd_shift)
        if scales.scale is not None:
            ints = ints * e.splat(scales.scale[block])
        # products of half scales and these integers are exact, or (Q6_K) rounded here once
        product = e.splat(scales.d[block]) * ints.to_float()
        if scales.m is None:
            return product
        low = scales.m[block]
        if scales.low is not None:
            low = low * scales.low[block].to_float(F32)
        return product - e.splat(low) if self.sign < 0 else product + e.splat(low)


def _address(e: Emit, target: Target, p: V) -> V:
    del e, target
    return p


def _nibbles(e: Emit, target: Target, p: V, offset: int) -> tuple[V, V]:
    """Low and high nibbles of 16 bytes, each as sixteen int16."""
    n = target.opaque(e, e.load(I8X16, p, offset).zext(I16X16))
    return n & 15, n >> 4


# --- blocks of 32 ------------------------------------------------------------------------------


def _halves(e: Emit, target: Target, p: V, stride: int, offset: int = 0) -> V:
    words = e.vector([e.load(I16, p, b * stride + offset) for b in range(8)])
    return target.widen(e, words)


def _simple(
    name: str, w: Callable[..., tuple[V, V]], bias: int = 0, *, low: bool = False
) -> Unpack:
    stride = TYPES[name].block_bytes

    def block(e: Emit, target: Target, p: V, b: int) -> tuple[V, V]:
        return w(e, target, p, b * stride)

    def scales(e: Emit, target: Target, p: V) -> Scales:
        m = _halves(e, target, p, stride, 2) if low else None
        return Scales(_halves(e, target, p, stride), m)

    return Unpack(_address, block, scales, bias, 1 if low else 0)


def _q8_0(e: Emit, target: Target, p: V, at: int) -> tuple[V, V]:
    del target
    first, second = e.load(I8X16, p, at + 2), e.load(I8X16, p, at + 18)
    return first.sext(I16X16), second.sext(I16X16)


def _q4_0(e: Emit, target: Target, p: V, at: int) -> tuple[V, V]:
    return _nibbles(e, target, p, at + 2)


def _q4_1(e: Emit, target: Target, p: V, at: int) -> tuple[V, V]:
    return _nibbles(e, target, p, at + 4)


def _with_fifth(e: Emit, low: V, p: V, offset: int, if_set: int, if_clear: int) -> V:
    """Nibbles joined with `if_set` or `if_clear` as bit i of the 16-bit word at `offset` says."""
    bits = e.splat(e.load(I16, p, offset), 16) & e.const(I16X16, FIFTH_BITS)
    clear = bits.compare("==", 0)
    return low | e.select(clear, e.const(I16X16, if_clear), e.const(I16X16, if_set))


def _q5_0(e: Emit, target: Target, p: V, at: int) -> tuple[V, V]:
    first, second = _nibbles(e, target, p, at + 6)
    # n - 16 with the fifth bit set, else the nibble below zero: -16 | nibble
    return _with_fifth(e, first, p, at + 2, 0, -16), _with_fifth(e, second, p, at + 4, 0, -16)


def _q5_1(e: Emit, target: Target, p: V, at: int) -> tuple[V, V]:
    first, second = _nibbles(e, target, p, at + 8)
    return _with_fifth(e, first, p, at + 4, 16, 0), _with_fifth(e, second, p, at + 6, 16, 0)


MXFP4_TABLE = [int(v) + 12 for v in MXFP4_VALUES]
"""Values that are not negative, by nibble."""

MXFP4_BIAS = MXFP4_TABLE[0] * 256 + 12
"""A word's upper byte, which is 0, is looked up as well; both offsets are settled with the sums."""


def _mxfp4_value(e: Emit, n: V) -> V:
    """Twice the E2M1 value of a nibble: 0 1 2 3 4 6 8 12, negative from 8 on."""
    size = n & 7
    above = e.smax(size - 4, e.const(I16X16, 0))
    extra = e.select(size.compare("==", 7), e.const(I16X16, 2), e.const(I16X16, 0))
    value = size + above + extra
    return e.select(n > 7, -value, value)


def _mxfp4(e: Emit, target: Target, p: V, b: int) -> tuple[V, V]:
    first, second = _nibbles(e, target, p, b * TYPES["MXFP4"].block_bytes + 1)
    if target.shuffles_bytes:
        return target.look_up(e, MXFP4_TABLE, first), target.look_up(e, MXFP4_TABLE, second)
    return _mxfp4_value(e, first) + MXFP4_BIAS, _mxfp4_value(e, second) + MXFP4_BIAS


def _mxfp4_scales(e: Emit, target: Target, p: V) -> Scales:
    del target
    stride = TYPES["MXFP4"].block_bytes
    exponent = e.vector([e.load(I8, p, b * stride) for b in range(8)]).zext(I32X8)
    # 2^(e-128): the bits of a normal number from e = 2 on, of a denormal before
    small = e.const(I32X8, 0x00200000) << e.smin(exponent, e.const(I32X8, 1))
    bits = e.select(exponent >= 2, (exponent - 1) << 23, small)
    # 255 stands for no number: as an infinity it makes the row, and so the next records, not finite
    bits = e.select(exponent.compare("==", 255), e.const(I32X8, 0x7F800000), bits)
    return Scales(bits.bits(F32X8))


# --- superblocks of 256 ------------------------------------------------------------------------


@frozen
class _Super:
    """A superblock with the parts that several of its blocks share, loaded at first use."""

    p: V
    shared: dict[str, V]

    def once(self, key: str, make: Callable[[], V]) -> V:
        """`make()`, but only the first time for a key."""
        if key not in self.shared:
            self.shared[key] = make()
        return self.shared[key]


def _open_super(e: Emit, target: Target, p: V) -> _Super:
    del e, target
    return _Super(p, {})


def _wide(e: Emit, target: Target, s: _Super, offset: int) -> V:
    """Sixteen bytes as sixteen int16."""

    def make() -> V:
        return target.opaque(e, e.load(I8X16, s.p, offset).zext(I16X16))

    return s.once(f"wide {offset}", make)


def _k_nibbles(e: Emit, target: Target, s: _Super, b: int, offset: int) -> tuple[V, V]:
    """Nibbles of a block; those of odd blocks are high ones and stay there, 16 times too large."""
    first, second = (
        _wide(e, target, s, offset + b // 2 * 32 + part) & (0xF0 if b % 2 else 0x0F)
        for part in (0, 16)
    )
    return first, second


def _q4_k(e: Emit, target: Target, s: _Super, b: int) -> tuple[V, V]:
    return _k_nibbles(e, target, s, b, 16)


def _q5_k(e: Emit, target: Target, s: _Super, b: int) -> tuple[V, V]:
    place = 8 if b % 2 else 4
    joined = []
    for part, low in zip((0, 16), _k_nibbles(e, target, s, b, 48), strict=True):
        h = _wide(e, target, s, 16 + part)
        moved = h << (place - b) if b <= place else h >> (b - place)
        joined.append(low | (moved & (1 << place)))
    return joined[0], joined[1]


def _k_scales(e: Emit, target: Target, s: _Super) -> Scales:
    """The 12 bytes of scales as two words of eight bytes: scales 0-3, minimums 0-3; then 4-7."""
    first, last = e.load(I64, s.p, 4), e.load(I32, s.p, 12).zext(I64)
    low = first & 0x3F3F3F3F3F3F3F3F
    # the low nibbles of the last four bytes belong to scales, the high ones to minimums
    four = (last | (last << 28)) & 0x0F0F0F0F0F0F0F0F
    high = four | ((first >> 2) & 0x3030303030303030)
    dwords = [e.splat(word, 2).bits(vec(I32, 4)) for word in (low, high)]
    sixteen = dwords[0].shuffle(dwords[1], [0, 4, 1, 5]).bits(I8X16)
    scale, minimum = (sixteen.shuffle(None, range(n, n + 8)).zext(I32X8) for n in (0, 8))
    both = e.splat(e.load(I16, s.p)), e.splat(e.load(I16, s.p, 2))
    d, m = (target.widen(e, half) for half in both)
    return Scales(d, m, scale, minimum)


def _q6_k(e: Emit, target: Target, s: _Super, b: int) -> tuple[V, V]:
    group, k = divmod(b, 4)
    scaled = []
    for part in range(2):
        four = _wide(e, target, s, 64 * group + 32 * (k & 1) + 16 * part)
        four = four >> 4 if k >= 2 else four & 15
        two = _wide(e, target, s, 128 + 32 * group + 16 * part)
        two = (two << (4 - 2 * k) if k <= 2 else two >> 2) & 0x30
        scales = s.once("scales", lambda: e.load(I8X16, s.p, 192).sext(I16X16))
        scale = scales.shuffle(None, [2 * b + part] * 16)
        scaled.append(((four | two) - 32) * scale)
    return scaled[0], scaled[1]


def _q6_k_scales(e: Emit, target: Target, s: _Super) -> Scales:
    return Scales(target.widen(e, e.splat(e.load(I16, s.p, 208))))


UNPACK: dict[str, Unpack] = {
    "Q8_0": _simple("Q8_0", _q8_0),
    "Q4_0": _simple("Q4_0", _q4_0, bias=8),
    "Q4_1": _simple("Q4_1", _q4_1, low=True),
    "Q5_0": _simple("Q5_0", _q5_0),
    "Q5_1": _simple("Q5_1", _q5_1, low=True),
    "MXFP4": Unpack(_address, _mxfp4, _mxfp4_scales, bias=MXFP4_BIAS),
    "Q4_K": Unpack(_open_super, _q4_k, _k_scales, sign=-1, odd_shift=4),
    "Q5_K": Unpack(_open_super, _q5_k, _k_scales, sign=-1, odd_shift=4),
    "Q6_K": Unpack(_open_super, _q6_k, _q6_k_scales),
}
"""Every quantised type by name."""

GROUP_BYTES = {name: TYPES[name].block_bytes * 256 // TYPES[name].block for name in UNPACK}
"""Bytes of eight blocks of 32."""
