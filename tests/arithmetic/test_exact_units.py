"""The order of products on matrix units: near the contract's, and a row and a token alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact_quant
from strata_core.kernels.exact_quant import Activations, quantise, unpack
from strata_core.kernels.exact_units import BY_HALVES, CENTRED, product, rows_product
from strata_core.kernels.self_test import COLUMNS, ROWS, golden_weight

WIDE = 8 * COLUMNS


def wide_weight(name: str) -> np.ndarray:
    """Four rows of eight golden rows each, one behind the other."""
    return golden_weight(name).reshape(ROWS // 8, -1)


def some(tokens: int, seed: int = 3) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tokens, WIDE)).astype(np.float32)


def blocks_of(name: str) -> exact_quant.Blocks:
    return unpack(name, wide_weight(name), ROWS // 8, WIDE)


def sizes(name: str, x: Activations) -> tuple[np.ndarray, np.ndarray]:
    """The product in float64, and the sum of what is added, without signs."""
    blocks = blocks_of(name)
    total, low = exact_quant.sums(blocks, x)
    terms = total * blocks.d.astype(np.float64) * x.scale[:, None]
    size = np.abs(terms).sum(axis=2)
    if low is not None:
        minima = blocks.sign * low * blocks.m.astype(np.float64) * x.scale[:, None]
        terms, size = terms + minima, size + np.abs(minima).sum(axis=2)
    return terms.sum(axis=2), size


@pytest.mark.parametrize("name", exact_quant.UNPACK)
def test_it_is_as_near_to_the_sums_as_the_contracts_order(name):
    x = quantise(some(5))
    found = rows_product(name, wide_weight(name), ROWS // 8, WIDE, x)
    exactly, size = sizes(name, x)
    # 64 blocks, each of three roundings at most, as a part of what was added
    assert np.all(np.abs(found - exactly) <= 64 * 3 * 2.0**-24 * size)
    contracts = exact_quant.product(blocks_of(name), x)
    far, as_far = (np.sqrt(np.mean(((v - exactly) / size) ** 2)) for v in (found, contracts))
    assert far <= 4 * as_far + 2.0**-24
    assert found.tobytes() != contracts.tobytes()


@given(st.sampled_from(sorted(exact_quant.UNPACK)), st.integers(0, 5), st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_a_token_and_a_row_have_their_bits_alone(name, first, count):
    x, data, rows = some(6), wide_weight(name), ROWS // 8
    whole = rows_product(name, data, rows, WIDE, quantise(x))
    part = rows_product(name, data, rows, WIDE, quantise(x[first : first + count]))
    assert part.tobytes() == whole[first : first + count].tobytes()
    row = rows_product(name, data[1:2], 1, WIDE, quantise(x))
    assert row.tobytes() == whole[:, 1:2].tobytes()


@pytest.mark.parametrize("name", exact_quant.UNPACK)
def test_blocks_of_zeros_change_nothing(name):
    x = quantise(some(3))
    x.scale[:, 5] = 0
    x.q[:, 5], x.sum[:, 5] = 0, 0
    blocks = blocks_of(name)
    keep = np.arange(blocks.w.shape[1]) != 5
    less = exact_quant.Blocks(
        *(None if v is None else v[:, keep] for v in (blocks.w, blocks.scale, blocks.d)),
        *(None if v is None else v[:, keep] for v in (blocks.low, blocks.m)),
        blocks.sign,
    )
    short = Activations(x.q[:, keep], x.scale[:, keep], x.sum[:, keep], finite=True)
    assert product(name, blocks, x).tobytes() == product(name, less, short).tobytes()


def test_the_named_types_are_stored_types():
    assert set(TYPES) >= CENTRED | BY_HALVES
    for name in exact_quant.UNPACK:
        scale = blocks_of(name).scale
        assert (name in BY_HALVES) == bool((scale[..., 0] != scale[..., 1]).any())
