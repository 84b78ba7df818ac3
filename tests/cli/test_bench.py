"""`strata bench` on the built-in model: figures, document, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

import pytest

from strata_core.api import model_path
from strata_core.cli.loading import LANES
from strata_core.cli.timeline import timeline_text
from strata_core.engine.bench import Bench

SMALL = ("-p", "24", "-n", "3", "-r", "2")


def test_document(strata) -> None:
    result = strata("bench", "demo", *SMALL, "--seed", "5", "--threads", "1", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert (document["prompt_tokens"], document["decode_tokens"]) == (24, 3)
    assert (document["repeats"], document["seed"], document["context"]) == (2, 5, 24)
    for kind, tokens in (("prompt", 24), ("decode", 3)):
        samples = document["samples"][kind]
        assert [item["tokens"] for item in samples] == [tokens] * 2
        rates = [item["tok_s"] for item in samples]
        assert document[f"{kind}_tok_s"] == median(rates)
        assert document[f"{kind}_tok_s_spread"] == [min(rates), max(rates)]
        for item in samples:
            assert item["tok_s"] == pytest.approx(tokens / item["seconds"])
            assert 1 <= item["distinct_ids"] <= tokens
        assert document["timings"][f"{kind}_s"] == median(item["seconds"] for item in samples)
    assert document["timings"]["total_s"] >= sum(
        item["seconds"] for samples in document["samples"].values() for item in samples
    )
    assert document["timings"]["load_s"] > 0
    assert [item["role"] for item in document["selections"]] == ["backend", "allocator", "source"]
    assert set(LANES) <= set(document["counters"])
    assert isinstance(document["degradations"], list)
    assert document["machine"]["threads"] == 1
    assert document["kv"] == "fp16"
    assert document["exact"] is True
    assert document["machine"]["logical_cores"] >= document["machine"]["physical_cores"] >= 1


def test_threads_are_those_that_compute(strata) -> None:
    def threads(*args: str) -> int | None:
        call = ("bench", "demo", "-p", "2", "-n", "1", "-r", "1", *args, "--json")
        document = strata(*call).document
        assert document["kv"] == ("fp32" if args else "fp16")
        return document["machine"]["threads"]

    assert threads() >= 1
    assert threads("--backend", "reference") is None


def test_every_run_computes_what_it_says(strata) -> None:
    document = strata("bench", "demo", "-p", "0", "-n", "3", "-r", "2", "--json").document
    # One run is not counted; each feeds 3 tokens, in 6 layers of 4 experts each.
    served = sum(lane["experts"] for lane in document["counters"].values())
    assert served == 3 * 3 * 6 * 4


def test_the_order_of_runs_is_the_seeds(strata) -> None:
    def distinct(seed: str) -> list[int]:
        args = ("bench", "demo", "-p", "200", "-n", "0", "-r", "3", "--seed", seed, "--json")
        return [item["distinct_ids"] for item in strata(*args).document["samples"]["prompt"]]

    assert distinct("1") == distinct("1") != distinct("2")


@pytest.mark.parametrize(("left_out", "kept"), [("-p", "decode"), ("-n", "prompt")])
def test_a_kind_is_left_out(left_out: str, kept: str, strata) -> None:
    call = ("bench", "demo", "-p", "5", "-n", "2", "-r", "1", left_out, "0")
    document = strata(*call, "--json").document
    assert list(document["samples"]) == [kept]
    gone = {"prompt": "decode", "decode": "prompt"}[kept]
    assert document[f"{gone}_tok_s"] is None
    assert document[f"{gone}_tok_s_spread"] is None
    assert f"{gone}_s" not in document["timings"]
    shown = strata(*call).out
    assert f"\n{kept} " in shown
    assert f"\n{gone} " not in shown


def test_text(strata) -> None:
    result = strata("bench", "demo", *SMALL, "--threads", "2")
    machine, blank, heading, *rows = result.out.splitlines()
    assert machine.endswith(", 2 threads")
    assert blank == ""
    assert heading.split() == ["run", "tokens", "runs", "tokens/s", "lowest", "highest"]
    assert [row.split()[:3] for row in rows] == [["prompt", "24", "2"], ["decode", "3", "2"]]
    for row in rows:
        middle, low, high = (float(cell) for cell in row.split()[3:])
        assert 0 < low <= middle <= high
    assert "ids of seed 0" in result.err
    assert "Traceback" not in result.err
    assert strata("bench", "demo", *SMALL, "--quiet").err == ""


def test_a_model_without_a_tokenizer(strata, models: Path) -> None:
    folder = str(models / "tiny" / "olmoe")
    document = strata("bench", folder, "-p", "8", "-n", "2", "-r", "1", "--json").document
    assert document["decode_tok_s"] > 0


def test_a_longer_context_is_kept(strata) -> None:
    document = strata("bench", "demo", *SMALL, "--max-context", "100", "--json").document
    assert document["context"] == 100


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["-p", "2049"], "-p 2049 is too long"),
        (["-n", "2049"], "-n 2049 is too long"),
        (["-n", "65", "-p", "3", "--max-context", "64"], "--max-context 64 leaves room for 64"),
        (["-r", "0"], "at least 1"),
        (["-p", "-1"], "at least 0"),
        (["--seed", "x"], "not a whole number"),
    ],
)
def test_bad_use(args: list[str], says: str, strata) -> None:
    result = strata("bench", "demo", *args)
    assert result.code == 2
    assert says in "\n".join(result.error_lines)


def test_a_missing_model(strata, tmp_path: Path) -> None:
    result = strata("bench", str(tmp_path / "none.gguf"))
    assert result.code == 2
    assert "none.gguf" in "\n".join(result.error_lines)


ON_SIM = ("--backend", "sim", "--sim-vram", "0.012", "--expert-cache", "12", "--prefill", "64")


def test_a_timeline_tells_of_each_chunk_by_layer(strata, tmp_path) -> None:
    path = tmp_path / "timeline.json"
    call = ("bench", "demo", "-p", "150", "-n", "0", "-r", "1", *ON_SIM, "--timeline", str(path))
    result = strata(*call, "--json")
    assert result.code == 0
    written = json.loads(path.read_text("utf-8"))
    assert (written["format"], written["version"]) == ("strata-timeline", 1)
    assert written["tokens"] == 150
    assert written["chunks"] == result.document["timeline"]
    assert [chunk["tokens"] for chunk in written["chunks"]] == [64, 64, 22]
    assert [chunk["start"] for chunk in written["chunks"]] == [0, 64, 128]
    for chunk in written["chunks"]:
        assert [each["layer"] for each in chunk["layers"]] == [*range(6), None]
        for each in chunk["layers"][:-1]:
            assert each["copy"]["bytes"] > 0
            assert 0 <= each["copy"]["begin_us"] < each["copy"]["end_us"]
            computed = each["compute"]
            assert 0 < computed["us"] <= computed["end_us"] - computed["begin_us"] + 1e-6
        assert chunk["bytes"] == sum(each["copy"]["bytes"] for each in chunk["layers"])
        assert chunk["us"] == max(each["compute"]["end_us"] for each in chunk["layers"])
    shown = timeline_text(written["chunks"])
    assert "a chunk of 64 tokens from position 0 on:" in shown
    lines = shown[shown.index("layer") :].splitlines()
    assert lines[0].split("  ")[0] == "layer"
    assert [line.split()[0] for line in lines[1:]] == [*"012345", "head", "all"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--timeline", ""), "--timeline is empty"),
        (("--timeline", "t.json", "-p", "0"), "--timeline has no prompt to tell of"),
        (("--timeline", "nowhere/t.json"), "cannot be written"),
        (("--timeline", "."), "cannot be written"),
        (("--timeline", "t.json", "--compare", "llama-bench=x"), "were both given"),
        (("--timeline", "t.json"), "backend cpu does not tell"),
        (("--timeline", "t.json", *ON_SIM), "a prompt of 20 tokens has no timeline"),
    ],
)
def test_a_timeline_that_cannot_be(more, what, strata, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = strata("bench", "demo", "-p", "20", "-n", "1", "-r", "1", *more)
    assert result.code == 2
    assert what in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_timeline_is_refused_before_the_bench_runs(strata, monkeypatch, tmp_path) -> None:
    model = tmp_path / "model.gguf"
    model.write_bytes(model_path("demo").read_bytes())
    before = model.read_bytes()

    def run(*_: object, **__: object) -> None:
        raise AssertionError("the bench ran")

    monkeypatch.setattr(Bench, "measure", run)
    call = ("bench", str(model), "-p", "20", "-n", "1", "-r", "1", "--timeline")
    result = strata(*call, str(model), *ON_SIM)
    assert result.code == 2
    assert "names a file of the model itself" in result.err
    assert model.read_bytes() == before
    result = strata(*call, str(tmp_path / "t.json"))
    assert result.code == 2
    assert "backend cpu does not tell" in result.err


def test_figures_are_shown_though_the_timeline_fails(strata, tmp_path) -> None:
    path = tmp_path / "t.json"
    result = strata("bench", "demo", *SMALL, *ON_SIM, "--timeline", str(path))
    assert result.code == 2
    assert "a prompt of 24 tokens has no timeline" in result.err
    assert "tokens/s" in result.out
    assert not path.exists()
