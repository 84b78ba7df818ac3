"""Which runs `strata bench` makes, and what it makes of their times."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from attrs import evolve

from strata_core.engine.bench import Bench, Run, Series
from strata_core.engine.messages import Finished
from strata_core.errors import EngineError

VOCABULARY = 1000


def bench(**changes: int | None) -> Bench:
    asked = {"prompt": 40, "decode": 6, "repeats": 3, "seed": 7, "vocabulary": VOCABULARY}
    return Bench(**{**asked, **changes})


class Recorder:
    """Stands for a model: takes (10 + k) seconds for call k's prompt and k for what follows."""

    def __init__(self, change: Callable[[Finished], Finished] = lambda done: done) -> None:
        self.calls: list[tuple[tuple[int, ...], int]] = []
        self.later: list[tuple[int, ...]] = []
        self.change = change

    def __call__(self, ids: tuple[int, ...], later: tuple[int, ...], tokens: int) -> Finished:
        self.calls.append((ids, tokens))
        self.later.append(later)
        return self.change(
            Finished(
                request="r",
                reason="length",
                text="",
                token_ids=tuple(range(tokens)),
                prompt_tokens=len(ids),
                first_logits_sha256="",
                prompt_s=10.0 + len(self.calls),
                decode_s=float(len(self.calls)) if tokens else 0.0,
                rounds=max(0, tokens - 1),
            )
        )


def test_runs_and_rates() -> None:
    model, seen = Recorder(), []
    prompt, decode = bench().measure(model, lambda *at: seen.append(at))
    assert [(len(ids), n) for ids, n in model.calls] == [(40, 0)] * 4 + [(1, 6)] * 4
    assert [len(ids) for ids in model.later] == [0] * 4 + [5] * 4, "the last token is not fed"
    assert seen == [(k, 8) for k in range(1, 9)]
    # Calls 1 and 5 are not counted; a decode run lasts from its first token to its last.
    assert [run.seconds for run in prompt.runs] == [12, 13, 14]
    assert [run.seconds for run in decode.runs] == [16 + 6, 17 + 7, 18 + 8]
    assert prompt.tok_s == pytest.approx(40 / 13)
    assert prompt.spread == pytest.approx((40 / 14, 40 / 12))
    assert decode.tok_s == pytest.approx(6 / 24)
    assert {run.rounds for run in prompt.runs} == {0}
    assert {(run.tokens, run.rounds) for run in decode.runs} == {(6, 6)}


def test_a_median_of_an_even_number_lies_between() -> None:
    runs = tuple(Run(10, seconds, 1, 1) for seconds in (1.0, 2.0, 4.0, 5.0))
    assert Series("prompt", runs).tok_s == pytest.approx((10 / 2 + 10 / 4) / 2)


def test_ids_follow_from_the_seed() -> None:
    first, again, other = Recorder(), Recorder(), Recorder()
    bench().measure(first)
    bench().measure(again)
    bench(seed=8).measure(other)
    assert first.calls == again.calls
    assert all(a != b for a, b in zip(first.calls[:4], other.calls[:4], strict=True))
    assert len({ids for ids, _ in first.calls[:4]}) == 4, "every run has ids of its own"


def test_ids_are_uniform_over_the_vocabulary() -> None:
    ids = np.array(bench(prompt=20_000).ids("prompt", 1))
    assert ids.min() == 0
    assert ids.max() == VOCABULARY - 1
    tenths = np.bincount(ids * 10 // VOCABULARY)
    assert tenths.min() > 1800
    assert tenths.max() < 2200


def test_the_models_first_token_begins_every_run() -> None:
    model = Recorder()
    bench(first=3).measure(model)
    assert {ids[0] for ids, _ in model.calls} == {3}
    assert len({ids for ids, _ in model.calls[:4]}) == 4
    plain = bench().ids("prompt", 2)
    assert bench(first=3).ids("prompt", 2)[1:] == plain[1:]


def test_distinct_ids_count_what_was_fed() -> None:
    model = Recorder(lambda done: evolve(done, token_ids=(3, 3, 5, 3, 5, 999)))
    (decode,) = bench(prompt=0, first=3, vocabulary=2).measure(model)
    fed = [{*ids, *later} for (ids, _), later in zip(model.calls, model.later, strict=True)]
    assert [run.distinct for run in decode.runs] == [len(ids) for ids in fed[1:]]
    assert all(ids <= {0, 1, 3} for ids in fed), "what is fed is not what was drawn"


def test_a_decode_run_feeds_random_ids() -> None:
    model = Recorder()
    bench(prompt=0, decode=500).measure(model)
    assert len(set(model.later)) == 4, "every run has ids of its own"
    ids = np.array(model.later)
    assert ids.shape == (4, 499)
    assert len(np.unique(ids)) > 700


@pytest.mark.parametrize(
    ("left_out", "calls"), [("prompt", [(1, 6)] * 4), ("decode", [(40, 0)] * 4)]
)
def test_a_kind_is_left_out(left_out: str, calls: list) -> None:
    model = Recorder()
    (only,) = bench(**{left_out: 0}).measure(model)
    assert only.kind != left_out
    assert [(len(ids), n) for ids, n in model.calls] == calls


@pytest.mark.parametrize(
    "change",
    [
        lambda done: evolve(done, reason="cancelled"),
        lambda done: evolve(done, token_ids=done.token_ids[:-1]),
    ],
)
def test_a_run_that_is_cut_short_measures_nothing(change) -> None:
    with pytest.raises(EngineError, match="of 6 tokens"):
        bench(prompt=0).measure(Recorder(change))
