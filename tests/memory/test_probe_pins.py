"""The pin probe: it stops at the first refusal, leaves nothing, and remembers what it found."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from strata_core.errors import DeviceError
from strata_core.memory.probe_pins import PinKey, PinProbe, pin_limit, probe_pins
from strata_core.testing.machines import recorded_pc
from strata_core.testing.sim import SimFaults, SimHardware, SimRuntime

MIB = 1 << 20
GIB = 1 << 30


def driver(budget: int | None, **faults) -> SimRuntime:
    hardware = SimHardware(pin_budget=budget, context_pins=8 * MIB)
    runtime = SimRuntime(hardware, faults=SimFaults(faults))
    runtime.open_context(0)
    return runtime


def finish(runtime: SimRuntime) -> None:
    assert runtime.take_error() is None, "an error was left pending"
    assert runtime.leaks() == []
    runtime.close()


@pytest.mark.parametrize(
    ("budget", "found"),
    [(GIB, 15 * 64 * MIB), (8 * MIB, 0), (8 * MIB + 64 * MIB, 64 * MIB), (200 * MIB, 192 * MIB)],
)
def test_it_stops_at_the_first_refusal(budget: int, found: int) -> None:
    runtime = driver(budget)
    assert probe_pins(runtime) == PinProbe(found, refused=True)
    assert runtime.calls()["host_alloc"] == found // (64 * MIB) + 1
    assert runtime.report()["pinned"]["in_use"] == 8 * MIB
    assert probe_pins(runtime) == PinProbe(found, refused=True), "something stayed"
    finish(runtime)


def test_without_a_refusal_there_is_no_limit() -> None:
    runtime = driver(None)
    probe = probe_pins(runtime, step=MIB, most=10 * MIB + 5)
    assert (probe, probe.limit) == (PinProbe(10 * MIB, refused=False), None)
    finish(runtime)


def test_everything_is_freed_even_where_an_error_is_pending() -> None:
    runtime = driver(GIB, host_free=3)
    assert probe_pins(runtime).nbytes == 15 * 64 * MIB
    finish(runtime)


def test_what_the_driver_keeps_is_an_error() -> None:
    runtime = driver(GIB, host_free=(3, 4))
    with pytest.raises(DeviceError):
        probe_pins(runtime)
    assert len(runtime.leaks()) == 1
    runtime.close()


def test_another_failure_is_no_limit() -> None:
    runtime = SimRuntime(SimHardware(pin_budget=GIB))
    with pytest.raises(DeviceError, match="context"):
        probe_pins(runtime)
    runtime.close()


# --- remembering -------------------------------------------------------------------------------


class Remembered:
    """A machine with a cache folder; `ask()` gives the limit and how often the driver was asked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reports: list[object] = []

    def ask(self, driver_version: str = "555.1", budget: int = GIB, **more) -> tuple:
        machine = recorded_pc(wsl=2, **{k: more.pop(k) for k in list(more) if k != "options"})
        runtime = driver(budget)
        limit = pin_limit(
            runtime,
            PinKey.of(runtime, machine, driver_version),
            {"cache_dir": self.folder, **more.get("options", {})},
            self.reports.append,
        )
        asked = runtime.calls().get("host_alloc", 0)
        finish(runtime)
        return limit, asked


@pytest.fixture
def remembered(tmp_path: Path) -> Remembered:
    return Remembered(tmp_path / "cache")


def test_an_answer_is_kept_per_driver_system_and_device(remembered) -> None:
    assert remembered.ask() == (960 * MIB, 16)
    assert remembered.ask(budget=100 * MIB) == (960 * MIB, 0)
    assert remembered.ask("555.2") == (960 * MIB, 16)
    assert remembered.ask(release="6.9.0") == (960 * MIB, 16)
    assert remembered.ask(ram_installed=32 * GIB) == (960 * MIB, 16)
    assert len(list(remembered.folder.iterdir())) == 4
    assert remembered.reports == []


def test_an_answer_is_for_the_devices_in_use() -> None:
    runtime = SimRuntime(SimHardware(vram=(GIB, GIB)))
    every, both, one = (
        PinKey.of(runtime, recorded_pc(), "1", used) for used in (None, (0, 1), (1,))
    )
    assert every == both
    assert one != both
    runtime.close()


def test_a_limit_that_is_given_takes_the_probes_place(remembered) -> None:
    assert remembered.ask(options={"pin_limit_gib": 0.5}) == (GIB // 2, 0)
    assert remembered.ask(options={"pin_limit_gib": 0.0}) == (0, 0)
    assert not remembered.folder.exists()


DAMAGE = {
    "empty": lambda text: "",
    "no JSON": lambda text: text[:-3],
    "deep": lambda text: "[" * 100_000,
    "a list": lambda text: "[]",
    "another version": lambda text: text.replace('"version": 1', '"version": 2'),
    "another format": lambda text: text.replace("strata-pin-probe", "x"),
    "another driver": lambda text: text.replace("555.1", "444.4"),
    "negative": lambda text: text.replace(str(960 * MIB), "-1"),
    "more than the RAM": lambda text: text.replace(str(960 * MIB), str(1 << 50)),
    "a truth": lambda text: text.replace(str(960 * MIB), "true"),
    "no size": lambda text: text.replace('"nbytes"', '"bytes"'),
    "no word": lambda text: text.replace('"refused": true', '"refused": 1'),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_file_that_cannot_be_right_is_passed_over(remembered, damage: str) -> None:
    remembered.ask()
    file = next(remembered.folder.iterdir())
    good = file.read_text()
    bad = DAMAGE[damage](good)
    assert bad != good
    file.write_text(bad)
    assert remembered.ask() == (960 * MIB, 16)
    assert json.loads(file.read_text()) == json.loads(good), "it was not written anew"


def test_a_folder_that_cannot_be_written_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remembered = Remembered(tmp_path / "file" / "cache")
    assert remembered.ask() == (960 * MIB, 16)
    assert remembered.ask() == (960 * MIB, 16)
    assert "STRATA_CACHE_DIR" in remembered.reports[0].remedy
