"""`strata chat`: turns through a template, as one text with --raw, and what a model must have."""

from __future__ import annotations

import io
import json
import shutil
import sys
from pathlib import Path

import pytest

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)


@pytest.fixture
def say(monkeypatch, strata):
    """Chat with these lines on stdin."""

    def call(lines: str, *args: str):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
        return strata("chat", *args)

    return call


@pytest.fixture
def templated(models: Path, tmp_path: Path) -> str:
    """The trained model's folder with a chat template."""
    folder = tmp_path / "chat"
    folder.mkdir()
    for file in (models / "kjv-moe").iterdir():
        if file.suffix in (".safetensors", ".json") and not file.name.startswith("reference"):
            (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    body = json.loads(config.read_text())
    config.unlink()
    config.write_text(json.dumps({**body, "chat_template": TEMPLATE}))
    return str(folder)


def test_a_model_without_template_is_told_so(say) -> None:
    result = say("Hello\n", "demo")
    assert result.code == 2
    assert result.out == ""
    assert "no chat template" in result.error_lines[0]
    assert "--raw" in result.error_lines[2]


def test_raw_goes_on_as_one_text(say, strata) -> None:
    result = say("In the beginning\nAnd\n", "demo", "--raw", "-n", "6")
    assert result.code == 0
    text = "In the beginning"
    first = strata("generate", "demo", text, "-n", "6").out
    second = strata("generate", "demo", f"{text}{first}And", "-n", "6").out
    assert result.out == first + second


def test_reset_and_empty_lines(say) -> None:
    plain = say("In the beginning\n", "demo", "--raw", "-n", "4", "--json").document
    reset = say("And\n\n/reset\nIn the beginning\n", "demo", "--raw", "-n", "4", "--json").document
    assert reset["messages"] == plain["messages"]
    assert [m["role"] for m in plain["messages"]] == ["user", "assistant"]
    assert plain["counters"]["cpu"]["experts"] > 0


@pytest.mark.shared
def test_template_puts_turns_into_words(say, templated, strata) -> None:
    result = say("Who art thou?\n", templated, "--system", "Speak.", "-n", "5", "--json")
    messages = result.document["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant"]
    rendered = "[system] Speak.\n[user] Who art thou?\n[assistant] "
    expected = strata("generate", templated, rendered, "-n", "5", "--json").document
    assert messages[-1]["content"] == expected["text"]


def test_a_conversation_that_outgrows_the_context(say) -> None:
    result = say("word " * 50 + "\n", "demo", "--raw", "--max-context", "16", "--quiet")
    assert result.code == 2
    assert "too long" in result.error_lines[0]


def test_the_oldest_turns_are_left_out_where_the_context_is_full(say, strata) -> None:
    lines = ["In the beginning", "And God said", "And there was", "And the earth"]
    asked = ("demo", "--raw", "-n", "4", "--max-context", "20")
    document = say("\n".join(lines) + "\n", *asked, "--json").document
    kept, left_out = document["messages"], document["left_out"]
    assert left_out in (2, 4)
    assert len(kept) + left_out == 2 * len(lines)
    assert [m["content"] for m in kept[::2]] == lines[left_out // 2 :]
    text = "".join(
        ("\n" if i and not i % 2 else "") + m["content"] for i, m in enumerate(kept[:-1])
    )
    alone = strata("generate", "demo", text, "-n", "4", "--max-context", "20", "--json").document
    assert kept[-1]["content"] == alone["text"]
    told = say("\n".join(lines) + "\n", *asked).err
    assert "longer than the context of 20 tokens: its oldest 2 messages are left out" in told
    assert "--max-context" in told


@pytest.mark.shared
def test_the_system_message_stays(say, templated) -> None:
    lines = "\n".join(["And God said"] * 4) + "\n"
    asked = (templated, "--system", "Speak.", "-n", "4", "--max-context", "48", "--json")
    document = say(lines, *asked).document
    roles = [m["role"] for m in document["messages"]]
    assert roles == ["system"] + ["user", "assistant"] * ((8 - document["left_out"]) // 2)
    assert document["left_out"] in (2, 4, 6)


def test_an_answer_that_fills_the_context_says_so(say) -> None:
    told = say("In the beginning\n", "demo", "--raw", "-n", "99", "--max-context", "8").err
    assert "the answer ends here because the context of 8 tokens is full" in told


def test_a_line_that_is_too_long_is_refused_and_not_cut(say) -> None:
    result = say("é" * (1 << 19) + "x\n", "demo", "--raw", "--quiet")
    assert result.code == 2
    assert result.error_lines[0].endswith("a turn is too long")
    assert result.out == ""


@pytest.fixture
def typed(monkeypatch, strata):
    """`strata chat` of what somebody types."""

    class Typed:
        def isatty(self) -> bool:
            return True

    def talk(turns: list[str], *arguments: str):
        left = iter(turns)

        def answer(_prompt: str) -> str:
            try:
                return next(left)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr(sys, "stdin", Typed())
        monkeypatch.setattr("builtins.input", answer)
        return strata("chat", *arguments)

    return talk


def test_a_typed_conversation_goes_on_after_an_error(typed) -> None:
    turns = ["word " * 50, "In the beginning"]
    result = typed(turns, "demo", "--raw", "--max-context", "16", "--quiet", "-n", "3")
    assert result.code == 0
    assert "too long" in result.error_lines[0]
    assert len(result.out.splitlines()) == 2


def test_a_turn_that_is_refused_leaves_no_earlier_turn_out(typed) -> None:
    turns = ["In the beginning", "And God said", "And there was"]
    asked = ("demo", "--raw", "--max-context", "64", "-n", "4")
    plain = typed(turns, *asked)
    refused = typed([*turns[:2], "word " * 90, turns[2]], *asked)
    assert "too long" in refused.err
    assert "left out" not in refused.err
    assert refused.out == plain.out


def test_turn_that_is_not_utf8(monkeypatch, strata) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a\xff\n")))
    result = strata("chat", "demo", "--raw", "--quiet")
    assert result.code == 2
    assert "not UTF-8" in result.error_lines[0]


def test_damaged_template(say, templated: str) -> None:
    config = Path(templated) / "tokenizer_config.json"
    body = json.loads(config.read_text())
    config.write_text(json.dumps({**body, "chat_template": "{% for %}"}))
    result = say("Hello\n", templated, "--quiet")
    assert result.code == 2
    assert "tokenizer_config.json" in "\n".join(result.error_lines)
    shutil.rmtree(templated)
