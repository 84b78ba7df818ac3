"""Signs of a driver that can pin no more: in the kernel's log, or in how a start was refused."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from attrs import evolve

from strata_core.engine.start.diagnosis import (
    Symptom,
    diagnose,
    forget,
    probes_made,
    recall,
    remember,
)
from strata_core.machine import kernel_log
from strata_core.machine.kernel_log import KEY, RefusedPins, matching, refused_pins

GIB = 1 << 30
LINE = "[  812.4] misc dxgk: create_existing_sysmem: establish_gpadl failed: -122"
SYMPTOM = Symptom(
    doing="opening the context of SIM2",
    error="out of memory (error 2)",
    device="SIM2",
    vram_free=14 * GIB,
    vram_total=16 * GIB,
    ram_available=40 * GIB,
    pinned=GIB,
)
QUIET = {KEY: {"readable": True, "count": 0, "last": ""}}
UNREADABLE = {KEY: {"readable": False}}


# --- the rule ----------------------------------------------------------------------------------


def test_the_kernels_line_is_the_cause(make_machine) -> None:
    machine = make_machine(observed={KEY: {"readable": True, "count": 3, "last": LINE}}, wsl=2)
    found = diagnose(machine, None)
    assert found is not None
    assert found.what == "the driver has run out of host memory that it can pin"
    assert found.why == f"the kernel logged it 3 times: {LINE}"
    assert "strata-wsl" in found.remedy


@pytest.mark.parametrize(
    ("lines", "probes", "symptom", "known"),
    [
        (1, 0, None, True),
        (1, 1, None, False),
        (2, 1, None, True),
        (1, 1, SYMPTOM, True),
        (0, 1, None, False),
    ],
)
def test_a_probes_own_refusal_is_no_sign(lines, probes, symptom, known, make_machine) -> None:
    observed = {KEY: {"readable": True, "count": lines, "last": LINE}}
    found = diagnose(make_machine(observed=observed, wsl=2), symptom, probes)
    assert (found is not None) == known


def test_probes_are_counted_by_what_is_remembered(tmp_path: Path) -> None:
    assert (probes_made(None), probes_made(tmp_path / "absent"), probes_made(tmp_path)) == (0, 0, 0)
    for name in ("pins-a.json", "pins-b.json", "last-refusal.json"):
        (tmp_path / name).write_text("{}")
    assert probes_made(tmp_path) == 2


@pytest.mark.parametrize("observed", [QUIET, UNREADABLE, {}])
@pytest.mark.parametrize(
    ("wsl", "symptom", "known"),
    [
        (2, SYMPTOM, True),
        (2, evolve(SYMPTOM, vram_free=0, vram_total=0), True),
        (None, SYMPTOM, False),
        (1, SYMPTOM, False),
        (2, None, False),
        (2, evolve(SYMPTOM, vram_free=GIB), False),
        (2, evolve(SYMPTOM, ram_available=GIB // 2), False),
    ],
)
def test_a_refusal_with_plenty_free_under_wsl_is_the_other_sign(
    wsl, symptom, known, observed, make_machine
) -> None:
    found = diagnose(make_machine(observed=observed, wsl=wsl), symptom)
    assert (found is not None) == known
    if found is not None:
        assert "opening the context of SIM2 was refused" in found.why
        assert "40.00 GiB of RAM" in found.why


# --- the kernel's log --------------------------------------------------------------------------


def test_matching_lines_are_counted() -> None:
    assert matching(["usb 1-1", LINE, "x", LINE + " again"]) == RefusedPins(
        True, 2, LINE + " again"
    )
    assert matching(["establish_gpadl failed: -12"]) == RefusedPins(True)


def test_an_unreadable_log_says_so(make_machine) -> None:
    assert refused_pins(make_machine(observed={})) == RefusedPins(readable=False)


@pytest.mark.skipif(sys.platform != "linux", reason="records of /dev/kmsg are Linux's")
def test_records_of_the_device_are_read_to_the_end(tmp_path: Path) -> None:
    pipe = tmp_path / "kmsg"
    os.mkfifo(pipe)
    writer = os.open(pipe, os.O_RDWR)
    try:
        os.write(writer, f"4,1,2,-;{LINE}\n SUBSYSTEM=x\n".encode())
        assert kernel_log._from_device(str(pipe)) == [LINE]
    finally:
        os.close(writer)
    assert kernel_log._from_device(str(tmp_path / "absent")) is None


def test_without_any_reader_nothing_is_known(monkeypatch, make_machine) -> None:
    monkeypatch.setattr(kernel_log, "_from_device", lambda: None)
    monkeypatch.setattr(kernel_log, "_installed", lambda program: False)
    machine = evolve(make_machine(observed={}), replayed=False)
    assert refused_pins(machine) == RefusedPins(readable=False)
    assert machine.to_json()["observed"] == {KEY: {"readable": False}}


# --- between runs ------------------------------------------------------------------------------


def test_a_refusal_is_remembered_until_a_start_goes_well(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    assert recall(folder) is None
    remember(folder, SYMPTOM)
    assert recall(folder) == SYMPTOM
    forget(folder)
    forget(folder)
    assert recall(folder) is None


def test_without_a_folder_nothing_is_remembered(tmp_path: Path) -> None:
    remember(None, SYMPTOM)
    forget(None)
    assert recall(None) is None
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file", SYMPTOM)
    assert recall(tmp_path / "file") is None


@pytest.mark.parametrize(
    "change",
    [{"version": 2}, {"format": "x"}, {"doing": 1}, {"vram_free": "x"}, {"pinned": True}],
)
def test_a_file_that_is_none_of_ours_is_nothing(change, tmp_path: Path) -> None:
    remember(tmp_path, SYMPTOM)
    file = next(tmp_path.iterdir())
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))
    assert recall(tmp_path) is None
    for text in ("", "[", "[]", "[" * 100_000, "\xff"):
        file.write_text(text, "latin-1")
        assert recall(tmp_path) is None
