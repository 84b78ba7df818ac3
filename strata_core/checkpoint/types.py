"""The table of weight types: how many weights a block holds and how many bytes it takes.

Numbers and block sizes are those of the GGUF format (ggml's type enumeration). A type's arithmetic
lives with the kernels; here are only its sizes, so that plans and readers need no numpy.
"""

from __future__ import annotations

from attrs import frozen

from strata_core.errors import CheckpointError


@frozen
class WeightType:
    """A storage type: `ggml` is its number in a GGUF file, a block is `block` weights."""

    name: str
    ggml: int
    block: int
    block_bytes: int

    def nbytes(self, elements: int) -> int:
        """Bytes of `elements` weights; a whole number of blocks is required."""
        blocks, rest = divmod(elements, self.block)
        if rest:
            raise CheckpointError(
                f"{elements} weights of type {self.name} are not a whole number of blocks",
                f"a {self.name} block holds {self.block} weights",
                "the file's shapes are inconsistent; convert the model again",
            )
        return blocks * self.block_bytes


TYPES: dict[str, WeightType] = {
    t.name: t
    for t in (
        WeightType("F32", 0, 1, 4),
        WeightType("F16", 1, 1, 2),
        WeightType("Q4_0", 2, 32, 18),
        WeightType("Q4_1", 3, 32, 20),
        WeightType("Q5_0", 6, 32, 22),
        WeightType("Q5_1", 7, 32, 24),
        WeightType("Q8_0", 8, 32, 34),
        WeightType("Q4_K", 12, 256, 144),
        WeightType("Q5_K", 13, 256, 176),
        WeightType("Q6_K", 14, 256, 210),
        WeightType("BF16", 30, 1, 2),
        WeightType("MXFP4", 39, 32, 17),
    )
}
"""Every type Strata computes with, by name."""

BY_GGML: dict[int, WeightType] = {t.ggml: t for t in TYPES.values()}

# Known numbers without kernels, so that the error can say the type's name.
UNSUPPORTED: dict[int, str] = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}
