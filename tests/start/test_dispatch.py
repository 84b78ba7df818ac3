"""Doorbell rounds through the public interface: requests that are cancelled, and what is told."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

import strata_core
from strata_core.cli.loading import notes
from strata_core.engine.messages import Cancel, Finished, Submit, Token

OPTIONS: dict[str, Any] = {
    "backend": "sim",
    "source": "arena",
    "expert_cache": 20,
    "pcie_frac": 0.5,
    "threads": 1,
}
ASKED: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected() -> tuple[str, tuple[int, ...]]:
    """What the CPU answers."""
    with strata_core.load("demo", backend="cpu", threads=1) as model:
        *_, done = model.generate([5, 9, 3], **ASKED)
        return done.first_logits_sha256, done.token_ids


def test_requests_that_are_cancelled_leave_the_next_one_right(expected) -> None:
    with strata_core.load("demo", **OPTIONS, dispatch="doorbell") as model:
        engine = model._running.engine
        for tokens in (1, 4):
            events: SimpleQueue[Any] = SimpleQueue()
            left = [tokens]

            def receive(event: Any, left: list[int] = left, to: Any = events) -> None:
                if isinstance(event, Token):
                    left[0] -= 1
                    if left[0] == 0:
                        engine.send(Cancel("long"), lambda _: None)
                to.put(event)

            engine.send(Submit(request="long", prompt=(7, 8), max_tokens=500), receive)
            while not isinstance(event := events.get(timeout=60), Finished):
                pass
            assert event.reason == "cancelled"
            *_, done = model.generate([5, 9, 3], **ASKED)
            assert (done.first_logits_sha256, done.token_ids) == expected
        told = model.lanes["dispatch"]
        assert (told["mode"], told["time_outs"]) == ("doorbell", 0)
        assert "rounds: doorbell, because: --dispatch doorbell" in notes(model)
        assert list(model.degradations) == []


def test_what_has_no_effect_is_told(expected) -> None:
    options = {**OPTIONS, "source": "mmap", "pcie_frac": 0.0}
    with strata_core.load("demo", **options, dispatch="doorbell") as model:
        *_, done = model.generate([5, 9, 3], **ASKED)
        assert (done.first_logits_sha256, done.token_ids) == expected
        assert "--dispatch doorbell has no effect" in [item.what for item in model.degradations]
        assert any(line.startswith("rounds: stepped, because: rounds may") for line in notes(model))
