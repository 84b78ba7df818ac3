"""The compiled sampler draws the tokens that the plain one draws, for any scores and settings."""

from __future__ import annotations

import builtins
from fractions import Fraction

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


@pytest.mark.parametrize("ties", [(0, 1), (7, 8, 9), (12, 40), (31, 32), (63, 64), (64, 65), (69,)])
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
    for temperature in (0.0, 0.9):
        sampling = Sampling(temperature=temperature, top_k=90, top_p=0.93, seed=11)
        old.settle(temperature, 90, 0.93, 0, 11)
        for position in range(40):
            assert old(row, position) == compiled(row, sampling, (), position)


@given(
    calls=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), min_size=2, max_size=12),
    samplings=st.lists(SAMPLINGS, min_size=4, max_size=4),
    rows=st.lists(score_rows(), min_size=3, max_size=3),
)
@settings(max_examples=60, deadline=None)
def test_nothing_of_an_earlier_call_is_left(compiled, calls, samplings, rows):
    """Requests take turns: other settings, other lengths, other arrays."""
    for position, (which, row) in enumerate(calls):
        sampling, scores, history = samplings[which], rows[row].copy(), [0]
        wanted = sample(scores, sampling, history, position)
        assert compiled(scores, sampling, history, position) == wanted


def test_equal_settings_of_another_record_and_other_numbers_of_the_same_array(compiled):
    row = np.zeros(40, np.float32)
    for position in range(8):
        row[:] = 0
        row[5 * position] = 60
        assert compiled(row, Sampling(temperature=1.0), (), position) == 5 * position


def test_settings_that_cannot_be_taken_leave_nothing_behind(compiled):
    row = np.array([1, 4, 2], np.float32)
    hot = Sampling(temperature=4.0, seed=5)
    drawn = [sample(row, hot, (), position) for position in range(60)]
    assert set(drawn) == {0, 1, 2}
    assert [compiled(row, hot, (), position) for position in range(30)] == drawn[:30]
    with pytest.raises(OverflowError):
        compiled(row, Sampling(temperature=10**400), (), 30)
    assert [compiled(row, hot, (), position) for position in range(30, 60)] == drawn[30:]


def test_an_error_is_of_its_call_alone(compiled):
    row = np.array([1, 4, 2], np.float32)
    for bad in (np.nan, np.inf):
        with pytest.raises(EngineError, match="position 1"):
            compiled(np.array([bad, 1], np.float32), Sampling(), (), 1)
        assert compiled(row, Sampling(), (), 2) == 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=Fraction(3, 2), top_p=Fraction(9, 10), seed=np.uint64(2**64 - 1)),
        Sampling(temperature=np.float32(1.5), top_k=np.int64(9), min_p=np.float64(0.01)),
        Sampling(temperature=2, top_k=2**200),
    ],
)
def test_settings_of_any_kind_of_number(compiled, sampling):
    row = np.random.default_rng(1).standard_normal(90).astype(np.float32)
    as_python = Sampling(
        temperature=float(sampling.temperature),
        top_k=int(sampling.top_k),
        top_p=float(sampling.top_p),
        min_p=float(sampling.min_p),
        seed=int(sampling.seed),
    )
    for position in range(20):
        wanted = sample(row, as_python, (), position)
        assert compiled(row, sampling, (), position) == wanted


@pytest.mark.parametrize("penalty", [1.0, 1.3])
@pytest.mark.parametrize("temperature", [0.0, 1.5])
def test_arrays_of_any_form(compiled, temperature, penalty):
    rows = np.random.default_rng(3).standard_normal((4, 70)).astype(np.float32)
    sampling = Sampling(temperature=temperature, repetition_penalty=penalty)
    fixed = rows[1].copy()
    fixed.flags.writeable = False
    forms = [
        rows[1],
        fixed,
        np.frombuffer(rows[1].tobytes(), np.float32),
        rows[1].astype(np.float64),
        np.asfortranarray(rows)[1],
        np.repeat(rows[1], 2)[::2],
        rows[1][::-1].copy()[::-1],
        np.append(rows, rows[1])[-70:],
    ]
    for position in range(10):
        wanted = sample(rows[1], sampling, (4, 5), position)
        assert {compiled(form, sampling, (4, 5), position) for form in forms} == {wanted}


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
