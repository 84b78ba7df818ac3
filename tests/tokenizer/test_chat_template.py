"""Chat templates: what they are given, where they come from, and what they cannot do."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError, UsageError
from strata_core.testing.tiny import write_tiny_gguf, write_tiny_hub
from strata_core.tokenizer import NoChatTemplate, Tokenizer, open_tokenizer
from strata_core.tokenizer.chat_template import ChatTemplate

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Grüße <b>"},
]
CHATML = """
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\n' + message['content'] | trim + '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
COUNTED = "{% set n = namespace(x=0) %}{% for m in messages %}{% set n.x = n.x + 1 %}{% endfor %}"
RENDERED = (
    "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nGrüße <b><|im_end|>\n"
    "<|im_start|>assistant\n"
)


def render(source: str, **variables: Any) -> str:
    template = ChatTemplate("model.gguf", source, {"bos_token": "<s>", "eos_token": "</s>"})
    return template.render(**{"messages": MESSAGES, "add_generation_prompt": True, **variables})


def opened(tokenizer: Tokenizer | None) -> Tokenizer:
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (CHATML, RENDERED),
        ("{{ bos_token }}|{{ eos_token }}|{{ tools is none }}|{{ absent is defined }}", None),
        ("{{ messages | tojson }}", json.dumps(MESSAGES, ensure_ascii=False)),
        ("{{ {'b': 1, 'a': '<é>'} | tojson(indent=2) }}", '{\n  "b": 1,\n  "a": "<é>"\n}'),
        ("{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{% endfor %}", "0False1True"),
        ("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}", "012"),
        ("{% generation %}x{% endgeneration %}y", "xy"),
        (COUNTED + "{{ n.x ~ '!' ~ 1.5 }}", "2!1.5"),
        ("{{ messages | map(attribute='role') | join(', ') }}", "system, user"),
        ("{{ messages | selectattr('role', 'equalto', 'user') | list | length }}", "1"),
        ("{{ messages[::-1][0].content.split(' ')[-1].upper() }}", "<B>"),
        ("{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f('a') ~ f('b') }}", "[a][b]"),
        ("{{ '%s-%s' | format('a', 2) }} {{ '{}'.format(3) }} {{ 7 % 4 }} {{ 2 * 'ab' }}",
         "a-2 3 3 abab"),
        ("{{ 'a\nb' | indent(2) }}", "a\n  b"),
        ("{{ strftime_now('%Y') | int > 2000 }}", "True"),
        ("    {% if true %}\n  x\n    {% endif %}\n", "  x\n"),
    ],
)  # fmt: skip
def test_the_dialect(source: str, expected: str | None) -> None:
    assert render(source) == (expected if expected is not None else "<s>|</s>|True|False")


HOSTILE = {
    "long loops": "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}",
    "range": "{% for i in range(10000000000) %}x{% endfor %}",
    "attributes": "{{ messages.__class__.__mro__ }}",
    "subclasses": "{{ ''.__class__.__base__.__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__ }}",
    "filter attr": "{{ '' | attr('__class__') }}",
    "changes its input": "{% set _ = messages.append(1) %}",
    "grows by ~": "{% set n = namespace(x='a' * 999) %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}",
    "grows by +": "{% set n = namespace(x='a' * 999) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "grows a list": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}"
    "{% set n.x = n.x + n.x %}{% endfor %}",
    "multiplies": "{{ 'a' * 10 ** 12 }}",
    "powers": "{{ 10 ** 10 ** 10 ** 10 }}",
    "% width": "{{ '%1000000000d' % 1 }}",
    "% star": "{{ '%*d' % (1000000000, 1) }}",
    "format width": "{{ '{:1000000000}'.format(1) }}",
    "format argument": "{{ '{0:{1}}'.format(1, 1000000000) }}",
    "filter format": "{{ '%1000000000d' | format(1) }}",
    "center": "{{ 'a' | center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "replace": "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "filter replace": "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "join": "{{ ('b' * 1000000).join(range(100000) | map('string')) }}",
    "indent": "{{ ('\n' * 1000000) | indent(100000) }}",
    "output": "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    "calls": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
    "{{ f(60) }}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "lipsum": "{{ lipsum(1000) }}",
    "nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "syntax": "{% for %}",
    "undefined": "{{ nothing.at.all }}",
    "length": "x" * ((1 << 20) + 1),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_templates_are_contained(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_core.tokenizer.sandbox.SECONDS", 1.0)
    began = time.thread_time()
    with pytest.raises(CheckpointError) as caught:
        render(HOSTILE[case])
    assert time.thread_time() - began < 4.0
    assert "model.gguf: the chat template" in caught.value.what
    assert "\n" not in caught.value.why


def test_a_pause_of_the_machine_is_not_the_templates_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strata_core.tokenizer.sandbox.SECONDS", 0.3)
    source = "{{ pause() }}{% for m in messages %}{{ m.role }} {% endfor %}"
    assert render(source, pause=lambda: time.sleep(0.4) or "") == "system user "


def test_long_messages_are_no_offence() -> None:
    long = [{"role": "user", "content": "x" * 6_000_000}]
    assert len(
        render("{% for m in messages %}{{ m.content ~ '!' }}{% endfor %}", messages=long)
    ) == (6_000_001)


def test_a_template_may_refuse_a_conversation() -> None:
    with pytest.raises(UsageError) as caught:
        render("{{ raise_exception('roles must alternate') }}")
    assert caught.value.why == "roles must alternate"


def test_a_template_from_gguf_metadata(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, tokenizer=True, metadata={"tokenizer.chat_template": CHATML})
    tokenizer = opened(open_tokenizer(open_checkpoint(path)))
    assert tokenizer.has_chat_template
    assert tokenizer.render_chat(MESSAGES) == RENDERED
    without = tokenizer.render_chat(MESSAGES, add_generation_prompt=False)
    assert without == RENDERED.removesuffix("<|im_start|>assistant\n")


def test_a_model_without_a_template(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, tokenizer=True)
    tokenizer = opened(open_tokenizer(open_checkpoint(path)))
    assert not tokenizer.has_chat_template
    with pytest.raises(NoChatTemplate, match="no chat template") as caught:
        tokenizer.render_chat(MESSAGES)
    assert caught.value.exit_code == 2


@pytest.mark.shared
@pytest.mark.parametrize(
    ("settings", "own"),
    [
        ({"chat_template": "{{ bos_token }}{{ messages[0].role }}"}, None),
        ({"chat_template": [{"name": "x", "template": "no"},
                            {"name": "default", "template": "{{ bos_token }}system"}]}, None),
        ({"chat_template": "old"}, "{{ bos_token }}system"),
    ],
)  # fmt: skip
def test_templates_of_a_folder(
    tmp_path: Path, models: Path, settings: dict[str, Any], own: str | None
) -> None:
    write_tiny_hub(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((models / "kjv-moe" / "tokenizer.json").read_bytes())
    settings["bos_token"] = {"content": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    if own is not None:
        (tmp_path / "chat_template.jinja").write_text(own)
    tokenizer = opened(open_tokenizer(open_checkpoint(tmp_path)))
    assert tokenizer.render_chat(MESSAGES) == "<|endoftext|>system"


def test_a_template_of_the_wrong_kind(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, tokenizer=True, metadata={"tokenizer.chat_template": 3})
    with pytest.raises(CheckpointError, match=r"tokenizer\.chat_template"):
        open_tokenizer(open_checkpoint(path))
