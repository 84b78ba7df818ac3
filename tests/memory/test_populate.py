"""Populating in the background: ascending, with several threads, stoppable, errors passed on."""

from __future__ import annotations

import threading
import time

import pytest

from strata_core.memory.populate import Populator

CHUNK = 10
START = 1000


class System:
    """Records what is populated; can be held up, and can fail."""

    def __init__(self) -> None:
        self.done: list[tuple[int, int]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at: int | None = None
        self.lock = threading.Lock()

    def populate(self, address: int, nbytes: int) -> None:
        assert self.gate.wait(120)
        if self.fail_at is not None and address - START >= self.fail_at:
            raise OSError(12, "no memory")
        with self.lock:
            self.done.append((address - START, nbytes))


@pytest.fixture
def make():
    made: list[Populator] = []

    def build(system: System, nbytes: int, threads: int = 3) -> Populator:
        made.append(Populator(system, START, nbytes, threads, CHUNK))
        return made[-1]

    yield build
    for populator in made:
        populator.stop()
        assert not any(thread.is_alive() for thread in populator._threads)


@pytest.mark.parametrize("nbytes", [1, 10, 95, 1000])
@pytest.mark.parametrize("threads", [1, 3])
def test_everything_is_populated_once(make, nbytes: int, threads: int) -> None:
    system = System()
    populator = make(system, nbytes, threads)
    assert populator.wait(nbytes)
    assert sorted(system.done) == [(at, min(CHUNK, nbytes - at)) for at in range(0, nbytes, CHUNK)]


def test_nothing_is_populated_before_it_is_asked_for(make) -> None:
    system = System()
    populator = make(system, 100)
    time.sleep(0.05)
    assert system.done == []
    assert populator.wait(25)
    time.sleep(0.05)
    assert sum(nbytes for _, nbytes in system.done) == 30


def test_what_is_ready_is_ready_from_the_beginning(make) -> None:
    """A thread that is slow with the first chunk holds up everybody who waits for it."""
    system = System()
    first = threading.Event()
    real = system.populate

    def slow(address: int, nbytes: int) -> None:
        if address == START:
            assert first.wait(120)
        real(address, nbytes)

    system.populate = slow
    populator = make(system, 60)
    populator.extend(60)
    while len(system.done) < 5:
        time.sleep(0.001)
    assert populator._ready == 0
    first.set()
    assert populator.wait(60)


def test_it_can_be_held_and_goes_on(make) -> None:
    system = System()
    system.gate.clear()
    populator = make(system, 1000, threads=2)
    populator.extend(1000)
    while populator._next < 2 * CHUNK:
        time.sleep(0.001)
    populator.hold()
    system.gate.set()
    assert populator.wait(2 * CHUNK)
    time.sleep(0.05)
    assert len(system.done) == 2
    assert populator.wait(1000)
    assert len(system.done) == 100


def test_stopping_ends_whoever_waits(make) -> None:
    system = System()
    system.gate.clear()
    populator = make(system, 1000)
    answers = []
    waiter = threading.Thread(target=lambda: answers.append(populator.wait(1000)))
    waiter.start()

    def open_gate() -> None:
        while not populator._stopped:
            time.sleep(0.001)
        system.gate.set()

    opener = threading.Thread(target=open_gate)
    opener.start()
    populator.stop()
    opener.join()
    waiter.join(120)
    assert sum(nbytes for _, nbytes in system.done) < 1000
    assert answers == [False]


def test_an_error_reaches_whoever_waits(make) -> None:
    system = System()
    system.fail_at = 50
    populator = make(system, 100)
    with pytest.raises(OSError, match="no memory"):
        populator.wait(100)
    with pytest.raises(OSError, match="no memory"):
        populator.wait(60)
