"""Settings: which place wins, what each place may say, and how a mistake is reported."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core import config
from strata_core.config import resolve, resolve_arguments, unknown_variables, user_folder
from strata_core.errors import UsageError
from strata_core.setting_table import SETTINGS


def refused(**where: object) -> UsageError:
    with pytest.raises(UsageError) as caught:
        resolve(**{"environ": {}, **where})
    error = caught.value
    assert error.exit_code == 2
    for line in (error.what, error.why, error.remedy):
        assert line
        assert "\n" not in line
    return error


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "settings.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_defaults() -> None:
    settings = resolve({}, {})
    assert (settings.backend, settings.allocator, settings.source) == ("auto", "auto", "auto")
    assert settings.ram_reserve_gib == 6.0
    assert settings.kv is None
    assert settings.block_plugins == ()
    assert settings.given() == {}
    assert {row["origin"] for row in settings.rows()} == {"default"}


def test_flag_over_environment_over_file(tmp_path: Path) -> None:
    file = written(tmp_path, 'source = "arena"\nthreads = 2\nram_budget = 1.5\n')
    environ = {"STRATA_SOURCE": "mmap", "STRATA_THREADS": "3"}
    settings = resolve({"threads": "4", "kv": None}, environ, file)
    assert (settings.threads, settings.source, settings.ram_budget) == (4, "mmap", 1.5)
    assert settings.origin("threads") == "flag --threads"
    assert settings.origin("source") == "environment STRATA_SOURCE"
    assert settings.origin("ram_budget") == f"file {file}"
    assert settings.origin("kv") == "default"


def test_python_arguments_stand_where_flags_do(tmp_path: Path) -> None:
    settings = resolve_arguments({"ram_budget": 2, "source": "mmap"}, {"STRATA_RAM_BUDGET": "9"})
    assert settings.ram_budget == 2.0
    assert settings.origin("ram_budget") == "argument ram_budget"
    again = settings.with_arguments({"source": "arena"})
    assert (again.source, settings.source) == ("arena", "mmap")
    with pytest.raises(UsageError, match="did you mean 'ram_budget'"):
        resolve_arguments({"ram_buget": 2}, {})


def test_settings_are_not_other_attributes() -> None:
    settings = resolve({}, {})
    with pytest.raises(AttributeError, match="no setting 'colour'"):
        _ = settings.colour
    assert not hasattr(settings, "__array__")


@pytest.mark.parametrize(
    ("name", "environ", "expected"),
    [
        ("STRATA_CONFIG", lambda file: {"STRATA_CONFIG": str(file)}, "mmap"),
        ("none", lambda file: {}, "auto"),
        ("empty", lambda file: {"STRATA_CONFIG": ""}, "auto"),
    ],
)
def test_settings_file_by_variable(tmp_path, name, environ, expected) -> None:
    file = written(tmp_path, 'source = "mmap"')
    assert resolve({}, environ(file)).source == expected


@pytest.mark.skipif(sys.platform != "linux", reason="the folder is Linux's")
def test_users_own_settings_file(tmp_path: Path) -> None:
    (tmp_path / "strata").mkdir()
    file = written(tmp_path / "strata", "threads = 7")
    settings = resolve({}, {"XDG_CONFIG_HOME": str(tmp_path)})
    assert (settings.threads, settings.origin("threads")) == (7, f"file {file}")
    assert user_folder({"HOME": "/home/u", "XDG_CONFIG_HOME": "not/absolute"}) == Path(
        "/home/u/.config"
    )
    assert user_folder({}) is None


@pytest.mark.parametrize(
    ("platform", "environ", "folder"),
    [
        ("win32", {"APPDATA": "/roaming"}, "/roaming"),
        ("win32", {}, None),
        ("darwin", {"HOME": "/Users/u"}, "/Users/u/Library/Application Support"),
        ("linux", {"HOME": "/home/u"}, "/home/u/.config"),
    ],
)
def test_user_folder(monkeypatch, platform, environ, folder) -> None:
    monkeypatch.setattr(config.sys, "platform", platform)
    assert user_folder(environ) == (Path(folder) if folder else None)


# --- the source and its aliases ----------------------------------------------------------------


def test_alias_is_the_source() -> None:
    settings = resolve({"mmap_experts": True}, {})
    assert settings.source == "mmap"
    assert settings.origin("source") == "flag --mmap-experts"
    assert resolve({"mmap_experts": True, "source": "mmap"}, {}).source == "mmap"
    assert resolve({"mmap_experts": False}, {}).origin("source") == "default"


def test_two_different_sources_in_one_place() -> None:
    error = refused(flags={"source": "arena", "mmap_experts": True})
    assert "--mmap-experts" in error.what
    assert "arena" in error.what
    refused(environ={"STRATA_SOURCE": "arena", "STRATA_MMAP_EXPERTS": "1"})


def test_a_higher_place_settles_the_source() -> None:
    settings = resolve({"mmap_experts": True}, {"STRATA_SOURCE": "arena"})
    assert settings.source == "mmap"
    settings = resolve({"source": "arena"}, {"STRATA_MMAP_EXPERTS": "1"})
    assert settings.source == "arena"


# --- mistakes ----------------------------------------------------------------------------------

BAD = [
    ("backend", "", "name"),
    ("backend", "two words", "name"),
    ("source", "x" * 200, "name"),
    ("source", 3, "name"),
    ("threads", "0", "at least 1"),
    ("threads", "4.5", "whole number"),
    ("threads", "\u0663", "whole number"),
    ("threads", "9" * 5000, "whole number"),
    ("threads", 10**400, "at most 4096"),
    ("threads", True, "whole number"),
    ("max_context", "-1", "at least 1"),
    ("ram_budget", "0", "above 0"),
    ("ram_budget", "nan", "GiB"),
    ("ram_budget", "inf", "GiB"),
    ("ram_budget", "lots", "GiB"),
    ("ram_budget", 10**400, "GiB"),
    ("ram_budget", True, "GiB"),
    ("ram_budget", [1], "GiB"),
    ("ram_budget", "-3", "above 0"),
    ("ram_reserve_gib", "-1", "at least 0"),
    ("kv", "fp8", "fp32, fp16, int8"),
    ("kv", ["fp16"], "fp32, fp16, int8"),
    ("mmap_experts", "perhaps", "1 or 0"),
    ("block_plugins", "a,,b", "name"),
    ("block_plugins", 5, "names"),
    ("dump_first_logits", "a\0b", "path"),
    ("dump_first_logits", "", "path"),
]


@pytest.mark.parametrize(("key", "value", "why"), BAD)
def test_bad_flag(key: str, value: object, why: str) -> None:
    error = refused(flags={key: value})
    assert "--" + key.replace("_", "-") in error.what or key in error.what
    assert why in error.why


@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k, v, _ in BAD if isinstance(v, str) and v and "\0" not in v]
)
def test_bad_variable(key: str, value: str) -> None:
    assert f"STRATA_{key.upper()}" in refused(environ={f"STRATA_{key.upper()}": value}).what


@pytest.mark.parametrize(
    ("text", "what", "why"),
    [
        ('sorce = "arena"', "unknown key 'sorce'", "holds settings"),
        ("threads = 'two'", "settings.toml: threads", "whole number"),
        ("kv = 16", "settings.toml: kv", "fp32"),
        ("[model]\nkv = 'fp16'", "unknown key 'model'", "holds settings"),
        ("threads = ", "is not TOML", "Invalid value"),
        (b"\xff\xfe", "is not TOML", "utf-8"),
        ("a = " + "[" * 100_000, "is not TOML", "nest"),
        ("spec = 6", "settings.toml: spec is not available in this version", "not been built"),
        ("#" * (1 << 20) + "\n#", "larger than 1 MiB", "few lines"),
    ],
)
def test_bad_file(tmp_path: Path, text: str | bytes, what: str, why: str) -> None:
    error = refused(file=written(tmp_path, text))
    assert str(tmp_path / "settings.toml") in error.what
    assert what in error.what
    assert why in error.why


@pytest.mark.parametrize("name", ["absent.toml", ".", "a\0b", "x" * 5000])
def test_named_file_must_exist(tmp_path: Path, name: str) -> None:
    assert "--config" in refused(file=str(tmp_path / name)).what
    assert "STRATA_CONFIG" in refused(environ={"STRATA_CONFIG": str(tmp_path / name)}).what


@pytest.mark.parametrize("setting", [s for s in SETTINGS if s.pending], ids=lambda s: s.key)
def test_later_settings_are_refused_by_name(setting) -> None:
    where = {"flags": {setting.key: "1"}} if setting.flag else {"environ": {setting.env: "1"}}
    error = refused(**where)
    assert error.what == f"{setting.flag or setting.env} is not available in this version"


def test_unknown_variables_are_found() -> None:
    environ = {"STRATA_SORCE": "mmap", "STRATA_SOURCE": "mmap", "STRATA_TEST_MODELS": "x"}
    assert unknown_variables(environ) == ("STRATA_SORCE",)


# --- the table ---------------------------------------------------------------------------------


def test_table_names_are_unique_and_documented() -> None:
    for names in zip(*((s.key, s.env, s.flag or s.env) for s in SETTINGS), strict=True):
        assert len(set(names)) == len(SETTINGS)
    for setting in SETTINGS:
        assert setting.pending or setting.help.endswith(".")
        assert setting.default is None or setting.parse(setting.default) == setting.default


@given(
    st.sampled_from([s for s in SETTINGS if not s.pending]),
    st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.lists(st.integers())),
)
def test_every_value_is_taken_or_refused(setting, value) -> None:
    try:
        settings = resolve({setting.key: value}, {})
    except UsageError:
        refused(flags={setting.key: value})
        return
    if setting.alias is None and value is not None:
        kept = getattr(settings, setting.key)
        assert setting.parse(kept) == kept
