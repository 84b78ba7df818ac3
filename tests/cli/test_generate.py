"""`strata generate` on the built-in model: text, document, prompts, sampling, output that ends."""

from __future__ import annotations

import hashlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from strata_core.cli.loading import LANES

PROMPT = "In the beginning God created"


@pytest.fixture(scope="session")
def reference(models: Path) -> dict:
    return json.loads((models / "kjv-moe" / "reference.json").read_text())


@pytest.mark.shared
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_greedy_tokens_are_the_reference_models(backend, strata, reference) -> None:
    result = strata(
        "generate", "demo", PROMPT, "-n", "32", "--ignore-eos", "--backend", backend, "--json"
    )
    assert result.document["token_ids"] == reference["variants"]["Q4_0"]["greedy"][0]
    assert result.document["prompt_tokens"] == len(reference["prompt_ids"][0])


@pytest.mark.shared
def test_first_logits_are_dumped(strata, models: Path, tmp_path, monkeypatch) -> None:
    file = tmp_path / "first.npy"
    monkeypatch.setenv("STRATA_DUMP_FIRST_LOGITS", str(file))
    args = ("generate", "demo", PROMPT, "-n", "1", "--temperature", "1", "--json")
    result = strata(*args, "--backend", "reference")
    logits = np.load(file)
    assert logits.dtype == np.float32
    expected = np.load(models / "kjv-moe" / "reference.npz")["Q4_0/logits0"]
    assert np.abs(logits - expected).max() < 2e-4
    digest = hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()
    assert result.document["first_logits_sha256"] == digest


def divergence(expected: np.ndarray, logits: np.ndarray) -> float:
    """Kullback-Leibler divergence of the distributions of two rows of logits, in nats."""

    def log_softmax(row: np.ndarray) -> np.ndarray:
        shifted = row.astype(np.float64) - row.max()
        return shifted - np.log(np.exp(shifted).sum())

    sure, seen = log_softmax(expected), log_softmax(logits)
    return float((np.exp(sure) * (sure - seen)).sum())


@pytest.mark.shared
@pytest.mark.parametrize(("kv", "most"), [("fp32", 3e-7), ("fp16", 4e-5)])
def test_first_logits_of_compiled_kernels(kv, most, strata, models, tmp_path, monkeypatch) -> None:
    """Activations of 15 bits, and what the type of the stored keys and values costs on top."""
    file = tmp_path / "first.npy"
    monkeypatch.setenv("STRATA_DUMP_FIRST_LOGITS", str(file))
    assert strata("generate", "demo", PROMPT, "-n", "1", "--kv", kv).code == 0
    expected = np.load(models / "kjv-moe" / "reference.npz")["Q4_0/logits0"]
    assert divergence(expected, np.load(file)) < most


def test_a_dump_that_cannot_be_written(strata, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_DUMP_FIRST_LOGITS", str(tmp_path / "no" / "first.npy"))
    result = strata("generate", "demo", PROMPT, "-n", "1")
    assert result.code == 1
    assert "first.npy" in result.error_lines[0]


def test_what_the_plan_made_worse_is_told(strata, monkeypatch) -> None:
    monkeypatch.setenv("STRATA_THREAD", "3")
    options = (PROMPT, "-n", "1", "--ram-budget", "90000", "--backend", "reference")
    items = strata("generate", "demo", *options, "--json").document["degradations"]
    assert [item["what"] for item in items] == [
        "the environment variable STRATA_THREAD is none of Strata's",
        next(item["what"] for item in items if "--ram-budget" in item["what"]),
    ]
    assert all(all(item.values()) for item in items)
    notes = strata("generate", "demo", *options).err
    assert f"degraded: {items[0]['what']}: {items[0]['why']}. Cost: {items[0]['cost']}." in notes
    assert "degraded: of the 90000.00 GiB of --ram-budget only " in notes


def test_document(strata) -> None:
    result = strata("generate", "demo", PROMPT, "-n", "4", "--json")
    assert (result.code, result.err) == (0, "")
    document = result.document
    assert len(document["token_ids"]) == 4
    assert document["reason"] == "length"
    assert document["exact"] is True
    assert len(document["first_logits_sha256"]) == 64
    assert [item["role"] for item in document["selections"]] == ["backend", "allocator", "source"]
    assert set(LANES) <= set(document["counters"])
    # 6 layers of which each token asks 4 experts; 6 prompt tokens share what they ask alike.
    decoded = 3 * 6 * 4
    assert decoded < document["counters"]["cpu"]["experts"] <= decoded + 6 * 6 * 4
    assert document["counters"]["cpu"]["bytes"] > 0
    assert document["counters"]["hit"] == {"experts": 0, "bytes": 0}
    timings = document["timings"]
    assert timings["rounds"] == 3
    assert 0 < timings["prompt_s"] < timings["total_s"]
    assert 0 < timings["decode_s"] < timings["total_s"]
    assert timings["load_s"] > 0
    assert [item["what"] for item in document["degradations"]] == ["the backend cpu is a fallback"]


def test_text_is_the_documents_text(strata) -> None:
    shown = strata("generate", "demo", PROMPT, "-n", "9")
    document = strata("generate", "demo", PROMPT, "-n", "9", "--json").document
    assert shown.out == document["text"] + "\n"
    assert "loaded in" in shown.err
    assert "backend cpu" in shown.err


def test_quiet(strata) -> None:
    assert strata("generate", "demo", PROMPT, "-n", "2", "--quiet").err == ""


def test_sources_give_the_same_tokens(strata) -> None:
    arena = strata("generate", "demo", PROMPT, "-n", "6", "--source", "arena", "--json").document
    mapped = strata("generate", "demo", PROMPT, "-n", "6", "--mmap-experts", "--json").document
    for key in ("token_ids", "text", "first_logits_sha256"):
        assert arena[key] == mapped[key]
    assert mapped["selections"][2]["name"] == "mmap"


def test_prompt_ids_are_the_text(strata) -> None:
    text = strata("generate", "demo", PROMPT, "-n", "3", "--json").document
    ids = "41,78,259,2110,389,3371"
    assert (
        strata("generate", "demo", "--prompt-ids", ids, "-n", "3", "--json").document[
            "first_logits_sha256"
        ]
        == text["first_logits_sha256"]
    )


@pytest.mark.parametrize("argument", [[], ["-"]])
def test_prompt_from_stdin(argument, strata, monkeypatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{PROMPT}\n".encode())))
    piped = strata("generate", "demo", *argument, "-n", "3", "--json").document
    assert (
        piped["token_ids"]
        == strata("generate", "demo", PROMPT, "-n", "3", "--json").document["token_ids"]
    )


def test_sampling_and_seed(strata) -> None:
    def ids(*more: str) -> list[int]:
        args = ("generate", "demo", PROMPT, "-n", "8", "--json", "--temperature", "1.5", *more)
        return strata(*args).document["token_ids"]

    assert ids("--seed", "1") == ids("--seed", "1")
    assert ids("--seed", "1") != ids("--seed", "2")
    greedy = strata("generate", "demo", PROMPT, "-n", "8", "--json").document["token_ids"]
    assert ids("--top-k", "1", "--seed", "3") == greedy
    assert ids("--min-p", "1", "--seed", "3") == greedy
    assert ids("--top-p", "1e-9", "--seed", "3") == greedy
    assert ids("--top-k", "1", "--repetition-penalty", "9") != greedy


def test_stop_ends_before_the_text(strata) -> None:
    whole = strata("generate", "demo", PROMPT, "-n", "12", "--json").document["text"]
    stop = whole[len(whole) // 2 :][:4]
    shown = strata("generate", "demo", PROMPT, "-n", "12", "--stop", "nowhere", "--stop", stop)
    assert shown.out == whole[: whole.index(stop)] + "\n"
    held = strata("generate", "demo", PROMPT, "-n", "12", "--stop", whole[-3:] + "~~~~")
    assert held.out == whole + "\n", "what was held back for a stop that did not come is shown"


def test_no_tokens_at_all(strata) -> None:
    document = strata("generate", "demo", PROMPT, "-n", "0", "--json").document
    assert (document["text"], document["token_ids"]) == ("", [])
    assert document["prompt_tokens"] == 6


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["demo", ""], "the prompt is empty"),
        (["demo", "--prompt-ids", "0,4096"], "4096"),
        (["demo", "word " * 3000], "too long"),
        (["demo", PROMPT * 10, "--max-context", "8"], "too long"),
        (["demo", PROMPT, "--backend", "refrence"], "--backend reference"),
        (["demo", PROMPT, "--source", "memory"], "there is no source 'memory'"),
        (["demo", PROMPT, "--allocator", "none"], "there is no allocator 'none'"),
        (["demo", PROMPT, "--max-context", "100000"], "--max-context"),
        (["/no/such/model.gguf", PROMPT], "/no/such/model.gguf"),
        ([".", PROMPT], "holds no model"),
        ([__file__, PROMPT], "test_generate.py"),
        (["a\0b", PROMPT], "path"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_the_model_refuses(args, says, strata) -> None:
    result = strata("generate", *args)
    assert result.code == 2
    assert says in "\n".join(result.error_lines)


def test_what_does_not_fit_fails(strata) -> None:
    result = strata("generate", "demo", PROMPT, "--ram-budget", "0.01")
    assert result.code == 1
    assert "short by" in result.error_lines[0]


def test_folder_without_a_tokenizer_takes_ids(strata, models: Path) -> None:
    tiny = str(models / "tiny" / "qwen3_moe")
    result = strata("generate", tiny, "--prompt-ids", "5,9,3", "-n", "4", "--ignore-eos")
    document = strata(
        "generate", tiny, "--prompt-ids", "5,9,3", "-n", "4", "--ignore-eos", "--json"
    ).document
    assert [int(word) for word in result.out.split()] == document["token_ids"]
    assert document["text"] == ""
    refused = strata("generate", tiny, "text")
    assert refused.code == 2
    assert "no tokenizer" in refused.err
    assert "--prompt-ids" in refused.error_lines[2]


@pytest.mark.parametrize("damage", ["truncated", "empty", "flipped"])
def test_damaged_models(damage, strata, tmp_path) -> None:
    from strata_core.demo import PATH

    data = bytearray(PATH.read_bytes())
    if damage == "truncated":
        del data[len(data) // 2 :]
    elif damage == "empty":
        data.clear()
    else:
        data[40] ^= 0xFF
    file = tmp_path / "model.gguf"
    file.write_bytes(data)
    for command in (["generate", str(file), "x"], ["inspect", str(file)], ["plan", str(file)]):
        result = strata(*command)
        assert result.code == 2
        assert str(file) in result.error_lines[0]
