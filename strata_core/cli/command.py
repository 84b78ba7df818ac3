"""How a command is made: its own parameters, the common ones, and settings from the table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click
from attrs import define

from strata_core.cli.console import Console
from strata_core.cli.streams import own_stdout
from strata_core.config import Settings, resolve
from strata_core.setting_plugins import Table, installed_settings
from strata_core.setting_table import SETTINGS, Group, Setting

SECTIONS: dict[Group, str] = {
    "choice": "Which parts do the work",
    "device": "Devices and their memory",
    "memory": "Memory",
    "model": "Model",
    "plugins": "Plugins",
    "diagnostics": "Diagnostics",
}
COMMON = "Common"
_TABLE = "strata.settings"


@define
class Invocation:
    """One call of a command: where it writes, and the settings flags that were given."""

    console: Console
    flags: dict[str, Any]
    config: str | None
    table: Table
    _settings: Settings | None = None

    def settings(self) -> Settings:
        """The settings in force. Raises UsageError, for a checked command before its body runs."""
        if self._settings is None:
            self._settings = resolve(self.flags, file=self.config, table=self.table)
        return self._settings


Body = Callable[..., int | None]


class SectionedOption(click.Option):
    """An option that `--help` shows under a heading of its own."""

    def __init__(self, *args: Any, section: str = "", **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.section = section


def known_settings(ctx: click.Context) -> Table:
    """The settings that this call knows, read once for it."""
    table: Table = ctx.meta.setdefault(_TABLE, None) or installed_settings()
    ctx.meta[_TABLE] = table
    return table


class Command(click.Command):
    """A click command whose help puts settings under their headings.

    One that is `open_to_plugins` also takes the settings of installed plugins, which are looked up
    when it is called; `params` are its own.
    """

    def __init__(self, *args: Any, open_to_plugins: bool = False, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self._open = open_to_plugins

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Its own parameters and, before the common ones, those of plugins."""
        own = super().get_params(ctx)
        if not self._open:
            return own
        at = next(i for i, item in enumerate(own) if getattr(item, "section", "") == COMMON)
        plugged = [_option(s) for s in known_settings(ctx).plugged if s.flag]
        return [*own[:at], *plugged, *own[at:]]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; an error that its parser raised learns which command it is about."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            error.ctx = error.ctx or ctx
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write one list of options for each heading, in the table's order."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            record = param.get_help_record(ctx) if isinstance(param, click.Option) else None
            if record is not None:
                section = getattr(param, "section", "") or "Options"
                sections.setdefault(section, []).append(record)
        common = sections.pop("Options", [])
        for heading, rows in {"Options": common, **sections}.items():
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)


def command(
    name: str,
    parameters: Sequence[click.Parameter] = (),
    groups: Sequence[Group] = (),
    *,
    checked: bool = True,
) -> Callable[[Body], click.Command]:
    """Make a function the body of `strata NAME`.

    It is called as `body(invocation, **parameters)` and returns an exit code, None for 0. Its
    docstring is the command's help. A `checked` command does nothing where a setting is wrong.
    """

    def wrap(body: Body) -> click.Command:
        settings = [s for s in SETTINGS if s.flag and (s.group in groups or s.pending)]
        plugged = "plugins" in groups

        def callback(**given: Any) -> int:
            table = known_settings(click.get_current_context())
            more = [s for s in table.plugged if s.flag] if plugged else []
            flags = {s.key: _given(s, given.pop(s.key)) for s in (*settings, *more)}
            console = Console(json=given.pop("json_document"), quiet=given.pop("quiet"))
            given.pop("debug")
            invocation = Invocation(console, flags, given.pop("config"), table)
            if checked:
                invocation.settings()
            with own_stdout():
                return body(invocation, **given) or 0

        return Command(
            name,
            params=[*parameters, *map(_option, settings), *_common_options()],
            callback=callback,
            help=body.__doc__,
            open_to_plugins=plugged,
            context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        )

    return wrap


def model_argument() -> click.Argument:
    """The MODEL argument that most commands begin with."""
    return click.Argument(["model"], metavar="MODEL")


def _given(setting: Setting, value: Any) -> Any:
    return (value or None) if setting.kind == "switch" else value


def _option(setting: Setting) -> click.Option:
    flag = setting.flag or ""
    shape: dict[str, Any] = {"type": str, "metavar": "|".join(setting.values) or None}
    if setting.kind == "switch":
        shape = {"is_flag": True, "default": False}
    return SectionedOption(
        [flag, setting.key],
        help=setting.help,
        hidden=setting.pending,
        section=SECTIONS[setting.group],
        **shape,
    )


def _common_options() -> list[click.Option]:
    return [
        SectionedOption(
            ["--config", "config"],
            metavar="FILE",
            help="Read settings from this TOML file.",
            section=COMMON,
        ),
        SectionedOption(
            ["--json", "json_document"],
            is_flag=True,
            help="Print one JSON document on stdout.",
            section=COMMON,
        ),
        SectionedOption(
            ["-q", "--quiet", "quiet"],
            is_flag=True,
            help="Print neither progress nor a summary on stderr.",
            section=COMMON,
        ),
        SectionedOption(
            ["--debug", "debug"],
            is_flag=True,
            help="Show the stack trace of an error.",
            section=COMMON,
        ),
    ]
