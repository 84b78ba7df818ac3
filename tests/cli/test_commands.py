"""plan, inspect, plugins, doctor and perplexity on the built-in model."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from strata_core import demo

GIB = 2**30


# --- inspect -----------------------------------------------------------------------------------


def test_inspect_document(strata) -> None:
    document = strata("inspect", "demo", "--json").document
    assert document["architecture"] == "qwen3_moe"
    assert document["form"] == "gguf"
    assert document["files"] == [{"path": str(demo.PATH), "bytes": demo.PATH.stat().st_size}]
    assert document["hyper"]["layers"] == 6
    experts = document["experts"]
    assert (experts["layers"], experts["per_layer"], experts["asked_per_token"]) == (6, 32, 4)
    blob = experts["classes"][0]
    assert blob == {"types": ["Q4_0"] * 3, "bytes": blob["bytes"], "layers": list(range(6))}
    assert experts["bytes"] == 6 * 32 * blob["bytes"]
    by_role = sum(n for kinds in document["roles"].values() for n in kinds.values())
    assert by_role == sum(kind["bytes"] for kind in document["types"].values())
    assert by_role < document["files"][0]["bytes"]
    assert document["tokenizer"] == {"vocabulary": 4096}
    assert document["chat_template"] is False


def test_inspect_text(strata) -> None:
    shown = strata("inspect", "demo").out
    for words in ("qwen3_moe", "32 a layer, 4 asked", "layers 0-5", "no chat template", "Q4_0"):
        assert words in shown


def test_inspect_mixed_types(strata, models: Path) -> None:
    file = str(models / "kjv-moe" / "kjv-Q4_K_M.gguf")
    classes = strata("inspect", file, "--json").document["experts"]["classes"]
    assert len({tuple(item["types"]) for item in classes}) > 1
    assert sorted(layer for item in classes for layer in item["layers"]) == list(range(6))
    assert file.rsplit("/", 1)[1] not in strata("inspect", file).err


def test_inspect_without_tokenizer(strata, models: Path) -> None:
    result = strata("inspect", str(models / "tiny" / "qwen3_moe"))
    assert "prompts are token ids" in result.out


# --- plan --------------------------------------------------------------------------------------


def test_plan_text_and_document(strata) -> None:
    shown = strata("plan", "demo")
    document = strata("plan", "demo", "--json").document
    assert shown.code == 0
    assert document["fits"] is True
    assert f"source: {document['source']}" in shown.out
    assert document["model"] == "demo"
    for tier in document["tiers"]:
        assert tier["need"] == sum(item["nbytes"] for item in tier["items"])


def test_plan_shows_the_parts_as_plugins_does(strata) -> None:
    options = ("demo", "--source", "mmap", "--ram-budget", "90000")
    document = strata("plan", *options, "--json").document
    assert [item["role"] for item in document["selections"]] == ["backend", "allocator", "source"]
    assert document["selections"][2]["because"] == "named by --source"
    assert document["source"] == "mmap"
    others = {item["name"]: item["reason"] for item in document["selections"][2]["runners_up"]}
    assert others["arena"] == "mmap was named by --source"
    assert any("--ram-budget" in item["what"] for item in document["degradations"])
    shown = strata("plan", *options).out
    listed = strata("plugins", "--source", "mmap").out
    for selection in document["selections"]:
        lines = [f"  {selection['name']}, because: {selection['because']}"]
        lines += [f"  not {one['name']}: {one['reason']}" for one in selection["runners_up"]]
        for text in (shown, listed):
            assert "\n" + "\n".join(lines) + "\n" in text
    for item in document["degradations"]:
        # What is available, and so the number in the text, may change from one call to the next.
        what = item["what"].partition(" only ")[0]
        assert f"degraded: {what}" in shown
        assert f": {item['why']}\n  costs: {item['cost']}\n  remedy: " in shown


def test_plan_that_does_not_fit(strata) -> None:
    result = strata("plan", "demo", "--ram-budget", "0.01", "--json")
    assert result.code == 1
    document = result.document
    assert document["fits"] is False
    ram = next(tier for tier in document["tiers"] if tier["name"] == "ram")
    assert ram["short_by"] == ram["need"] - ram["have"] > 0
    shown = strata("plan", "demo", "--ram-budget", "0.01")
    assert shown.code == 1
    assert "short by" in shown.out
    assert shown.err == ""


@pytest.fixture
def facts(strata, tmp_path: Path) -> dict:
    return strata("doctor", "--json").document


@pytest.mark.parametrize(
    ("ram", "have", "source"), [(64, 58, "arena"), (6.26, 6.26, "mmap"), (6.45, 0.45, "arena")]
)
def test_plan_for_another_machine(ram, have, source, facts, strata, tmp_path) -> None:
    facts["machine"]["facts"] |= {
        "ram_installed": 128 * GIB,
        "ram_available": int(ram * GIB),
        "cgroup_memory_limit": None,
        "cgroup_memory_room": None,
    }
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts))
    asked = ("plan", "demo", "--backend", "reference", "--machine", str(file), "--json")
    document = strata(*asked).document
    tier = next(tier for tier in document["tiers"] if tier["name"] == "ram")
    assert tier["have"] == pytest.approx(have * GIB, abs=2)
    assert (document["reserve_used"] > 0) == (have == ram)
    assert document["source"] == source


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "cannot be read"),
        ("[1", "cannot be read"),
        ("[" * 200_000, "cannot be read"),
        ("[]", "facts.json"),
        ("{}", "facts.json"),
        ('{"machine": {}}', "facts.json"),
        ("\xff", "cannot be read"),
    ],
)
def test_facts_that_are_none(text, says, strata, tmp_path) -> None:
    file = tmp_path / "facts.json"
    file.write_bytes(text.encode("latin-1"))
    result = strata("plan", "demo", "--machine", str(file))
    assert result.code == 2
    assert says in result.error_lines[0]


def test_wrong_fact_is_named(facts, strata, tmp_path) -> None:
    facts["machine"]["facts"]["ram_available"] = "much"
    file = tmp_path / "facts.json"
    file.write_text(json.dumps(facts))
    result = strata("plan", "demo", "--machine", str(file))
    assert result.code == 2
    assert "ram_available" in result.error_lines[0]


# --- plugins and doctor ------------------------------------------------------------------------


def test_plugins(strata) -> None:
    document = strata("plugins", "--json").document
    assert {"cpu", "reference"} <= {item["name"] for item in document["backends"]}
    assert {"arena", "mmap"} <= {item["name"] for item in document["sources"]}
    assert document["selections"]["backend"]["name"] == "cpu"
    shown = strata("plugins").out
    assert "reference" in shown
    assert document["selections"]["backend"]["because"] in shown


def test_plugins_with_a_name_that_is_none(strata) -> None:
    result = strata("plugins", "--source", "mmmap")
    assert result.code == 2
    assert "not chosen: there is no source 'mmmap'" in result.out
    assert (
        strata("plugins", "--source", "mmap", "--json").document["selections"]["source"]["name"]
        == "mmap"
    )


def test_blocked_plugin(strata, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_BLOCK_PLUGINS", "no-such-plugin")
    assert "blocked: no-such-plugin" in strata("plugins").out


def test_doctor_document(strata, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_THREADS", "3")
    result = strata("doctor", "--json", "--source", "mmap")
    document = result.document
    origins = {row["key"]: (row["value"], row["origin"]) for row in document["settings"]}
    assert origins["source"] == ("mmap", "flag --source")
    assert origins["threads"] == (3, "environment STRATA_THREADS")
    assert origins["kv"] == (None, "default")
    assert document["machine"]["facts"]["ram_installed"] > 0
    assert document["plugins"]["selections"]["backend"]["name"] == "cpu"
    assert document["problems"] == []
    assert result.code == 0


def test_doctor_names_the_cache_folder_and_says_where_it_takes_no_file(
    strata, monkeypatch, tmp_path
) -> None:
    named = tmp_path / "there" / "it is"
    monkeypatch.setenv("STRATA_CACHE_DIR", str(named))
    assert strata("doctor", "--json").document["cache_folder"] == str(named)
    assert str(named) in strata("doctor").out
    assert list(named.iterdir()) == [], "the file that was tried is gone"
    (tmp_path / "a file").write_text("")
    monkeypatch.setenv("STRATA_CACHE_DIR", str(tmp_path / "a file"))
    result = strata("doctor", "--json")
    assert result.code == 1
    (problem,) = result.document["problems"]
    assert problem["what"] == f"the cache folder {tmp_path / 'a file'} cannot be written to"
    assert "STRATA_CACHE_DIR" in problem["remedy"]


def test_doctor_text(strata) -> None:
    shown = strata("doctor").out
    for words in ("system", "memory", "setting", "origin", "reference", "no problems found"):
        assert words in shown


def test_doctor_reports_a_misspelt_variable(strata, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_THREAD", "3")
    result = strata("doctor", "--json")
    assert result.code == 1
    problem = result.document["problems"][0]
    assert "STRATA_THREAD" in problem["what"]
    assert problem["remedy"] == "did you mean 'STRATA_THREADS'?"


def test_doctor_reports_a_wrong_setting_beside_the_facts(strata, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_KV", "fp17")
    result = strata("doctor", "--json")
    assert result.code == 2
    assert "STRATA_KV" in result.document["problems"][0]["what"]
    assert result.document["machine"]["facts"]["ram_installed"] > 0


# --- profile -----------------------------------------------------------------------------------


def test_profile_counts_and_plan_reads_by_it(strata, tmp_path) -> None:
    text, out = tmp_path / "t.txt", tmp_path / "p.json"
    text.write_text("In the beginning God created the heaven and the earth. " * 4, "utf-8")
    args = ("profile", "demo", "--text", str(text), "-o", str(out), "--context", "16")
    document = strata(*args, "--json").document
    written = json.loads(out.read_text("utf-8"))
    assert written["model_hash"] == document["model_hash"]
    assert document["picks"] == sum(map(sum, written["counts"].values())) > 0
    assert document["tokens"] % 16 == 0
    assert 0 < document["experts_asked_for"] <= document["experts"]
    assert strata(*args).out.startswith(f"{out}: {document['picks']} picks over ")
    plan = ("plan", "demo", "--low-ram", "--expert-profile", str(out), "--json")
    assert strata(*plan).document["reads"]["learned"]


# --- perplexity --------------------------------------------------------------------------------

TEXT = "In the beginning God created the heaven and the earth.\n" * 4


def test_perplexity(strata, tmp_path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    document = strata(
        "perplexity", "demo", "--text", str(file), "--context", "16", "--json"
    ).document
    assert math.isclose(document["perplexity"], math.exp(document["nll"]))
    assert document["tokens"] == 15 * document["windows"]
    assert document["left_out"] < 16
    shown = strata("perplexity", "demo", "--text", str(file), "--context", "16")
    assert f"{document['nll']:.6f}" in shown.out
    assert f"{document['windows']} windows of 16" in shown.out


@pytest.mark.shared
@pytest.mark.parametrize(("backend", "most"), [("reference", 1e-5), ("cpu", 4e-5)])
def test_perplexity_of_the_passage(backend, most, strata, models: Path, tmp_path) -> None:
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.tokenizer import open_tokenizer

    reference = json.loads((models / "kjv-moe" / "reference.json").read_text())
    tokenizer = open_tokenizer(open_checkpoint(demo.PATH))
    assert tokenizer is not None
    file = tmp_path / "passage.txt"
    file.write_text(tokenizer.decode(reference["passage_ids"]), "utf-8", newline="")
    args = ("perplexity", "demo", "--text", str(file), "--backend", backend, "--json")
    document = strata(*args).document
    assert (document["windows"], document["tokens"]) == (1, 511)
    assert abs(document["nll"] - reference["variants"]["Q4_0"]["passage_nll"]) < most


@pytest.mark.parametrize(("text", "says"), [(b"", "perplexity"), (b"\xff", "not UTF-8")])
def test_text_without_perplexity(text, says, strata, tmp_path) -> None:
    file = tmp_path / "text.txt"
    file.write_bytes(text)
    result = strata("perplexity", "demo", "--text", str(file))
    assert result.code == 2
    assert says in "\n".join(result.error_lines)


def test_perplexity_beyond_the_context(strata, tmp_path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT * 3)
    result = strata(
        "perplexity", "demo", "--text", str(file), "--context", "64", "--max-context", "32"
    )
    assert result.code == 2
    assert "too long" in result.error_lines[0]


def test_perplexity_needs_a_tokenizer(strata, models: Path, tmp_path) -> None:
    file = tmp_path / "text.txt"
    file.write_text(TEXT)
    result = strata("perplexity", str(models / "tiny" / "olmoe"), "--text", str(file))
    assert result.code == 2
    assert "no tokenizer" in result.error_lines[0]


def test_doctor_recognises_a_driver_that_can_pin_no_more(strata, monkeypatch, make_machine) -> None:
    line = "misc dxgk: create_existing_sysmem: establish_gpadl failed: -122"
    observed = {
        "module:llvmlite": True,
        "kernel_log:refused_pins": {"readable": True, "count": 1, "last": line},
    }
    machine = make_machine(observed=observed, wsl=2)
    monkeypatch.setattr("strata_core.machine.read_machine", lambda: machine)
    result = strata("doctor", "--json")
    (problem,) = result.document["problems"]
    assert problem["what"] == "the driver has run out of host memory that it can pin"
    assert line in problem["why"]
    assert result.code == 1
    assert f"the kernel logged it once: {line}" in strata("doctor").out
