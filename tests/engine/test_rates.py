"""Rates between runs: what a run teaches the next plan, and files that are none of ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

import strata_core
from strata_core.checkpoint.open import open_checkpoint
from strata_core.config import resolve
from strata_core.engine.prepare import prepare
from strata_core.engine.rates import MEASURED, RECORDED, pace, recalled, remember
from strata_core.engine.tier import Known
from strata_core.interfaces import API, BackendRecord, Usable
from strata_core.machine import read_machine
from strata_core.machine.process import process_memory
from strata_core.model.build import build_program
from strata_core.plan.sizes import SLOTS
from strata_core.runtime import Device
from strata_core.testing.sim import SimRuntime
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=8), expert_type="Q4_0")
    return path


def test_rates_are_kept_beside_those_that_are_there(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "rates.json"
    assert recalled(path) == recalled(None) == {}
    remember(path, {"host": 5e9})
    remember(path, {"file": 1e9})
    remember(path, {"host": 6e9})
    remember(path, {})
    found = {lane: (rate.bytes_s, rate.origin) for lane, rate in recalled(path).items()}
    assert found == {"host": (6e9, MEASURED), "file": (1e9, MEASURED)}
    assert [item.name for item in path.parent.iterdir()] == ["rates.json"]
    remember(None, {"host": 5e9})


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"\xff",
        b"[" * 5000,
        b'{"format": "strata-rates", "version": 2, "bytes_s": {"host": 1}}',
        b'{"format": "strata-rates", "version": 1}',
        b'{"format": "strata-rates", "version": 1, "bytes_s": {"host": "x", "file": 0}}',
        b'{"format": "strata-rates", "version": 1, "bytes_s": {"host": -1, "file": NaN}}',
        b'{"format": "strata-rates", "version": 1, "bytes_s": {"host": true, "other": 5}}',
        b'{"format": "strata-rates", "version": 1, "bytes_s": {"host": 1%s}}' % (b"0" * 400),
        b'{"format": "strata-rates", "version": 1, "bytes_s": {"host": 1e-320, "file": 1e300}}',
    ],
)
def test_what_is_no_rate_counts_for_nothing(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "r.json").write_bytes(content)
    assert recalled(tmp_path / "r.json") == {}


def test_a_folder_that_cannot_be_written_costs_nothing(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    remember(tmp_path / "file" / "rates.json", {"host": 1e9})


@pytest.mark.parametrize("learn", [True, False])
def test_a_run_teaches_the_next_plan(model: Path, learn: bool) -> None:
    options = {"backend": "cpu", "threads": 1}
    with strata_core.load(model, learn=learn, **options) as loaded:
        assert loaded.plan.speed is not None
        assert loaded.plan.speed.rates["host"].origin == RECORDED
        assert loaded.beside.speed is not None
        assert loaded.beside.speed.actual is None
        for tokens in (4, 40, 40):
            list(loaded.generate([1, 2, 3], max_tokens=tokens, ignore_eos=True))
        measured = loaded.beside.speed.actual
        assert measured is not None
        assert loaded.beside.as_json(loaded.counters)["decode_tok_s"]["actual"] == measured
    plan = strata_core.api.make_plan(model, **options).plan
    assert plan.speed is not None
    assert (plan.speed.rates["host"].origin == MEASURED) == learn
    if learn:
        assert plan.speed.tokens_s == pytest.approx(measured, rel=0.01)


def test_memory_of_devices_is_as_planned(model: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "strata.plan")
    options = {"backend": "sim", "sim_vram": 0.05, "sim_devices": 2, "threads": 1}
    options |= {"expert_cache": 5, "expert_cache_device1": 3}
    with strata_core.load(model, source="arena", **options) as loaded:
        rows = {row["kind"]: row for row in loaded.beside.as_json(loaded.counters)["memory"]}
        assert set(rows) == {"vram0", "vram1", "pinned", "ram"}
        for kind in ("vram0", "vram1", "pinned"):
            row = rows[kind]
            assert row["actual"] == pytest.approx(row["planned"], rel=0.03, abs=1 << 17)
            for item in row["items"]:
                assert item["actual"] == pytest.approx(item["planned"], rel=0.03, abs=1 << 17)
        slots = [item for item in rows["vram0"]["items"] if item["name"] == SLOTS]
        assert len(slots) == 1
        assert slots[0]["actual"] > 0
        lines = loaded.beside.lines(loaded.counters)
        assert [r.getMessage() for r in caplog.records if r.name == "strata.plan"] == lines
    assert len(lines) == 1
    assert lines[0].startswith("plan: vram0 ")


def test_memory_of_this_process() -> None:
    found = process_memory()
    if found is None:
        pytest.skip("the system does not tell")
    assert found.own > 1 << 20
    before = bytearray(64 << 20)
    for at in range(0, len(before), 4096):
        before[at] = 1
    more = process_memory()
    assert more is not None
    assert more.own - found.own > 48 << 20


@pytest.mark.parametrize("text", [None, "", "VmRSS: 5 kB\n", "RssAnon: x kB\nRssFile: 1 kB\n"])
def test_a_system_that_does_not_tell(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "proc/self").mkdir(parents=True)
        (tmp_path / "proc/self/status").write_text(text)
    assert process_memory(tmp_path) is None


def test_the_document_is_json(model: Path) -> None:
    with strata_core.load(model, backend="cpu", source="tiered-file") as loaded:
        list(loaded.generate([1, 2, 3], max_tokens=12, ignore_eos=True))
        document = json.loads(json.dumps(loaded.beside.as_json(loaded.counters), allow_nan=False))
        lines = loaded.beside.lines(loaded.counters)
    file = document["file_bytes_s"]
    assert file["actual"] > 0
    assert file["drift"] == pytest.approx(file["actual"] / file["planned"] - 1)
    assert [line.split(":")[1].split(" ")[1] for line in lines] == ["ram", "decode", "file"]
    assert "GB/s expected" in lines[2]
    assert document["speed"]["lanes"]["host"]["bytes_a_token"] > 0


def test_a_prediction_by_another_machines_rates_says_so_until_there_are_own(model: Path) -> None:
    said = []
    for _ in range(2):
        with strata_core.load(model, backend="cpu", threads=1) as loaded:
            list(loaded.generate([1, 2, 3], max_tokens=20, ignore_eos=True))
            said.append(loaded.beside.lines(loaded.counters)[1])
    assert said[0].endswith("(predicted by rates recorded on another machine)")
    assert "another machine" not in said[1]


def test_another_machines_plan_has_none_of_this_ones_rates(model: Path, make_machine) -> None:
    with strata_core.load(model, backend="cpu", threads=1) as loaded:
        list(loaded.generate([1, 2, 3], max_tokens=20, ignore_eos=True))
    machine = make_machine()
    other = type(machine).from_json(json.loads(json.dumps(machine.to_json())))
    origins = set()
    for where in (None, other):
        plan = strata_core.api.make_plan(model, machine=where, backend="cpu", threads=1).plan
        assert plan.speed is not None
        origins.add(plan.speed.rates["host"].origin)
    assert origins == {MEASURED, RECORDED}


OTHER_SHAPES = [
    {"threads": 2},
    {"sim_devices": 2},
    {"name": "another card"},
]


@pytest.mark.parametrize("other", OTHER_SHAPES)
def test_a_machine_of_another_shape_has_rates_of_its_own(
    model: Path, other: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder for caches may be one that several machines have, or a machine may change."""
    options = {"backend": "sim", "sim_vram": 0.05, "sim_devices": 1, "threads": 1}

    def file(**more: Any) -> Path:
        found = prepare(open_checkpoint(model), resolve({**options, **more}, {}), read_machine())
        assert found.rates_file is not None
        return found.rates_file

    remember(file(), {"host": 3e9})
    assert recalled(file())["host"].bytes_s == 3e9
    if "name" in other:
        real, renamed, other = SimRuntime.devices, other, {}
        monkeypatch.setattr(
            SimRuntime, "devices", lambda self: [evolve(d, **renamed) for d in real(self)]
        )
    assert recalled(file(**other)) == {}


@pytest.mark.parametrize(("matrix", "tops"), [(True, 84.0), (False, 13.0)])
def test_a_device_without_matrix_units_computes_prompts_more_slowly(model: Path, matrix, tops):
    checkpoint, settings = open_checkpoint(model), resolve({}, {})
    program = build_program(checkpoint.hyper)
    device = Device(
        index=0,
        label="A0",
        name="a",
        architecture="a",
        total=1 << 34,
        units=132,
        warp=32,
        matrix=matrix,
    )
    record = BackendRecord(
        name="real", summary="a device", api=API, probe=lambda m: Usable(""), build=lambda c: None
    )
    found = pace(checkpoint, program, settings, read_machine(), Known(), record, None, (device,))
    assert found.compute.bytes_s == pytest.approx(tops * 1e12)
