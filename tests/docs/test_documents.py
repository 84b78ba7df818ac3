"""The documents say what the program does: commands, links, names, examples."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest

from strata_core.cli.main import COMMANDS, main, root
from strata_core.cli.reference import reference
from strata_core.setting_table import SETTINGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
TOKEN = (ROOT / "docs" / "follow-one-token.md").read_text("utf-8")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def test_cli_reference_is_the_programs() -> None:
    written = (ROOT / "docs" / "cli.md").read_text("utf-8")
    assert written == reference(), "run: python -m strata_core.cli.reference > docs/cli.md"


def test_cli_reference_is_complete() -> None:
    text = reference()
    for name in COMMANDS:
        assert f"## strata {name}\n" in text
        command = root.get_command(click.Context(root), name)
        assert command is not None
        for param in command.params:
            if isinstance(param, click.Option) and not param.hidden:
                for option in param.opts:
                    assert f"`{option}`" in text, f"{option} of strata {name}"
    for setting in SETTINGS:
        assert f"`{setting.flag or setting.env}`" in text


# --- links and names ---------------------------------------------------------------------------


def links(text: str) -> list[str]:
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_somewhere(path: Path) -> None:
    for link in links(path.read_text("utf-8")):
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), f"{path.name} links to {link}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", file.read_text("utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^a-z0-9 -]", "", h.lower()).replace(" ", "-") for h in headings
            }


def defined(file: Path) -> set[str]:
    """Names that a module defines: functions, classes, their methods, and constants."""
    names: set[str] = set()
    for node in ast.parse(file.read_text("utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{n.name}" for n in node.body if isinstance(n, ast.FunctionDef)}
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


STOPS = re.findall(r"`(strata_core/[\w/]+\.py)(?:::([\w.]+))?`", TOKEN)


@pytest.mark.parametrize(("file", "name"), STOPS, ids=[f"{f}::{n}" for f, n in STOPS])
def test_every_stop_exists(file: str, name: str) -> None:
    assert (ROOT / file).is_file()
    if name:
        assert name in defined(ROOT / file)


def test_every_folder_is_a_stop() -> None:
    visited = {Path(file).parts[1] for file, _ in STOPS}
    folders = {p.parent.name for p in (ROOT / "strata_core").glob("*/__init__.py")}
    assert folders - {"demo", "testing"} <= visited


# --- the README --------------------------------------------------------------------------------


def commands() -> dict[str, str]:
    return dict(re.findall(r"<!-- command: (\w+) -->\n+```\w*\n(.+)\n```\n", README))


def test_readme_opens_with_two_commands_of_one_line() -> None:
    found = commands()
    assert list(found) == ["try", "test"]
    first_section = README.split("\n## ")[0]
    assert first_section.count("```") == 4
    assert 'strata generate demo "In the beginning"' in found["try"]
    assert found["test"].endswith(".venv/bin/python -m pytest")


def test_ci_runs_the_readmes_test_command() -> None:
    script = ROOT / ".ci" / "readme_command.py"
    if not script.exists():
        pytest.skip("a source distribution has no .ci folder")
    shown = subprocess.run(
        [sys.executable, str(script), str(ROOT / "README.md"), "test"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout == commands()["test"] + "\n"
    assert 'readme_command.py" "$root/README.md" test' in (ROOT / ".ci" / "run").read_text()
    missing = subprocess.run(
        [sys.executable, str(script), str(ROOT / "README.md"), "none"], capture_output=True
    )
    assert missing.returncode == 1


def test_readme_flags_and_variables_exist() -> None:
    known = {"--help"} | {s.flag for s in SETTINGS if s.flag and not s.pending}
    for name in COMMANDS:
        command = root.get_command(click.Context(root), name)
        assert command is not None
        known |= {opt for param in command.params for opt in param.opts}
    shown = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", README))
    assert shown
    assert shown <= known
    variables = {s.env for s in SETTINGS if not s.pending}
    assert set(re.findall(r"STRATA_\w+", README)) <= variables


def test_readme_commands_are_the_programs() -> None:
    blocks = "\n".join(re.findall(r"```sh\n(.*?)```", README, re.DOTALL))
    used = set(re.findall(r"^strata (\w+)|/strata (\w+)|`strata (\w+)", blocks, re.MULTILINE))
    names = {name for match in used for name in match if name}
    assert names
    assert names <= set(COMMANDS)


def test_readme_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})
    shown = capsys.readouterr().out
    main(["generate", "demo", "In the beginning", "-n", "32", "--quiet"])
    assert capsys.readouterr().out.startswith(shown)
    assert len(shown.split()) > 5


def test_changelog_has_the_version_or_unreleased() -> None:
    from strata_core import __version__

    text = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert "## Unreleased" in text or f"## {__version__}" in text
