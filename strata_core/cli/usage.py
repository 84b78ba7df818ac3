"""Any exception as a StrataError with its three lines; click's own errors among them."""

from __future__ import annotations

from collections.abc import Iterable

import click

from strata_core.cli.command import known_settings
from strata_core.config import did_you_mean
from strata_core.errors import StrataError, UsageError


def unknown_command(name: str, commands: Iterable[str], later: Iterable[str]) -> UsageError:
    """The error for a command that this version does not have; `later` ones it knows by name."""
    listed = f"the commands are {', '.join(commands)}"
    if name in later:
        return UsageError(
            f"the command {name!r} is not available in this version",
            "what it does has not been built yet",
            listed,
        )
    return UsageError(
        f"there is no command {name!r}",
        listed,
        did_you_mean(name, commands) or "`strata --help` says what each one does",
    )


def translated(error: BaseException, root: click.Group) -> StrataError:
    """The error to show for an exception that ended a command of `root`."""
    if isinstance(error, StrataError):
        return error
    if isinstance(error, click.ClickException):
        return _of_click(error, root)
    if isinstance(error, KeyboardInterrupt):
        return StrataError("interrupted")
    if isinstance(error, MemoryError):
        return StrataError(
            "there is not enough memory",
            "the system refused an allocation",
            "see `strata plan`, or give a smaller --ram-budget",
        )
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return StrataError(
            f"{where}{error.strerror or error}",
            "the operating system refused",
            "check the path, its permissions and the free space",
        )
    return StrataError(
        f"Strata itself failed: {type(error).__name__}: {error}",
        "this is a defect in Strata or in a plugin, not in what you asked",
        "run it again with --debug and report what it prints",
    )


def _of_click(error: click.ClickException, root: click.Group) -> StrataError:
    context = getattr(error, "ctx", None)
    path = context.command_path if context else "strata"
    remedy = f"see `{path} --help`"
    if isinstance(error, click.NoSuchOption):
        known = _options(context, root)
        lost = known_settings(context).lost(error.option_name) if context else ""
        return UsageError(
            f"there is no option {error.option_name!r}",
            lost or f"`{path}` has no option of that name",
            did_you_mean(error.option_name, known) or remedy,
        )
    if isinstance(error, click.MissingParameter):
        return UsageError(f"{_name(error.param)} is missing", f"`{path}` needs it", remedy)
    if isinstance(error, click.BadParameter):
        what = f"{_name(error.param)}: {_sentence(error)}"
        return UsageError(what, "the option's value cannot be used", remedy)
    if isinstance(error, click.BadOptionUsage):
        return UsageError(_sentence(error), f"`{path}` reads options with their values", remedy)
    if "extra argument" in error.message:
        remedy = f"put a prompt of several words in quotes; {remedy}"
    return UsageError(_sentence(error), f"`{path}` cannot be called so", remedy)


def _name(parameter: click.Parameter | None) -> str:
    """What the user calls a parameter: an option's longest name, or MODEL."""
    if isinstance(parameter, click.Option):
        return max(parameter.opts, key=len)
    return parameter.human_readable_name.upper() if parameter else "an argument"


def _sentence(error: click.ClickException) -> str:
    text = error.message.strip().rstrip(".")
    return text[:1].lower() + text[1:]


def _options(context: click.Context | None, root: click.Group) -> list[str]:
    params = context.command.get_params(context) if context else root.params
    return [
        name
        for param in params
        if not getattr(param, "hidden", False)
        for name in (*param.opts, "--help")
        if name.startswith("--")
    ]
