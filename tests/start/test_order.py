"""The order of a start: what a policy and STRATA_EARLY_REMOTE_CONTEXTS make of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.start.order import DOING, Step, start_order
from strata_core.interfaces import StartPolicy

PLAIN = StartPolicy()
WSL = StartPolicy(contexts_first=True, small_pins_first=True)


def told(policy: StartPolicy, early: bool | None, helpers: int) -> list[str]:
    return [
        f"{step.phase} {','.join(map(str, step.devices))}"
        for step in start_order(policy, early, helpers)
    ]


PLACED = ["dense weights 0", "embedding 0"]


def test_the_plain_order_opens_one_helper_early_and_the_others_late() -> None:
    assert told(PLAIN, None, 3) == [
        "contexts 0", "contexts 1", "small pins 0,1,2,3", "self-test 0,1", *PLACED,
        "slots 0,1", "bulk 0", "expert cache 0", "contexts 2", "contexts 3",
        "helper caches 1,2,3", "bind 0",
    ]  # fmt: skip


@pytest.mark.parametrize(("policy", "early"), [(WSL, None), (WSL, True), (PLAIN, True)])
def test_contexts_come_first_where_the_policy_or_the_user_asks(policy, early) -> None:
    assert told(policy, early, 2) == [
        "contexts 0", "contexts 1", "contexts 2", "small pins 0,1,2",
        "self-test 0,1,2", *PLACED, "slots 0,1,2", "bulk 0", "expert cache 0",
        "helper caches 1,2", "bind 0",
    ]  # fmt: skip


def test_the_user_can_force_the_old_order() -> None:
    assert told(WSL, False, 2) == told(PLAIN, None, 2)


def test_small_buffers_can_come_after_the_bulk() -> None:
    assert told(StartPolicy(small_pins_first=False), None, 0) == [
        "contexts 0", "bulk 0", "small pins 0", "self-test 0", *PLACED, "slots 0",
        "expert cache 0", "bind 0",
    ]  # fmt: skip


@given(st.booleans(), st.booleans(), st.sampled_from([None, True, False]), st.integers(0, 3))
def test_every_order_has_every_step_once_and_no_use_before_its_context(
    contexts, small, early, helpers
) -> None:
    steps = start_order(
        StartPolicy(contexts_first=contexts, small_pins_first=small), early, helpers
    )
    opened = [step.devices[0] for step in steps if step.phase == "contexts"]
    assert sorted(opened) == list(range(helpers + 1))
    others = [step.phase for step in steps if step.phase != "contexts"]
    assert len(set(others)) == len(others)
    assert set(others) | {"contexts", "helper caches"} == set(DOING)
    at = {step: number for number, step in enumerate(steps)}
    filled = at.get(Step("helper caches", tuple(range(1, helpers + 1))), len(steps))
    assert all(at[Step("contexts", (number,))] < filled for number in opened)
    assert steps[0] == Step("contexts", (0,))
    assert steps[-1].phase == "bind"
