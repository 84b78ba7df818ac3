"""Waits for events: bounded by a clock that is read before the event is asked for."""

from __future__ import annotations

import pytest

from strata_core.cache import waiting
from strata_core.cache.waiting import await_event, happens
from strata_core.errors import EngineError


class Machine:
    """A clock and a runtime in one: an event happens at a time, and sleeps may last longer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: float, held_up: float = 0.0) -> None:
        self.now, self.at, self.held_up = 0.0, at, held_up
        monkeypatch.setattr(waiting, "time", self)

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + self.held_up

    def finished(self, _: int) -> bool:
        return self.now >= self.at


@pytest.mark.parametrize(
    ("at", "bound", "held_up", "found"),
    [
        (0.0, 0.0, 0.0, True),
        (0.9, 1.0, 0.0, True),
        (1.1, 1.0, 0.0, False),
        (0.9, 1.0, 60.0, True),
        (1e9, 0.0, 60.0, False),
        (0.0, -1.0, 0.0, True),
    ],
)
def test_an_event_counts_that_happened_by_the_last_look(monkeypatch, at, bound, held_up, found):
    machine = Machine(monkeypatch, at, held_up)
    assert happens(machine, 1, bound) is found  # type: ignore[arg-type]
    assert found or machine.now >= bound


def test_a_wait_in_vain_names_what_it_was_for(monkeypatch):
    machine = Machine(monkeypatch, 9.0)
    with pytest.raises(EngineError, match="did not come to an end with a copy") as caught:
        await_event(machine, 1, 0.25, "a copy")  # type: ignore[arg-type]
    assert "more than 0.25 s" in caught.value.why
