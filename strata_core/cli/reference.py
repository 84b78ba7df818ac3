"""docs/cli.md, written from the commands themselves: `python -m strata_core.cli.reference`."""

from __future__ import annotations

import re
import sys

import click

from strata_core.cli.command import SectionedOption
from strata_core.cli.main import COMMANDS, LATER, root
from strata_core.config import CONFIG_VARIABLE
from strata_core.setting_table import SETTINGS

_INTRODUCTION = """\
# Command line

<!-- Written by `python -m strata_core.cli.reference > docs/cli.md`; do not edit by hand. -->

`MODEL` is a GGUF file (any shard of a split one), a folder in the hub's layout (config.json and
safetensors files), a pack (a folder that `strata pack` wrote), or `demo`, the built-in model.

Every command takes `--json` and then prints one document on stdout; everything else it has to say
goes to stderr. Exit codes: 0 done, 1 failed, 2 bad use or bad input, 130 interrupted. An error is
three lines: what, why, and what to do; `--debug` adds the stack trace. With `--json` an error is
the document `{"error": {"type", "what", "why", "remedy"}}`.

A setting can be given as a flag, as an environment variable, or in a settings file; a flag wins
over a variable and a variable over the file. `strata doctor` shows each value and where it came
from.
"""

_SETTINGS = f"""\
## Settings

The settings file is TOML with these keys at its top level. It is the file that `--config` or
`{CONFIG_VARIABLE}` names, else `strata/settings.toml` in the user's configuration folder
(`~/.config`, `~/Library/Application Support`, `%APPDATA%`) if there is one. Switches take 1 or 0
in a variable, true or false in the file. An empty variable counts as unset.

| flag | key | variable | value | meaning |
|---|---|---|---|---|"""

_COMMON = """
Every command also takes `--config FILE`, `--json`, `-q` / `--quiet` (neither progress nor a
summary on stderr), `--debug` (the stack trace of an error) and `-h` / `--help`.
"""


def reference() -> str:
    """The whole of docs/cli.md."""
    parts = [_INTRODUCTION]
    context = click.Context(root, info_name="strata")
    for name in COMMANDS:
        command = root.get_command(context, name)
        assert command is not None, "every name in COMMANDS has a module"
        parts.append(_command(name, command))
    parts.append(_settings())
    parts.append(
        "## Not in this version\n\n"
        f"Commands: {', '.join(f'`{name}`' for name in LATER)}. Settings: "
        + ", ".join(f"`{s.flag or s.env}`" for s in SETTINGS if s.pending)
        + ". Giving one is an error that says so; none is ignored.\n"
    )
    return "\n".join(parts)


def _command(name: str, command: click.Command) -> str:
    usage = " ".join(
        param.make_metavar(context) if param.metavar is None else param.metavar
        for context in [click.Context(command, info_name=name)]
        for param in command.params
        if isinstance(param, click.Argument)
    )
    lines = [f"## strata {name}", "", "```"]
    lines += [" ".join(filter(None, ["strata", name, usage, "[OPTIONS]"])), "```", ""]
    lines += [_paragraphs(command.help or ""), ""]
    rows = [_row(param) for param in command.params if isinstance(param, click.Option)]
    shown = [row for row in rows if row]
    if shown:
        lines += ["| option | meaning |", "|---|---|", *shown, ""]
    settings = [
        f"`{setting.flag}`"
        for setting in SETTINGS
        if setting.flag and not setting.pending and setting.key in {p.name for p in command.params}
    ]
    lines.append(
        f"Settings: {', '.join(settings)}; see [Settings](#settings)."
        if settings
        else "Settings: none."
    )
    return "\n".join(lines) + "\n"


def _row(option: click.Option) -> str:
    """An option of the command's own; settings and common options have their own section."""
    if option.hidden or option.name in {setting.key for setting in SETTINGS}:
        return ""
    if isinstance(option, SectionedOption) and option.section == "Common":
        return ""
    names = ", ".join(f"`{name}`" for name in option.opts)
    metavar = "" if option.is_flag else f" `{option.metavar}`"
    return f"| {names}{metavar} | {_cell(option.help or '')} |"


def _settings() -> str:
    lines = [_SETTINGS]
    for setting in SETTINGS:
        if setting.pending:
            continue
        value = " or ".join(setting.values) or "switch"
        flag = f"`{setting.flag}`" if setting.flag else ""
        cells = [flag, f"`{setting.key}`", f"`{setting.env}`", value, _cell(setting.help)]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [_COMMON]
    return "\n".join(lines)


def _paragraphs(text: str) -> str:
    return re.sub(r"[ \t]*\n[ \t]*", "\n", text.strip())


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(reference())
