"""How many threads compute: what was asked for, else what the machine has."""

from __future__ import annotations

from typing import Any, cast

import pytest
from attrs import evolve, frozen

from strata_core.errors import Degradation
from strata_core.interfaces import BackendContext
from strata_core.kernels.cpu.backend import threads_for
from strata_core.machine import read_machine
from strata_core.machine.record import Machine


@frozen
class Context:
    """Of a backend's context what is asked here."""

    machine: Machine
    options: dict[str, Any]
    told: list[Degradation]

    def degrade(self, item: Degradation) -> None:
        self.told.append(item)


def ask(asked: int | None, *, cores: int = 8, spare: int = 0) -> tuple[int, list[Degradation]]:
    machine = evolve(read_machine(), logical_cores=2 * cores, physical_cores=cores, cpu_quota=None)
    context = Context(machine, {"threads": asked}, [])
    return threads_for(cast("BackendContext", context), spare=spare), context.told


def test_cores_are_taken_and_some_left_where_a_driver_needs_one() -> None:
    assert ask(None) == (8, [])
    assert ask(None, spare=1) == (7, [])
    assert ask(None, cores=1, spare=1) == (1, [])


@pytest.mark.parametrize("asked", [1, 8, 16])
def test_what_was_asked_for_is_taken(asked: int) -> None:
    assert ask(asked, spare=1) == (asked, [])


def test_more_than_there_are_cores_is_told() -> None:
    threads, (told,) = ask(17)
    assert threads == 17
    assert told.what == "17 threads compute on 16 cores"
    assert "--threads 8" in told.remedy
