"""The compiled sampler draws the tokens that the plain one draws, for any scores and settings."""

from __future__ import annotations

import builtins

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.errors import EngineError
from strata_core.interfaces import BackendContext
from strata_core.sampler import Sampling, open_sampler, sample
from strata_core.testing.machines import recorded_pc

pytest.importorskip("llvmlite")


def context(options, reports):
    return BackendContext(machine=recorded_pc({}), options=options, degrade=reports.append)


@pytest.fixture(scope="module")
def compiled(compiled_kernels):
    reports = []
    options = {"cache_dir": compiled_kernels.parent}
    made = open_sampler(context(options, reports))
    assert reports == []
    assert made is not sample
    return made


@st.composite
def score_rows(draw):
    """Rows with many equal scores, some of minus infinity, zeros of both signs, huge ones."""
    count = draw(st.integers(1, 300))
    numbers = np.random.default_rng(draw(st.integers(0, 2**32)))
    row = numbers.standard_normal(count) * draw(st.sampled_from([0.3, 3, 40, 1e37]))
    if draw(st.booleans()):
        row = np.copysign(np.round(row), numbers.choice([-1, 1], count))
    row[numbers.random(count) < draw(st.sampled_from([0, 0.3]))] = -np.inf
    row[draw(st.integers(0, count - 1))] = draw(st.sampled_from([0.0, -0.0, 2.5]))
    return row.astype(np.float32)


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.one_of(
        st.floats(0, allow_infinity=False), st.sampled_from([0.0, 0.7, 1.0, 5e-324, 1e-30])
    ),
    top_k=st.one_of(st.just(0), st.integers(1, 320), st.integers(0, 2**70)),
    top_p=st.one_of(st.just(1.0), st.floats(0, 1, exclude_min=True)),
    min_p=st.one_of(st.just(0.0), st.floats(0, 1)),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.5, 1e300]),
    repetition_window=st.sampled_from([0, 2]),
    seed=st.integers(0, 2**64 - 1),
)


@given(row=score_rows(), sampling=SAMPLINGS, data=st.data())
@settings(max_examples=400, deadline=None)
def test_the_compiled_sampler_is_the_plain_one(compiled, row, sampling, data):
    history = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=4))
    position = data.draw(st.integers(0, 2**31))
    before = row.copy()
    assert compiled(row, sampling, history, position) == sample(row, sampling, history, position)
    assert row.tobytes() == before.tobytes()


@pytest.mark.parametrize("size", [1, 7, 8, 63, 64, 65, 200, 151_936])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.8, seed=3),
        Sampling(temperature=1.2, top_k=40),
        Sampling(temperature=0.7, top_p=0.9, min_p=0.02, seed=2**64 - 1),
    ],
)
def test_sizes(compiled, size, sampling):
    row = (np.random.default_rng(size).standard_normal(size) * 4).astype(np.float32)
    for position in range(3):
        assert compiled(row, sampling, (), position) == sample(row, sampling, (), position)


@pytest.mark.parametrize("size", [5, 8, 21])
@pytest.mark.parametrize("at", [0, 3, -1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1.0, 2.0])
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf])
def test_scores_that_are_not_finite_are_an_error(compiled, size, at, temperature, penalty, bad):
    row = np.ones(size, np.float32)
    row[at] = bad
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    for draw in (sample, compiled):
        with pytest.raises(EngineError, match="position 3"):
            draw(row, sampling, (0,), 3)


def test_no_finite_score_is_an_error(compiled):
    with pytest.raises(EngineError, match="position 9"):
        compiled(np.full(20, -np.inf, np.float32), Sampling(), (), 9)


@pytest.mark.parametrize("ties", [(0, 1), (7, 8, 9), (12, 40), (64, 65)])
def test_greedy_takes_the_lowest_id_among_equals(compiled, ties):
    row = np.zeros(70, np.float32)
    row[list(ties)] = 1.5
    assert compiled(row, Sampling(), (), 0) == ties[0]
    row[:] = -0.0
    row[3] = 0.0
    assert compiled(row, Sampling(), (), 0) == 0


def test_a_processor_of_2003_draws_the_same_tokens(compiled):
    from strata_core.kernels.cpu.jit import Compiler
    from strata_core.kernels.cpu.sampling import CompiledDraw
    from strata_core.kernels.cpu.target import Target, host_target

    host = host_target()
    if not host.triple.startswith("x86_64"):
        pytest.skip("not an x86-64 machine")
    old = CompiledDraw(
        Compiler(Target("portable", host.triple, "x86-64", frozenset()), None, print)
    )
    row = (np.random.default_rng(2).standard_normal(700) * 4).astype(np.float32)
    for position in range(40):
        sampling = Sampling(temperature=0.9, top_k=90, top_p=0.93, seed=11)
        token = old(row, 0.9, 90, 0.93, 0, 11, position)
        assert token == compiled(row, sampling, (), position)


def test_frequencies_follow_the_softmax(compiled):
    row = np.array([0.0, 3.0, 1.0, 3.0, -2.0], np.float32)
    draws = [compiled(row, Sampling(temperature=1.0, seed=7), (), p) for p in range(4000)]
    counts = np.bincount(draws, minlength=5)
    wanted = np.exp(row) / np.exp(row).sum() * 4000
    chi = ((counts - wanted) ** 2 / wanted).sum()
    assert chi < 18.5, f"chi square {chi} over 4 degrees of freedom"  # p = 0.001


def test_a_row_of_a_larger_array_and_other_types_of_floats(compiled):
    rows = np.random.default_rng(0).standard_normal((3, 50)).astype(np.float32)
    column = np.asfortranarray(rows)[1]
    hot = Sampling(temperature=2.0)
    assert compiled(column, hot, (), 5) == compiled(rows[1], hot, (), 5)


def test_without_the_compiler_the_plain_one_serves_and_says_so(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **more):
        if name.startswith("strata_core.kernels.cpu"):
            raise ImportError("No module named 'llvmlite'")
        return real(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    reports = []
    assert open_sampler(context({}, reports)) is sample
    assert "llvmlite" in reports[0].why
    assert reports[0].remedy == "pip install llvmlite"
