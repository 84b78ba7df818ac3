"""Counts of picks are right whenever they are asked for, by any thread."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_core.kernels.device.picks import TOGETHER, Picks

EXPERTS = 7
rounds = st.lists(st.integers(0, EXPERTS - 1), min_size=1, max_size=9)
steps = st.lists(st.one_of(rounds, st.just("prompt"), st.just("ask")), max_size=3 * TOGETHER)


@given(steps)
def test_every_round_and_prompt_is_counted_once(steps) -> None:
    picks, wanted = Picks(EXPERTS), np.zeros(EXPERTS, np.int64)
    for step in steps:
        if step == "ask":
            kept = picks.totals()
            assert (kept == wanted).all()
            kept[:] = -1  # it is the asker's own
        elif step == "prompt":
            picks.add(np.arange(EXPERTS))
            wanted += np.arange(EXPERTS)
        else:
            picks.note(np.array(step, np.int64))
            np.add.at(wanted, step, 1)
    assert (picks.totals() == wanted).all()


def test_who_asks_meanwhile_gets_whole_rounds() -> None:
    picks, asked, done = Picks(2), threading.Event(), threading.Event()
    seen: list[tuple[int, int]] = []

    def ask() -> None:
        while not done.is_set():
            a, b = picks.totals().tolist()
            seen.append((a, b))
            asked.set()

    asking = threading.Thread(target=ask)
    asking.start()
    assert asked.wait(60), "nobody asks"
    for _ in range(40 * TOGETHER):
        picks.note(np.array([0, 1], np.int64))
    done.set()
    asking.join()
    assert seen
    assert all(a == b for a, b in seen)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    assert picks.totals().tolist() == [40 * TOGETHER] * 2
