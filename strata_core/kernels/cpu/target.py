"""The instruction set that kernels are made for, and the few operations that depend on it.

Three variants: `vnni` (AVX2 with a 16-bit dot product that accumulates), `avx2` (with FMA and
half-precision conversion) and `portable` (LLVM picks the instructions of whatever host there is).
All give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import llvmlite.binding as llvm
from attrs import frozen
from llvmlite import ir

from strata_core.errors import UsageError
from strata_core.kernels.cpu.emit import F16, F32X8, I8, I16, I16X16, I32, I32X8, Emit, V, vec

Variant = Literal["vnni", "avx2", "portable"]
VARIANTS: tuple[Variant, ...] = get_args(Variant)
"""Best first."""

_AVX2 = {"avx2", "fma", "f16c"}

HALVES, I16X8 = vec(F16, 8), vec(I16, 8)


@frozen
class Target:
    """A processor and the variant of kernels made for it; `features` as LLVM names them."""

    variant: Variant
    triple: str
    cpu: str
    features: frozenset[str]

    @property
    def has_fma(self) -> bool:
        """False where fma is a call of the C library: same bits, many times slower."""
        return "fma" in self.features or not self.triple.startswith(("x86_64", "i"))

    @property
    def shuffles_bytes(self) -> bool:
        """Whether sixteen bytes can be looked up at once."""
        return self.variant != "portable"

    @property
    def feature_string(self) -> str:
        """Features as LLVM's command line takes them."""
        return ",".join(f"+{name}" for name in sorted(self.features))

    def pair_dot(self, e: Emit, acc: V | None, w: V, x: V) -> V:
        """acc + w[2i] * x[2i] + w[2i+1] * x[2i+1]: sixteen int16 each, eight int32 out."""
        if self.variant == "vnni":
            start = acc or e.const(I32X8, 0)
            words = [v.bits(I32X8) for v in (w, x)]
            return e.call("llvm.x86.avx512.vpdpwssd.256", I32X8, start, *words)
        if self.variant == "avx2":
            pairs = e.call("llvm.x86.avx2.pmadd.wd", I32X8, w, x)
        else:
            products = w.sext(vec(I32, 16)) * x.sext(vec(I32, 16))
            even = products.shuffle(None, range(0, 16, 2))
            pairs = even + products.shuffle(None, range(1, 16, 2))
        return pairs if acc is None else acc + pairs

    def opaque(self, e: Emit, value: V) -> V:
        """The same vector, hidden from the optimiser.

        LLVM would mask bytes before widening them, which doubles the widening instructions.
        """
        if self.variant == "portable":
            return value
        kind = ir.FunctionType(value.type, [value.type])
        return V(e, e.b.asm(kind, "", "=x,0", [value.raw], side_effect=False))

    def widen(self, e: Emit, halves: V) -> V:
        """Eight halves, given as int16, as floats; exact, denormals and infinities included."""
        if self.variant != "portable":
            return V(e, e.b.fpext(halves.bits(HALVES).raw, F32X8))
        bits = halves.zext(I32X8)
        magnitude = (bits & 0x7FFF) << 13
        # 2^112 moves the exponent's bias; a denormal half becomes normal by the same product
        finite = (magnitude.bits(F32X8) * 2.0**112).bits(I32X8)
        special = magnitude | 0x7F800000
        value = e.select((bits & 0x7C00).compare("==", 0x7C00), special, finite)
        return (value | ((bits & 0x8000) << 16)).bits(F32X8)

    def narrow(self, e: Emit, floats: V) -> V:
        """Eight floats as halves (int16), to nearest even; overflow is an infinity."""
        if self.variant != "portable":
            half = V(e, e.b.fptrunc(floats.raw, HALVES))
            return half.bits(I16X8)
        return _narrow_by_integers(e, floats)

    def look_up(self, e: Emit, table: Sequence[int], words: V) -> V:
        """Each byte of sixteen words, all below 16, replaced by the table's byte of that number."""
        bytes_ = vec(I8, 32)
        whole = e.const(bytes_, [*table, *table])
        return e.call("llvm.x86.avx2.pshuf.b", bytes_, whole, words.bits(bytes_)).bits(I16X16)


def _narrow_by_integers(e: Emit, floats: V) -> V:
    """Float to half with integer operations, for hosts without the instruction."""
    bits = floats.bits(I32X8)
    sign = (bits >> 16) & 0x8000
    size = bits & 0x7FFFFFFF
    # normal halves: rebias, add just under half a unit plus the lowest kept bit, cut
    odd = (size >> 13) & 1
    normal = ((size - 0x38000000) + 0xFFF + odd) >> 13
    # denormal halves: adding 0.5 lets the float adder round at the right place
    tiny = (size.bits(F32X8) + 0.5).bits(I32X8) - 0x3F000000
    value = e.select(size < 0x38800000, tiny, normal)
    value = e.select(size >= 0x477FF000, e.const(I32X8, 0x7C00), value)
    value = e.select(size > 0x7F800000, e.const(I32X8, 0x7E00), value)
    return (value | sign).trunc(I16X8)


def usable_variants(features: frozenset[str], triple: str) -> tuple[Variant, ...]:
    """The variants that a processor with these features can run, best first."""
    if not triple.startswith("x86_64") or not features >= _AVX2:
        return ("portable",)
    vnni = {"avx512vnni", "avx512vl"} <= features or "avxvnni" in features
    return ("vnni", "avx2", "portable") if vnni else ("avx2", "portable")


def host_target(variant: str | None = None) -> Target:
    """This machine with its best variant, or with the one named.

    Raises UsageError where the processor cannot run the named one.
    """
    features = frozenset(k for k, on in llvm.get_host_cpu_features().items() if on)
    triple = llvm.get_process_triple()
    usable = usable_variants(features, triple)
    chosen = next((v for v in VARIANTS if v == variant), None) if variant else usable[0]
    if chosen is None or chosen not in usable:
        raise UsageError(
            f"the kernel variant {variant} cannot be used",
            f"this processor runs {', '.join(usable)}",
            "leave the variant out to get the best one",
        )
    return Target(chosen, triple, llvm.get_host_cpu_name(), features)
