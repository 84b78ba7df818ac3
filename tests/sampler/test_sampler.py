"""The sampler: filters, penalties, and randomness that depends on seed and position alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.errors import EngineError, UsageError
from strata_core.sampler import Sampling, sample, uniform

LOGITS = np.array([0.0, 3.0, 1.0, 3.0, -2.0], np.float32)


def draw_many(sampling: Sampling, logits: np.ndarray = LOGITS, n: int = 4000) -> np.ndarray:
    counts = np.zeros(len(logits), int)
    for position in range(n):
        counts[sample(logits, sampling, (), position)] += 1
    return counts


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    assert sample(LOGITS, Sampling(), (), 0) == 1


def test_greedy_ignores_the_seed() -> None:
    assert {sample(LOGITS, Sampling(seed=s), (), s) for s in range(50)} == {1}


def test_frequencies_follow_the_softmax() -> None:
    counts = draw_many(Sampling(temperature=1.0, seed=7))
    wanted = np.exp(LOGITS) / np.exp(LOGITS).sum() * counts.sum()
    chi = ((counts - wanted) ** 2 / wanted).sum()
    assert chi < 18.5, f"chi square {chi} over 4 degrees of freedom"  # p = 0.001


def test_temperature_sharpens() -> None:
    cold = draw_many(Sampling(temperature=0.3), np.array([1.0, 0.0], np.float32))
    warm = draw_many(Sampling(temperature=3.0), np.array([1.0, 0.0], np.float32))
    assert cold[0] > warm[0] > warm[1]


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-30, 1e300])
@pytest.mark.parametrize("more", [{}, {"min_p": 0.1}, {"top_p": 0.5}, {"top_k": 2}])
def test_any_temperature_gives_a_token(temperature: float, more: dict[str, float]) -> None:
    logits = np.array([1.0, 3.0, 2.0], np.float32)
    drawn = {sample(logits, Sampling(temperature=temperature, **more), (), p) for p in range(50)}
    assert drawn == {1} if temperature < 1 else drawn <= {0, 1, 2}


@pytest.mark.parametrize(
    ("sampling", "kept", "draws"),
    [
        (Sampling(temperature=1.0, top_k=1), {1}, 200),
        (Sampling(temperature=1.0, top_k=3), {1, 2, 3}, 800),
        (Sampling(temperature=1.0, top_p=0.5), {1, 3}, 200),
        (Sampling(temperature=1.0, top_p=0.01), {1}, 200),
        (Sampling(temperature=1.0, min_p=0.1), {1, 2, 3}, 800),
        (Sampling(temperature=1.0, min_p=1.0), {1, 3}, 200),
        (Sampling(temperature=1.0, top_k=5, top_p=1.0, min_p=0.0), {0, 1, 2, 3, 4}, 4000),
    ],
)
def test_filters_keep_exactly(sampling: Sampling, kept: set[int], draws: int) -> None:
    """As many draws as the rarest of those that are kept needs to be seen."""
    counts = draw_many(sampling, n=draws)
    assert set(np.flatnonzero(counts).tolist()) == kept


def test_the_penalty_divides_positive_and_multiplies_negative_logits() -> None:
    logits = np.array([2.0, 1.5, -1.0, -1.1], np.float32)
    assert sample(logits, Sampling(repetition_penalty=2.0), [0], 5) == 1
    low = np.array([-9.0, -9.0, -1.0, -1.1], np.float32)
    assert sample(low, Sampling(repetition_penalty=2.0), [2], 5) == 3


def test_the_penalty_window_forgets() -> None:
    logits = np.array([2.0, 1.5], np.float32)
    looked = Sampling(repetition_penalty=2.0, repetition_window=1)
    assert sample(logits, looked, [0, 1, 1], 3) == 0
    assert sample(logits, Sampling(repetition_penalty=2.0), [0, 1, 1], 3) == 0
    assert sample(logits, Sampling(repetition_penalty=2.0), [0], 3) == 1


def test_the_logits_are_left_alone() -> None:
    logits = LOGITS.copy()
    sample(logits, Sampling(temperature=0.7, repetition_penalty=1.3), [1, 2], 3)
    assert np.array_equal(logits, LOGITS)


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
@settings(max_examples=200)
def test_a_draw_depends_on_seed_and_position_alone(seed: int, position: int) -> None:
    first = uniform(seed, position)
    uniform(seed ^ 1, position + 1)
    assert 0 <= first < 1
    assert uniform(seed, position) == first


def philox4x64(counter: int, key: int) -> int:
    """First word of Philox4x64-10, written from the paper with Python's own integers."""
    mask = 2**64 - 1
    c, k = [counter, 0, 0, 0], [key, 0]
    for _ in range(10):
        a, b = 0xD2E7470EE14C6C93 * c[0], 0xCA5A826395121157 * c[2]
        c = [(b >> 64) ^ c[1] ^ k[0], b & mask, (a >> 64) ^ c[3] ^ k[1], a & mask]
        k = [(k[0] + 0x9E3779B97F4A7C15) & mask, (k[1] + 0xBB67AE8584CAA73B) & mask]
    return c[0]


@given(seed=st.integers(0, 2**64 - 1), position=st.integers(0, 2**31))
def test_the_random_numbers_are_philox(seed: int, position: int) -> None:
    assert uniform(seed, position) == (philox4x64(position + 1, seed) >> 11) * 2.0**-53


@pytest.mark.parametrize(
    "logits",
    [
        np.array([0.0, np.nan], np.float32),
        np.array([-np.inf, -np.inf], np.float32),
        np.array([0.0, np.inf], np.float32),
    ],
)
def test_logits_that_are_not_finite_are_an_error(logits: np.ndarray) -> None:
    with pytest.raises(EngineError, match="position 3"):
        sample(logits, Sampling(), (), 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_window", -1),
        ("seed", -1),
        ("seed", 2**64),
    ],
)
def test_values_out_of_range_name_the_flag(field: str, value: float) -> None:
    with pytest.raises(UsageError, match="--" + field.replace("_", "-")):
        Sampling(**{field: value})


@given(
    logits=st.lists(
        st.one_of(
            st.floats(width=32, allow_nan=False, allow_infinity=False), st.just(float("-inf"))
        ),
        min_size=1,
        max_size=8,
    ),
    sampling=st.builds(
        Sampling,
        temperature=st.floats(0, allow_infinity=False),
        top_k=st.integers(0, 2**70),
        top_p=st.floats(0, 1, exclude_min=True),
        min_p=st.floats(0, 1),
        repetition_penalty=st.floats(0, exclude_min=True, allow_infinity=False),
        repetition_window=st.integers(0, 2**70),
    ),
    data=st.data(),
)
def test_no_setting_overflows(logits: list[float], sampling: Sampling, data: st.DataObject) -> None:
    """A warning is an error here: none reaches the terminal, and a token is always found."""
    row = np.array([0.0, *logits], np.float32)
    history = data.draw(st.lists(st.integers(0, len(row) - 1), max_size=4))
    assert 0 <= sample(row, sampling, history, 5) < len(row)


def test_the_coldest_temperature_is_greedy() -> None:
    assert {sample(LOGITS, Sampling(temperature=5e-324, seed=s), (), 0) for s in range(20)} <= {
        1,
        3,
    }
