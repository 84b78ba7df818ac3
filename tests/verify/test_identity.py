"""The identity proof: equal where the bytes are the file's, and never where they are not."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attrs import evolve

from strata_core.checkpoint.open import open_checkpoint
from strata_core.cli.main import main
from strata_core.config import Settings, cache_folder, resolve
from strata_core.errors import DoesNotFit, Refused, StrataError, UsageError
from strata_core.pack.write import write_pack
from strata_core.sources.arena import Arena
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf, write_tiny_hub
from strata_core.verify.about import About
from strata_core.verify.answers import prompts_of
from strata_core.verify.identity import Outcome, prove, subject
from strata_core.verify.ways import Way, ways

EXPERTS, LAYERS = 8, 2


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=EXPERTS, layers=LAYERS), expert_type="Q4_K")
    return path


@pytest.fixture(autouse=True)
def nothing_is_learned(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No proof leaves behind what it learned of the model."""
    monkeypatch.setenv("STRATA_THREADS", "1")
    yield
    folder = cache_folder()
    assert folder is not None
    assert not (folder / "profiles").exists()
    assert not (folder / "rates").exists()


def proven(model: Path, settings: Settings, **asked: Any) -> list[Outcome]:
    found = subject(model, model, settings)
    found = evolve(found, prompts=found.prompts[:1])
    table = ways(found.facts, devices=found.devices, given=settings.given(), quick=True)
    return prove(found, table, **asked)[1]


def test_every_source_of_the_cpu_is_equal(model: Path) -> None:
    rows = proven(model, resolve({}, {}))
    assert [row.verdict for row in rows] == ["equal"] * 6
    assert len({row.logits for row in rows}) == 1
    read = [row.served.get("file", 0) for row in rows]
    assert read[:2] == [0, 0]
    assert read[2] > read[4] > read[5] == EXPERTS * LAYERS, "a larger tier reads less"


def test_a_backend_that_is_not_exact_is_not_called_damaged(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["verify", str(model), "--quick", "--backend", "reference", "--ram-budget", "1"]
    assert main([*asked, "--source", "arena"]) == 1
    shown = capsys.readouterr().out
    assert "backend reference is not exact" in shown
    assert "no sign of damage" in shown
    assert "equal to each other" in shown
    assert "--backend cpu" in shown


def test_every_place_on_devices_is_equal(model: Path) -> None:
    settings = resolve({"backend": "sim", "sim_vram": 0.05, "sim_devices": 2}, {})
    rows = proven(model, settings)
    assert {row.verdict for row in rows} == {"equal"}
    by_name = {str(row.way): row for row in rows}
    assert by_name["arena, cache all"].served.keys() == {"hit"}
    assert by_name["arena, cache 0"].served.keys() <= {"cpu", "pcie"}, "as the split has it"
    assert by_name["arena, 1 helper, cache half"].served["helper"] > 0

    def path(name: str) -> str:
        run = by_name[f"{name}, cache half"].run
        assert run is not None
        return run.actual.paths[0].split(": ")[1].split(",")[0]

    assert [path(f"path {n}") for n in (1, 2)] == ["pinned", "sliced"]
    assert path("path 3") in ("locked", "pageable")
    partly = by_name["path 2, partly, cache half"].run
    assert partly is not None
    assert 0 < partly.actual.pinned < partly.actual.host


def test_a_place_whose_bytes_are_others_differs(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Arena._read

    def read(self: Arena, expert: Any, reader: Any, target: memoryview) -> None:
        real(self, expert, reader, target)
        target[17] ^= 1

    monkeypatch.setattr(Arena, "_read", read)
    code = main(["verify", str(model), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert (code, document["ok"], document["identity"]["equal"]) == (1, False, False)
    verdicts = {row["place"]: row["verdict"] for row in document["identity"]["rows"]}
    wrong_places = {place for place, verdict in verdicts.items() if verdict == "differs"}
    assert wrong_places == {place for place in verdicts if place.startswith("arena")}
    assert set(verdicts.values()) == {"differs", "equal"}
    (wrong,) = (row for row in document["identity"]["rows"] if row["place"] == "arena")
    assert wrong["tokens_equal"] is False
    assert wrong["note"].startswith("other logits or tokens for: short")
    assert wrong["first_logits_sha256"] != document["identity"]["reference"]["first_logits_sha256"]


def test_a_way_that_fails_is_a_row(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(self: Arena, expert: Any, reader: Any, target: memoryview) -> None:
        raise StrataError(f"cannot read {expert}", "the disk says no", "")

    monkeypatch.setattr(Arena, "_read", read)
    rows = {row.way.place: row for row in proven(model, resolve({}, {}))}
    assert rows["arena"].verdict == "failed"
    assert "cannot read expert 0 of layer 0: the disk says no" in rows["arena"].note
    assert rows["mmap"].verdict == "equal"


@pytest.mark.parametrize("kind", [Refused, UsageError, DoesNotFit])
def test_what_is_refused_after_a_plan_that_fits_has_failed(
    kind: type[StrataError],
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A driver that grants less than was planned for proves nothing, and is told so."""

    def read(self: Arena, expert: Any, reader: Any, target: memoryview) -> None:
        raise kind("memory for experts was refused", "the driver has no more", "")

    monkeypatch.setattr(Arena, "_read", read)
    given = [str(model), "--quick", "--json"]
    code = main(["verify", *given])
    document = json.loads(capsys.readouterr().out)
    rows = {row["place"]: row for row in document["identity"]["rows"]}
    assert rows["arena"]["verdict"] == "failed"
    assert "refused: the driver has no more" in rows["arena"]["note"]
    assert rows["mmap"]["verdict"] == "equal"
    count = document["identity"]["count"]
    assert (count["failed"], count["skipped"], count["equal"]) == (1, 0, 5)
    assert (code, document["ok"], document["identity"]["equal"]) == (1, False, False)


def test_what_a_plan_refuses_is_left_out(model: Path) -> None:
    settings = resolve({"backend": "sim", "sim_vram": 0.05, "sim_devices": 2}, {})
    found = subject(model, model, settings)
    helped = {"source": "tiered-file", "expert_cache_device1": 2}
    (row,) = prove(found, [Way(place="x", cache="", options=helped)])[1]
    assert row.verdict == "skipped"
    assert "tiered-file" in row.note


def test_a_way_that_did_not_do_what_it_is_about_is_idle(model: Path) -> None:
    settings = resolve({"backend": "sim", "sim_vram": 0.05, "expert_cache": 8}, {})
    found = subject(model, model, settings)
    found = evolve(found, prompts=found.prompts[:1])
    link = (About(lane="pcie"),)
    cases = [
        ("mmap", 1.0, link, "idle", "no expert went over the link"),
        ("arena", 1.0, link, "equal", ""),
        ("arena", 0.0, link, "idle", "no expert went over the link"),
        ("arena", 0.0, (), "equal", ""),
        ("mmap", 0.5, (About(paths=("pinned",)), *link), "idle",
         "no expert lay in host memory; no expert went over the link"),
    ]  # fmt: skip
    table = [
        Way(place=source, cache="8", options={"source": source, "pcie_frac": share}, about=about)
        for source, share, about, _, _ in cases
    ]
    rows = prove(found, table)[1]
    assert [(row.verdict, row.note) for row in rows] == [case[3:] for case in cases]
    for row in rows:
        assert row.logits == rows[1].logits
        document = row.as_json()
        assert document["tokens_equal"] is True
        assert document["about"] == [str(each) for each in row.way.about]


def test_rounds_of_either_mode_are_equal(model: Path) -> None:
    settings = resolve({"backend": "sim", "sim_vram": 0.05}, {})
    found = subject(model, model, settings)
    found = evolve(found, prompts=found.prompts[:1])
    table = [
        way
        for way in ways(found.facts, devices=found.devices)
        if way.place.endswith((" rounds, arena", ", stepped rounds", ", doorbell rounds"))
    ]
    assert [way.options["dispatch"] for way in table] == ["stepped", "doorbell", "doorbell"]
    mapped = {**table[1].options, "source": "mmap"}
    table.append(evolve(table[1], place="mmap, doorbell rounds", options=mapped))
    rows = prove(found, table)[1]
    assert [row.verdict for row in rows] == ["equal", "equal", "equal", "idle"]
    assert "rounds were stepped: rounds may have to read experts from a file" in rows[3].note
    assert len({row.logits for row in rows}) == 1


SIM = ("--backend", "sim", "--sim-vram", "0.05", "--expert-cache", "16", "--pcie-frac", "0")


@pytest.mark.parametrize("source", [None, "sliced-pinned"])
def test_idle_ways_are_counted_apart_and_prove_nothing(
    source: str | None, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With all experts in the cache nothing lies in host memory, on whatever path."""
    code = main(["verify", str(model), *SIM, "--quick", *(("--source", source) if source else ())])
    shown = capsys.readouterr().out
    equal = 0 if source else 6
    idle = 4
    rest = 0 if source else 1
    assert f"{equal + rest} of {equal + rest + idle} ways on backend sim equal" in shown
    assert f"; {idle} idle" in shown
    assert code == (1 if source else 0), "where nothing is equal, nothing is proven"
    lines = [line for line in shown.splitlines() if "  idle " in line]
    assert len(lines) == idle
    assert all(line.endswith("no expert lay in host memory") for line in lines)


def test_a_backend_that_is_not_exact_is_told_so(model: Path) -> None:
    (row,) = proven(model, resolve({"backend": "reference", "source": "arena"}, {}))
    assert row.verdict == "differs"
    assert row.note.endswith("backend reference does not say that it is exact")


def test_what_does_not_fit_is_left_out_with_the_reason(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    # prompts take buffers for two layers' experts where the cache has none
    write_tiny_gguf(model, hyper=tiny_hyper(experts=EXPERTS, layers=4), expert_type="Q4_K")
    settings = resolve({"backend": "sim", "sim_vram": 0.0036, "source": "mmap"}, {})
    rows = {row.way.cache: row for row in proven(model, settings)}
    assert rows["0"].verdict == "equal"
    assert rows["all"].verdict == "skipped"
    assert "vram0 (SIM0) is short by" in rows["all"].note


def test_where_nothing_could_run_nothing_is_proven(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--backend", "sim", "--sim-vram", "0.0005"]
    code = main(["verify", str(model), "--quick", *flags])
    shown = capsys.readouterr().out
    assert code == 1
    assert "0 of 0 ways on backend sim" in shown
    assert "nothing is proven: no way could be tried" in shown


class Clock:
    """A clock that stands still but for what a test adds to it."""

    def __init__(self) -> None:
        self.now, self.asked, self.runs_out_after = 0.0, 0, -1

    def __call__(self) -> float:
        self.asked += 1
        if self.asked == self.runs_out_after:
            self.now += 100.0
        return self.now


ARENA = Way(place="arena", cache="", options={"source": "arena"})


def test_a_reference_that_takes_too_long_is_an_error(model: Path) -> None:
    clock = Clock()
    clock.runs_out_after = 2
    with pytest.raises(StrataError, match="did not end within 3 s") as caught:
        proven(model, resolve({}, {}), seconds=3.0, clock=clock)
    assert "--time-limit" in caught.value.remedy


def test_no_way_begins_after_the_time(model: Path) -> None:
    found = subject(model, model, resolve({}, {}))
    clock, seen = Clock(), []

    def on_row(row: Outcome) -> None:
        seen.append(row)
        if len(seen) == 2:
            clock.now += 100.0

    _, rows = prove(found, [ARENA] * 4, seconds=3.0, on_row=on_row, clock=clock)
    assert rows == seen
    assert [row.verdict for row in rows] == ["equal", "equal", "skipped", "skipped"]
    assert rows[-1].note == "the time was over before its turn"


def test_the_way_that_runs_when_the_time_is_over_is_given_up(model: Path) -> None:
    found = subject(model, model, resolve({}, {}))
    clock = Clock()

    def on_row(row: Outcome) -> None:
        clock.runs_out_after = clock.asked + 3  # 1 before the next way, then one at every token

    _, rows = prove(found, [ARENA] * 3, seconds=3.0, on_row=on_row, clock=clock)
    assert [row.verdict for row in rows] == ["equal", "skipped", "skipped"]
    assert rows[1].note == "it did not end in the time there was"
    assert rows[2].note == "the time was over before its turn"


@pytest.mark.parametrize("form", ["pack", "hub"])
def test_every_form(
    form: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m"
    if form == "pack":
        write_pack(open_checkpoint(model), path, Silent())
    else:
        write_tiny_hub(path, hyper=tiny_hyper(experts=EXPERTS, layers=LAYERS))
    code = main(["verify", str(path), "--quick", "--source", "arena"])
    shown = capsys.readouterr()
    assert code == 0, shown
    assert "on backend cpu equal backend cpu" in shown.out
    assert shown.out.count("equal    cpu") >= 1


def test_damage_is_not_run(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = write_pack(open_checkpoint(model), tmp_path / "m", Silent()).path
    blobs = bytearray((packed / "experts.bin").read_bytes())
    blobs[100] ^= 4
    (packed / "experts.bin").write_bytes(blobs)
    assert main(["verify", str(packed), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["identity"] is None


def test_files_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "demo", "--hashes-only", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["ok"], document["identity"]) == (True, None)


def test_no_time_is_bad_use(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", "demo", "--time-limit", "0"]) == 2
    assert "leaves no time" in capsys.readouterr().err


@pytest.mark.parametrize("context", [2, 25, 60, 100, 5000])
def test_prompts_fit_the_context(context: int) -> None:
    for prompt in prompts_of(50, context, long=True):
        assert 1 <= len(prompt.ids) < context
        assert max(prompt.ids) < 50
