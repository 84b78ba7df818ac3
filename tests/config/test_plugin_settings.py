"""Settings that plugins declare: what is read, what is refused, and that nothing is imported."""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path

import click
import pytest

from strata_core.cli.command import SectionedOption
from strata_core.cli.main import COMMANDS, root
from strata_core.config import resolve, unknown_variables, variable_degradations
from strata_core.errors import UsageError
from strata_core.setting import HIDDEN, made
from strata_core.setting_plugins import OPTION_WORDS, Table, installed_settings
from strata_core.setting_table import SETTINGS

GOOD = """
api = [1, 0]

[url]
kind = "text"
help = "Where it is."
metavar = "URL"

[retries]
kind = "integer"
low = 0
high = 9
default = 5
help = "How often."

[quick]
kind = "switch"
help = "Whether."
flag = false
"""


@pytest.fixture
def declare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """declare(name, text): an entry point of a distribution whose package holds this file."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(
        name: str, text: str | None, version: str = "1.0", package: str = ""
    ) -> metadata.EntryPoint:
        distribution = f"strata-{name}-{version}"
        info = tmp_path / f"{distribution.replace('-', '_')}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: strata-{name}\nVersion: {version}\n"
        )
        module = package or f"plugged_{name.replace('-', '_')}_{version[0]}"
        (info / "entry_points.txt").write_text(f"[strata.settings]\n{name} = {module}\n")
        if not package:
            (tmp_path / module).mkdir()
            (tmp_path / module / "__init__.py").write_text("raise SystemExit('imported')\n")
            if text is not None:
                (tmp_path / module / "settings.toml").write_text(text)
        (found,) = metadata.PathDistribution(info).entry_points
        return found

    return write


def test_what_is_declared_becomes_settings(declare) -> None:
    table = installed_settings([declare("far-away", GOOD)])
    assert not table.broken
    quick, retries, url = table.plugged
    assert (url.key, url.flag, url.env) == (
        "far_away_url",
        "--far-away-url",
        "STRATA_FAR_AWAY_URL",
    )
    assert (url.default, retries.default, quick.default) == (None, 5, False)
    assert (quick.flag, quick.env) == (None, "STRATA_FAR_AWAY_QUICK")
    assert url.values == ("URL",)
    assert url.help == "Where it is. (strata-far-away 1.0)"
    assert {setting.group for setting in table.plugged} == {"plugins"}
    assert set(table.by_key) == {s.key for s in SETTINGS} | {s.key for s in table.plugged}
    assert "plugged_far_away_1" not in sys.modules


def test_values_come_from_flag_variable_file_and_arguments(declare, tmp_path: Path) -> None:
    table = installed_settings([declare("far", GOOD)])
    file = tmp_path / "settings.toml"
    file.write_text('far_retries = 1\nfar_url = "file"\nfar_quick = true\n')
    found = resolve(
        {"far_url": "flag"}, {"STRATA_FAR_URL": "env", "STRATA_FAR_RETRIES": "2"}, file, table
    )
    assert (found.far_url, found.far_retries, found.far_quick) == ("flag", 2, True)
    assert found.origin("far_url") == "flag --far-url"
    assert found.origin("far_retries") == "environment STRATA_FAR_RETRIES"
    assert found.origin("far_quick") == f"file {file}"
    assert found.with_arguments({"far_retries": 9}).far_retries == 9
    assert found.options()["far_url"] == "flag"
    rows = {row["key"]: row for row in found.rows()}
    assert rows["far_url"]["value"] == "flag"
    assert "STRATA_FAR_URL" not in unknown_variables({"STRATA_FAR_URL": "x"}, table)
    assert unknown_variables({"STRATA_FAR_URI": "x"}, table) == ("STRATA_FAR_URI",)
    assert resolve({}, {}, table=table).options()["far_retries"] == 5


def test_an_error_names_who_declares_the_setting(declare) -> None:
    table = installed_settings([declare("far", GOOD)])
    with pytest.raises(UsageError) as caught:
        resolve({"far_retries": "10"}, {}, table=table)
    assert "--far-retries" in caught.value.what
    assert "at most 9" in caught.value.why
    assert "strata-far 1.0 declares it" in caught.value.why
    with pytest.raises(UsageError, match="STRATA_FAR_QUICK"):
        resolve({}, {"STRATA_FAR_QUICK": "maybe"}, table=table)


ONE = 'api = [1, 0]\n[a]\nhelp = "A."\n'
BROKEN = {
    "no file": (None, "holds no settings.toml"),
    "not TOML": ("api = [1, 0", "is not TOML"),
    "no settings": ("api = [1, 0]", "must declare 1 to 64 settings"),
    "no api": ('[a]\nkind = "text"\nhelp = "A."', "api must be"),
    "a later api": ('api = [1, 99]\n[a]\nkind = "text"\nhelp = "A."', "version 1.99; this core"),
    "another api": ('api = [2, 0]\n[a]\nkind = "text"\nhelp = "A."', "version 2.0; this core"),
    "no kind": (ONE, "kind must be one of"),
    "a kind of its own": (ONE + 'kind = "colour"', "kind must be one of"),
    "no help": ('api = [1, 0]\n[a]\nkind = "text"', "help must be one line"),
    "two lines of help": ('api = [1, 0]\n[a]\nkind = "text"\nhelp = "a\\nb"', "help must be"),
    "a field too many": (ONE + 'kind = "text"\nenv = "HOME"', "unknown field 'env'"),
    "a wrong default": (ONE + 'kind = "integer"\ndefault = "x"', "default 'x'"),
    "a default out of bounds": (ONE + 'kind = "integer"\nhigh = 3\ndefault = 4', "default 4"),
    "a choice without choices": (ONE + 'kind = "choice"', "needs choices"),
    "choices twice": (ONE + 'kind = "choice"\nchoices = ["a", "a"]', "choices must be"),
    "limits of a text": (ONE + 'kind = "text"\nlow = 3', "low is for numbers"),
    "a limit that is none": (ONE + 'kind = "integer"\nlow = "a"', "low must be a number"),
    "a name with capitals": ('api = [1, 0]\n[A]\nkind = "text"\nhelp = "A."', "lower-case words"),
    "no table": ("api = [1, 0]\na = 3", "a table is wanted"),
    "much too long": ("#" * (1 << 17), "larger than"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_declaration_is_left_out_and_named(case: str, declare) -> None:
    text, says = BROKEN[case]
    table = installed_settings([declare("bad", text), declare("far", GOOD)])
    assert [s.key for s in table.plugged] == ["far_quick", "far_retries", "far_url"]
    (broken,) = table.broken
    assert (broken.distribution, broken.version, broken.entry_point) == ("strata-bad", "1.0", "bad")
    assert says in broken.error
    assert len(broken.error.splitlines()) == 1


@pytest.mark.parametrize("package", ["no_such_package", "os.path", "far:attr", "tomllib"])
def test_only_packages_with_the_file_are_taken(package: str, declare) -> None:
    table = installed_settings([declare("bad", None, package=package)])
    assert not table.plugged
    assert len(table.broken) == 1


@pytest.mark.parametrize("name", ["ram", "max", "test", "top", "expert-cache", "sim", "Far", "9"])
def test_a_namespace_that_core_uses_is_refused(name: str, declare) -> None:
    table = installed_settings([declare(name, GOOD)])
    assert not table.plugged
    assert len(table.broken) == 1


def test_option_words_are_those_of_the_commands() -> None:
    words = set()
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        for param in [*root.params, *command.params]:
            setting = isinstance(param, SectionedOption) and param.name in {
                item.key for item in SETTINGS
            }
            if isinstance(param, click.Option) and not setting:
                longs = [opt[2:] for opt in param.opts if opt.startswith("--")]
                words |= {long.split("-")[0] for long in longs}
    assert words <= OPTION_WORDS, words - OPTION_WORDS


def test_a_setting_of_two_plugins_is_neither_s(declare) -> None:
    one, two = declare("far", GOOD, "1.0"), declare("far", GOOD, "2.0")
    for order in ([one, two], [two, one]):
        table = installed_settings(order)
        assert not table.plugged
        assert [item.version for item in table.broken] == ["1.0", "2.0"]
        assert all("by strata-far 1.0 and by strata-far 2.0" in item.error for item in table.broken)


def test_what_a_broken_plugin_would_have_declared_is_explained(declare, tmp_path: Path) -> None:
    table = installed_settings([declare("bad", "api = 1")])
    file = tmp_path / "settings.toml"
    file.write_text("bad_url = 1\n")
    with pytest.raises(UsageError) as caught:
        resolve({}, {}, file, table)
    assert "strata-bad 1.0 (bad)" in caught.value.why
    assert "api must be" in caught.value.why
    (degradation,) = variable_degradations({"STRATA_BAD_URL": "x"}, table)
    assert "strata-bad 1.0 (bad)" in degradation.why
    assert table.lost("--other") == ""


def test_a_package_in_a_zip_file_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import zipfile

    archive = tmp_path / "plugged.zip"
    with zipfile.ZipFile(archive, "w") as target:
        target.writestr("plugged_zip/__init__.py", "raise SystemExit\n")
        target.writestr("plugged_zip/settings.toml", GOOD)
    monkeypatch.syspath_prepend(str(archive))
    entry = metadata.EntryPoint("far", "plugged_zip", "strata.settings")
    table = installed_settings([entry])
    assert [s.key for s in table.plugged] == ["far_quick", "far_retries", "far_url"]
    assert re.fullmatch(r"\(no distribution\) \?", table.plugged[0].origin)


# --- what is not shown -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value", "hidden"),
    [
        ("far_options", '{"anon": true}', False),
        ("far_options", '{"key": "AKIA", "secret": "x"}', True),
        ("far_options", "{'aws_access_key_id': 'x'}", True),
        ("far_options", '{"account_key": "x"}', True),
        ("far_options", '{"headers": {"Authorization": "Bearer x"}}', True),
        ("far_url", "https://host/path", False),
        ("far_url", "https://name:word@host/path", True),
        ("far_url", "https://host/path?sv=1&sig=abc", True),
        ("far_url", "https://host/monkey/keyboards", False),
        ("far_token", "anything", True),
        ("far_token", None, False),
    ],
)
def test_what_carries_a_secret_is_hidden(key: str, value: str | None, hidden: bool) -> None:
    setting = made(key, "text", "plugins", "Help.")
    assert setting.hides(value) is hidden
    table = Table((setting,))
    settings = resolve({} if value is None else {key: value}, {}, table=table)
    (row,) = (row for row in settings.rows() if row["key"] == key)
    assert row["value"] == (HIDDEN if hidden else value)
    assert settings.options()[key] == value


def test_a_declared_secret_is_in_no_message() -> None:
    setting = made("far_pin", "integer", "plugins", "Help.", secret=True)
    table = Table((setting,))
    with pytest.raises(UsageError) as caught:
        resolve({"far_pin": "12x4"}, {}, table=table)
    assert "12x4" not in str(caught.value.as_json())
    rows = {row["key"]: row["value"] for row in resolve({"far_pin": "124"}, {}, table=table).rows()}
    assert rows["far_pin"] == HIDDEN
