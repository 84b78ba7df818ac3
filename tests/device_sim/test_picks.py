"""Counts of picks are right whenever they are asked for, by any thread."""

from __future__ import annotations

import threading

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from strata_core.kernels.device.picks import TOGETHER, Picks

LAYERS, EXPERTS, ENTRIES = 3, 7, 9
rounds = st.integers(1, ENTRIES).flatmap(
    lambda entries: st.lists(
        st.integers(0, EXPERTS - 1), min_size=LAYERS * entries, max_size=LAYERS * entries
    )
)
steps = st.lists(st.one_of(rounds, st.just("prompt"), st.just("ask")), max_size=3 * TOGETHER)


@given(steps)
def test_every_round_and_prompt_is_counted_once(steps) -> None:
    """Also of rounds of different sizes, and where what a round wrote is written over."""
    written = np.full((LAYERS, ENTRIES), -1, np.int32)
    picks, wanted = Picks(written, EXPERTS), np.zeros(LAYERS * EXPERTS, np.int64)
    for step in steps:
        if step == "ask":
            kept = picks.totals()
            assert (kept == wanted).all()
            kept[:] = -1  # it is the asker's own
        elif step == "prompt":
            picks.add(np.arange(LAYERS * EXPERTS))
            wanted += np.arange(LAYERS * EXPERTS)
        else:
            chosen = np.reshape(step, (LAYERS, -1))
            written[:, : chosen.shape[1]] = chosen
            numbers = picks.numbers(picks.note(chosen.shape[1]))
            written[:] = -1
            asked = [layer * EXPERTS + e for layer, row in enumerate(chosen) for e in row]
            assert (numbers.dtype, numbers.tolist()) == (np.int64, asked)
            np.add.at(wanted, asked, 1)
            numbers[:] = -1  # so are they
    assert (picks.totals() == wanted).all()


def test_who_asks_meanwhile_gets_whole_rounds() -> None:
    picks = Picks(np.array([[0, 1]], np.int32), 2)
    asked, done = threading.Event(), threading.Event()
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
        picks.note(2)
    done.set()
    asking.join()
    assert seen
    assert all(a == b for a, b in seen)
    assert [a for a, _ in seen] == sorted(a for a, _ in seen)
    assert picks.totals().tolist() == [40 * TOGETHER] * 2
