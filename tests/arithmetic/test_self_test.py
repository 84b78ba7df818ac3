"""The rows of the self-test are those of the exact mode, and other bits are noticed."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np
import pytest

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact_math
from strata_core.kernels.dequantise import dequantise
from strata_core.kernels.self_test import (
    COLUMNS,
    FILE,
    ROWS,
    Computed,
    check_lane,
    golden,
    golden_inner,
)

HERE = Path(__file__).parent


def test_the_file_holds_what_the_exact_mode_makes() -> None:
    spec = importlib.util.spec_from_file_location("make_rows", HERE / "make_rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.golden_rows().tobytes() == FILE.read_bytes()


@pytest.mark.parametrize("name", TYPES)
def test_golden_rows_are_products(name: str) -> None:
    """Against an oracle that shares nothing with the exact mode: float64 on dequantised weights."""
    made = golden(name)
    weights = dequantise(name, made.weight, (ROWS, COLUMNS)).astype(np.float64)
    wanted = made.x.astype(np.float64) @ weights.T
    size = np.abs(made.x).astype(np.float64) @ np.abs(weights).T
    assert np.abs(made.out - wanted).max() <= 2e-4 * size.max()
    assert np.isfinite(made.out).all()
    assert len(np.unique(made.out)) == made.out.size


def test_the_inner_rows() -> None:
    wanted = exact_math.silu(golden("Q4_K").out) * golden("F16").out
    assert golden_inner("Q4_K", "F16").tobytes() == wanted.tobytes()


def test_a_bit_that_differs_is_named() -> None:
    right = golden("Q8_0").out
    off = right.copy()
    off[1, 5] = np.nextafter(off[1, 5], np.float32(np.inf))
    check = check_lane(
        "helper",
        [Computed("rows Q8_0", right.copy(), right), Computed("rows Q4_0", off, right)],
    )
    assert not check.exact
    assert check.computed == ("rows Q8_0", "rows Q4_0")
    assert check.wrong == ("rows Q4_0",)
    (item,) = check.degradations()
    assert "lane helper" in item.what
    assert "rows Q4_0" in item.why
    assert "exact: false" in item.cost


def test_a_lane_that_is_right_reports_nothing() -> None:
    right = golden("F32").out
    check = check_lane("cpu", [Computed("linear F32", right.copy(), right)])
    assert check.exact
    assert check.degradations() == ()
