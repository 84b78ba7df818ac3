"""Copies beside rounds: what a driver that blocks or fails makes of them."""

from __future__ import annotations

import threading

import pytest

from strata_core.cache.beside import Beside
from strata_core.cache.waves import Waves
from strata_core.errors import DeviceError
from strata_core.testing.sim import SimHardware, SimRuntime

NBYTES = 1 << 12


class Stuck(SimRuntime):
    """A driver whose copies begin when they are let, or fail."""

    def __init__(self) -> None:
        super().__init__(SimHardware(vram=(1 << 24,)))
        self.let = threading.Event()
        self.let.set()
        self.failing = None

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self.let.wait()
        if self.failing is not None:
            raise self.failing
        super().copy(target, source, nbytes, stream)


@pytest.fixture
def runtime():
    made = Stuck()
    made.open_context(0)
    yield made
    made.let.set()
    made.close()


@pytest.fixture
def waves(runtime):
    jobs = Beside("test-beside")
    made = Waves(runtime, 0, jobs)
    yield made
    runtime.let.set()
    jobs.close(120.0)
    made.drain()
    made.close()


def between(runtime):
    return runtime.alloc(0, NBYTES), runtime.host_alloc(NBYTES)


def landed(waves, wave):
    while not wave.landed:
        waves.look()


def test_nothing_waits_for_a_driver_that_blocks(runtime, waves) -> None:
    """Nor is anything lost: what was asked for meanwhile is the next wave."""
    target, source = between(runtime)
    landed(waves, first := _ended(waves, target, source))
    runtime.let.clear()
    second = _ended(waves, target, source)
    third = _ended(waves, target, source)
    waves.look()
    assert first.landed
    assert not second.landed
    assert third is not second
    assert not waves.still(0.01)
    runtime.let.set()
    landed(waves, second)
    assert not third.landed
    waves.end()
    landed(waves, third)


def _ended(waves, target, source):
    wave = waves.bring(target, source, NBYTES)
    waves.end()
    return wave


@pytest.mark.parametrize(
    "error", [DeviceError("copy failed", "no reason", "none"), ZeroDivisionError("copy failed")]
)
def test_what_could_not_be_copied_never_lands(runtime, waves, error) -> None:
    target, source = between(runtime)
    runtime.failing = error
    wave = _ended(waves, target, source)
    for _ in range(3):
        with pytest.raises(type(error), match="copy failed"):
            landed(waves, wave)
        assert not wave.landed
    assert waves.still(60.0), "nothing moves"
    with pytest.raises(type(error), match="copy failed"):
        waves.look()
    assert runtime.take_error() is None
