"""Planning beside rounds, in rounds: a planner that is slow, fails, or is behind at the end."""

import gc
import threading

import numpy as np
import pytest
from adapting_bench import TEXT, Bound
from attrs import evolve

from strata_core.cache.adaptive import Demand
from strata_core.errors import EngineError


@pytest.fixture
def slow_planner(monkeypatch):
    """Whoever plans swaps waits for this, and says before that there is a plan to be made."""
    slow, begun, swaps = threading.Event(), threading.Event(), Demand.swaps

    def wait_and_plan(*given):
        begun.set()
        slow.wait(120)
        return swaps(*given)

    monkeypatch.setattr(Demand, "swaps", wait_and_plan)
    yield slow, begun
    slow.set()


def test_rounds_and_prompts_do_not_wait_for_a_plan(lab, tools, tiny_file, slow_planner):
    slow, begun = slow_planner
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, "resident", expert_cache=6)
    executor = bound.executor
    assert bound.logits().tobytes() == lab.cpu(checkpoint, ids=TEXT).tobytes()
    assert begun.is_set()
    assert executor.counters()["entered"]["experts"] == 0, "there was no plan"
    slot = executor.open_sequence()
    prompt = evolve(tools.window(TEXT[:20], slot=slot, rows=[19]), kernel_class="prompt")
    assert np.isfinite(executor.run(prompt)).all()
    executor.close_sequence(slot)
    slow.set()
    assert executor._adaptation.timetable._planning.wait(120.0)
    assert bound.logits().tobytes() == lab.cpu(checkpoint, ids=TEXT).tobytes()
    assert executor.counters()["entered"]["experts"] > 0
    assert lab.degradations == []
    bound.close()


@pytest.mark.parametrize("plan", ["swaps", "round"])
def test_a_plan_that_fails_fails_no_round(lab, tools, tiny_file, monkeypatch, plan):
    checkpoint = tiny_file()
    bound = Bound(lab, tools, checkpoint, "resident", expert_cache=6)
    bound.logits()
    entered = bound.executor.counters()["entered"]["experts"]
    assert entered > 0
    monkeypatch.setattr(Demand, plan, lambda *given: 1 // 0)
    for _ in range(2):
        assert bound.logits().tobytes() == lab.cpu(checkpoint, ids=TEXT).tobytes()
    (told,) = lab.degradations
    assert told.what == "experts no longer change places on SIM0"
    assert "ZeroDivisionError" in told.why
    lab.degradations.clear()
    assert bound.executor._adaptation.swapper.under_way == 0
    bound.close()


def test_the_end_does_not_wait_for_a_plan_without_bound(lab, tools, tiny_file, slow_planner):
    slow, begun = slow_planner
    bound = Bound(lab, tools, tiny_file(), "resident", expert_cache=6)
    bound.logits(TEXT[:4])
    assert begun.wait(120)
    bound.executor._adaptation.swapper.patience = 0.05
    with pytest.raises(EngineError, match="strata-beside did not come to an end"):
        bound.executor.close()
    slow.set()
    bound.close()


def test_an_executor_that_is_dropped_ends_its_thread(lab, tools, tiny_file):
    def beside():
        return {t for t in threading.enumerate() if t.name == "strata-beside"}

    gc.collect()  # what earlier tests left
    others = beside()
    bound = Bound(lab, tools, tiny_file(), "resident", expert_cache=6)
    bound.logits(TEXT[:4])
    (thread,) = beside() - others
    assert bound.executor._adaptation.rest()
    del bound.executor
    gc.collect()
    thread.join(120.0)
    assert not thread.is_alive()
    bound._close_source()
