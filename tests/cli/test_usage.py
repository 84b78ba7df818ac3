"""Every wrong call ends with exit code 2, three lines, and no stack trace."""

from __future__ import annotations

import json
import shlex

import pytest

from strata_core.cli.main import LATER
from strata_core.setting_table import SETTINGS

WRONG = [
    # call, what it must say
    ("genrate demo x", "did you mean 'generate'"),
    ("--nope", "'--nope'"),
    ("--", "missing command"),
    ("generate", "MODEL is missing"),
    ("generate demo x y", "in quotes"),
    ("generate demo x --tempature 1", "did you mean '--temperature'"),
    ("generate demo x --temperature hot", "'hot' is not a number"),
    ("generate demo x --temperature nan", "not a number"),
    ("generate demo x --temperature -1", "--temperature"),
    ("generate demo x --top-k 1.5", "whole number"),
    ("generate demo x --top-p 0", "--top-p"),
    ("generate demo x --top-p 2", "at most 1"),
    ("generate demo x --min-p 2", "--min-p"),
    ("generate demo x --repetition-penalty 0", "--repetition-penalty"),
    ("generate demo x --seed -1", "--seed"),
    ("generate demo x --seed 18446744073709551616", "--seed"),
    ("generate demo x -n -1", "at least 0"),
    ("generate demo x -n many", "whole number"),
    ("generate demo x -n", "'-n' requires"),
    ("generate demo x --stop ''", "--stop"),
    ("generate demo x --json=yes", "--json"),
    ("generate demo x --stop \udcff", "--stop is not UTF-8"),
    ("generate demo --prompt-ids 1,,2", "'' is not a token id"),
    ("generate demo --prompt-ids=-3", "'-3' is not a token id"),
    ("generate demo --prompt-ids ''", "not a token id"),
    ("generate demo x --prompt-ids 1", "both given"),
    ("generate demo x --backend ''", "--backend"),
    ("generate demo x --kv fp17", "did you mean 'fp16'"),
    ("generate demo x --threads 0", "at least 1"),
    ("generate demo x --ram-budget none", "GiB"),
    ("generate demo x --max-context 0", "--max-context"),
    ("generate demo x --source arena --mmap-experts", "contradicts"),
    ("generate demo x --config /no/such/file", "--config"),
    ("plan demo --kv 8", "--kv"),
    ("plan demo --machine /no/such/file", "--machine"),
    ("perplexity demo", "--text is missing"),
    ("perplexity demo --text /no/such/file", "/no/such/file"),
    ("perplexity demo --text . --context 4", "'.' cannot be read"),
    ("perplexity demo --text x --context 1", "at least 2"),
    ("inspect", "MODEL is missing"),
    ("inspect ''", "MODEL is empty"),
    ("plan ''", "MODEL is empty"),
    ("generate '' x", "MODEL is empty"),
    ("inspect demo --kv fp16", "'--kv'"),
    ("plugins demo", "extra argument"),
    ("doctor --kv fp17 --nope", "'--nope'"),
]


@pytest.mark.parametrize(("call", "says"), WRONG, ids=[call for call, _ in WRONG])
def test_wrong_call(call: str, says: str, strata) -> None:
    result = strata(*shlex.split(call))
    assert result.code == 2
    assert result.out == ""
    assert says in "\n".join(result.error_lines)


@pytest.mark.parametrize(("call", "says"), WRONG[3:12], ids=[call for call, _ in WRONG[3:12]])
def test_wrong_call_with_json(call: str, says: str, strata) -> None:
    result = strata(*shlex.split(call), "--json")
    assert result.code == 2
    assert result.err == ""
    error = result.document["error"]
    assert error["type"] == "UsageError"
    assert says in json.dumps(error)


def test_json_after_two_dashes_is_text(strata) -> None:
    result = strata("generate", "demo", "--kv", "fp17", "--", "--json")
    assert "did you mean 'fp16'" in "\n".join(result.error_lines)


@pytest.mark.parametrize("name", LATER)
def test_later_commands_are_refused_by_name(name: str, strata) -> None:
    result = strata(name, "demo")
    assert result.code == 2
    assert f"{name!r} is not available in this version" in result.error_lines[0]


LATER_FLAGS = [setting for setting in SETTINGS if setting.pending and setting.flag]


@pytest.mark.parametrize("setting", LATER_FLAGS, ids=lambda s: s.key)
def test_later_flags_are_refused_by_name(setting, strata) -> None:
    value = [] if setting.kind == "switch" else ["6"]
    for command in ("generate", "plan", "plugins"):
        model = [] if command == "plugins" else ["demo"]
        result = strata(command, *model, setting.flag, *value)
        assert result.code == 2
        assert f"{setting.flag} is not available in this version" in result.error_lines[0]


@pytest.mark.parametrize(("variable", "value"), [("STRATA_KV", "fp17"), ("STRATA_SPEC", "6")])
def test_wrong_variable(variable: str, value: str, strata, monkeypatch) -> None:
    monkeypatch.setenv(variable, value)
    assert variable in strata("generate", "demo", "x").error_lines[0]


def test_wrong_settings_file(strata, tmp_path) -> None:
    file = tmp_path / "s.toml"
    file.write_text("sauce = 'mmap'")
    lines = strata("plan", "demo", "--config", str(file)).error_lines
    assert str(file) in lines[0]
    assert "did you mean 'source'" in lines[2]


def test_debug_shows_the_trace(strata) -> None:
    result = strata("generate", "demo", "x", "--kv", "fp17", "--debug")
    assert result.code == 2
    assert "Traceback" in result.err
    assert "UsageError" in result.err


def test_a_defect_is_reported_as_one(strata, monkeypatch) -> None:
    from strata_core.cli import plan

    def fail(*_args: object) -> None:
        raise KeyError("left over")

    monkeypatch.setattr(plan, "read_machine_file", fail)
    result = strata("plan", "demo", "--machine", "x")
    assert result.code == 1
    assert "KeyError" in result.error_lines[0]
    assert "--debug" in result.error_lines[2]


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (MemoryError(), "not enough memory"),
        (PermissionError(13, "Permission denied", "m.gguf"), "m.gguf: Permission denied"),
    ],
)
def test_what_the_system_refuses(error, says, strata, monkeypatch) -> None:
    from strata_core.cli import plan

    def fail(*_args: object) -> None:
        raise error

    monkeypatch.setattr(plan, "read_machine_file", fail)
    result = strata("plan", "demo", "--machine", "x")
    assert result.code == 1
    assert says in result.error_lines[0]
