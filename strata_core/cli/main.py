"""The `strata` command: finds the command named, runs it, and turns failures into exit codes.

Exit codes: 0 done, 1 failed, 2 bad use or bad input, 130 interrupted. Commands are imported when
they are called, so that `strata --help` stays fast and a broken plugin cannot break it.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from strata_core import __version__
from strata_core.cli import INTERRUPTED
from strata_core.cli.streams import ReaderGone, begin, discard_output, flush

COMMANDS: dict[str, tuple[str, str]] = {
    "generate": ("generate", "Continue a prompt."),
    "chat": ("chat", "Talk with a model, turn by turn."),
    "plan": ("plan", "Say what would go where, before anything is loaded."),
    "perplexity": ("perplexity", "Measure how well a model predicts a text."),
    "profile": ("profile", "Count which experts a model asks for, for --expert-profile."),
    "bench": ("bench", "Measure how fast a model runs."),
    "pack": ("pack", "Write a model in the form that is read fastest, with hashes."),
    "verify": ("verify", "Check every byte of a model's files that can be checked."),
    "inspect": ("inspect", "Say what is in a model's files."),
    "plugins": ("plugins", "List what can do the work, what is chosen, and why."),
    "conformance": ("conformance", "Test an installed part against its interface."),
    "doctor": ("doctor", "Report this machine's facts, the settings, and what is wrong."),
}
"""Each command's module in this package, and its line in `strata --help`."""

LATER = ("serve", "simulate")
"""Commands of later versions: known by name, so that the error can say so."""


class Root(click.Group):
    """The group of all commands, none of them imported before it is named."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's
        """The commands' names, in the order that a new user meets them."""
        return list(COMMANDS)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's
        cmd_name: str,
    ) -> click.Command | None:
        """Import and return one command; None where there is none of that name."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"strata_core.cli.{COMMANDS[cmd_name][0]}")
        found: click.Command = module.command_object
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with an error that knows the commands of later versions."""
        if args and args[0] not in COMMANDS:
            from strata_core.cli.usage import unknown_command

            raise unknown_command(args[0], COMMANDS, LATER)
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002 - click's
        formatter: click.HelpFormatter,
    ) -> None:
        """Write the list of commands without importing any."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in COMMANDS.items()])


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"strata {__version__}")
        ctx.exit()


root = Root(
    "strata",
    help="Run mixture-of-experts language models that do not fit the graphics card.\n\n"
    "MODEL is a GGUF file, a folder in the hub's layout, a pack, or `demo`, the built-in model. "
    'Try: strata generate demo "In the beginning"',
    epilog="`strata COMMAND --help` says more about a command.",
    params=[
        click.Option(
            ["--version"],
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_print_version,
            help="Print the version.",
        ),
        click.Option(
            ["--debug"], is_flag=True, expose_value=False, help="Show the stack trace of an error."
        ),
    ],
    invoke_without_command=False,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line given (the process's own by default) and return its exit code."""
    args = list(sys.argv[1:] if arguments is None else arguments)
    own = args[: args.index("--")] if "--" in args else args
    begin()
    try:
        return _invoke(args or ["--help"])
    except ReaderGone:
        discard_output()
        return 0
    except BaseException as error:  # noqa: BLE001 - no trace reaches the user, no plugin ends this
        if "--debug" in own:
            import traceback

            traceback.print_exc()
        return _fail(error, own)


def _invoke(args: list[str]) -> int:
    try:
        with root.make_context("strata", list(args)) as context:
            code: Any = root.invoke(context)
    except click.exceptions.Exit as leave:
        code = leave.exit_code
    flush()
    return int(code or 0)


def _fail(error: BaseException, args: Sequence[str]) -> int:
    """Report what ended the command, and return the exit code that tells it."""
    # What only failures need is imported here: it would make up half of the start.
    from strata_core.cli.console import print_error
    from strata_core.cli.usage import translated
    from strata_core.errors import StrataError

    shown = translated(error, root)
    try:
        print_error(shown, json_wanted="--json" in args)
    except ReaderGone:
        discard_output()
    except StrataError as unwritten:
        print_error(unwritten, json_wanted=False)
    return INTERRUPTED if isinstance(error, KeyboardInterrupt) else shown.exit_code


def run() -> None:
    """Entry point of the `strata` script."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a character gets its escape, not an exception.
            stream.reconfigure(errors="backslashreplace")
    sys.exit(main())
