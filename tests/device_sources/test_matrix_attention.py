"""Attention on matrix units, its source run on the host: near float64, and rows that are alone.

One product of a unit is summed there in plain floats: what is checked holds for any order in it.
All cases run with `python tests/device/check_kernels.py --on host --only matrix_attention`.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))

from host_build import HostBuild, host_compiler
from kernel_bench import Bench, Buffer, difference
from late import is_late, run_late
from matrix_attention_cases import FAR, far, in_float64, matrix_attention_cases, problem

from strata_core.testing.sim import SimHardware

pytestmark = pytest.mark.skipif(host_compiler() is None, reason="there is no C++ compiler")

KINDS = (("fp16", 32), ("fp16", 80), ("fp16", 128), ("int8", 64), ("int8", 96))
CASES = [
    case
    for number, kind in enumerate(KINDS)
    for place, case in enumerate(matrix_attention_cases(*kind))
    if (place + number) % 3 == 0 or place == 2 or "rising" in case.label
]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    return HostBuild([case.key for case in CASES], tmp_path_factory.mktemp("compiled"))


@pytest.fixture(scope="module")
def bench(built):
    runtime = built.runtime(SimHardware(matrix=True))
    yield Bench(runtime, planes=True)
    runtime.close()


@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.label} {case.key.parameters}")
def test_it_is_near_and_a_token_has_one_set_of_bits(bench, case):
    assert problem(case, lambda it: bench.run(it)["out"], np.random.default_rng(5)) == ""


@pytest.mark.parametrize("kv", ["fp16", "int8"])
def test_nothing_of_the_launch_before_is_read_before_the_wait(bench, built, kv):
    cases = [case for case in CASES if kv in case.key.parameters and is_late(case)]
    case = min(cases, key=lambda case: case.buffers["q"].data.size)
    assert difference(bench.run(case), run_late(bench, built, case)) == ""


def test_what_is_far_and_what_depends_on_others_is_told(bench):
    case = next(case for case in CASES if len(case.buffers["q"].data) > 3)
    rng = np.random.default_rng(6)
    wrong = in_float64(case).astype(np.float32)
    wrong[1] += 4
    assert "away from float64" in problem(case, lambda _: wrong, rng)

    def by_place(it):
        out = bench.run(it)["out"].copy()
        out[0] = np.nextafter(out[0], np.float32(9))
        return out

    assert "elements differ" in problem(case, by_place, rng)


@pytest.mark.parametrize("size", [1e-6, 1.0, 300.0])
def test_weights_keep_their_share_whatever_the_scores_are(bench, size):
    """Scores that are all alike, and scores of which one has all of the weight."""
    case = next(case for case in CASES if len(case.buffers["q"].data) > 3)
    q = case.buffers["q"].data * np.float32(size)
    case = type(case)(**{**fields(case), "buffers": {**case.buffers, "q": Buffer(q)}})
    assert far(case, bench.run(case)["out"]) < FAR * max(1, size / 10)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 1e30])
def test_what_is_no_number_or_no_half_is_none_in_the_end(bench, wrong):
    """So that the product behind latches it; other tokens keep their bits."""
    for case in (next(c for c in CASES if kv in c.key.parameters) for kv in ("fp16", "int8")):
        q = case.buffers["q"].data.copy()
        q[1, 0, 3] = wrong
        spoilt = type(case)(**{**fields(case), "buffers": {**case.buffers, "q": Buffer(q)}})
        good, bad = bench.run(case)["out"], bench.run(spoilt)["out"]
        assert not np.isfinite(bad[1, 0]).any()
        bad[1, 0] = good[1, 0]
        assert bad.tobytes() == good.tobytes()


def fields(case):
    return {name: getattr(case, name) for name in ("label", "key", "args", "looks", "links")}
