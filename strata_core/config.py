"""Where settings come from: flag over environment over settings file over default.

The only module that reads environment variables. A value is checked where it enters, so an error
names the flag, the variable, or the file and key that gave it; nothing that was given is ignored.

The settings file is TOML with the keys of `setting_table.SETTINGS`, and those that plugins declare
(`setting_plugins`), at its top level. It is the file
that `--config` or STRATA_CONFIG names, else `strata/settings.toml` in the user's configuration
folder if there is one.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from attrs import field, frozen

from strata_core.errors import Degradation, UsageError
from strata_core.setting import HIDDEN, BadValue, Setting
from strata_core.setting_plugins import CORE, Table, installed_settings

CONFIG_VARIABLE = "STRATA_CONFIG"
_LARGEST_FILE = 1 << 20
_PREFIX = "STRATA_"
_TEST_PREFIX = "STRATA_TEST_"
_LOW_RAM = "tiered-file"


@frozen
class Settings:
    """The value and the origin of every setting; values are attributes (`settings.source`).

    A switch that is an alias of a source has no value of its own: it is in `source`.
    An origin is "flag --source", "environment STRATA_SOURCE", "file PATH", "argument source" or
    "default". Immutable; any thread may read it.
    """

    _values: Mapping[str, Any]
    _origins: Mapping[str, str] = field(factory=dict)
    table: Table = field(default=CORE, repr=False, eq=False)

    def __getattr__(self, key: str) -> Any:
        if key.startswith("_") or key not in self._values:
            raise AttributeError(f"there is no setting {key!r}")
        return self._values[key]

    def origin(self, key: str) -> str:
        """Where the value of `key` comes from."""
        return self._origins.get(key, "default")

    def options(self) -> dict[str, Any]:
        """Every value by key, as plugins are given them."""
        return dict(self._values)

    def given(self) -> dict[str, Any]:
        """The values that were given rather than left to their defaults."""
        return {key: self._values[key] for key in self._origins}

    def without(self, keys: Collection[str]) -> Settings:
        """These settings, with the defaults of some in place of what was given."""
        values = {
            key: self.table.by_key[key].default if key in keys else value
            for key, value in self._values.items()
        }
        origins = {key: origin for key, origin in self._origins.items() if key not in keys}
        return Settings(values, origins, self.table)

    def rows(self) -> list[dict[str, Any]]:
        """One JSON-able row for each setting: key, value, origin, flag, variable.

        A value that is secret, or carries a secret, is hidden.
        """
        return [
            {
                "key": setting.key,
                "value": _told(setting, self._values[setting.key]),
                "origin": self.origin(setting.key),
                "flag": setting.flag,
                "variable": setting.env,
            }
            for setting in self.table.settings
            if setting.key in self._values
        ]

    def with_arguments(self, options: Mapping[str, Any]) -> Settings:
        """These settings with a Python caller's options over them. Raises UsageError."""
        values, origins = dict(self._values), dict(self._origins)
        _Level.of_arguments(options, self.table).lay_over(values, origins)
        return Settings(values, origins, self.table)


def resolve(
    flags: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
    table: Table | None = None,
) -> Settings:
    """Settings from flags by key (None: not given), the environment and a settings file.

    `environ` is the process's by default; `file` is what `--config` named; `table` holds the
    settings, by default core's and those of installed plugins. Raises UsageError for
    a value that its setting does not allow, an unknown key of the file, a setting that this
    version does not have, and two different sources given in one place.
    """
    variables = os.environ if environ is None else environ
    known = installed_settings() if table is None else table
    levels = [
        _Level.of_file(_settings_file(variables, file), known),
        _Level.of_environment(variables, known),
        _Level.of_flags(flags or {}, known),
    ]
    return _layered(levels, known)


def resolve_arguments(
    options: Mapping[str, Any], environ: Mapping[str, str] | None = None
) -> Settings:
    """Settings for a Python caller: `options` by key stand where a command has its flags."""
    return resolve({}, environ).with_arguments(options)


def unknown_variables(
    environ: Mapping[str, str] | None = None, table: Table | None = None
) -> tuple[str, ...]:
    """Variables that begin like Strata's but are none of them, e.g. for a typing mistake."""
    settings = (installed_settings() if table is None else table).settings
    known = {setting.env for setting in settings} | {CONFIG_VARIABLE}
    return tuple(
        sorted(
            name
            for name in (os.environ if environ is None else environ)
            if name.startswith(_PREFIX) and name not in known and not name.startswith(_TEST_PREFIX)
        )
    )


def variable_degradations(
    environ: Mapping[str, str] | None = None, table: Table | None = None
) -> tuple[Degradation, ...]:
    """One degradation for each of `unknown_variables`."""
    table = installed_settings() if table is None else table
    known = [setting.env for setting in table.settings if not setting.pending]
    return tuple(
        Degradation(
            what=f"the environment variable {name} is none of Strata's",
            why=table.lost(name) or "it begins like one, but nothing reads it",
            cost="what it was meant to set is as if it were not given",
            remedy=did_you_mean(name, known) or "remove it; docs/cli.md lists the variables",
        )
        for name in unknown_variables(environ, table)
    )


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """ "did you mean 'X'?" for the known word nearest to `word`, else ""."""
    from difflib import get_close_matches

    near = get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]!r}?" if near else ""


# --- levels ------------------------------------------------------------------------------------


@frozen
class _Level:
    """The values that one place gave, with their origins."""

    values: dict[str, Any] = field(factory=dict)
    origins: dict[str, str] = field(factory=dict)

    @classmethod
    def of_flags(cls, flags: Mapping[str, Any], table: Table) -> _Level:
        level = cls()
        for key, value in flags.items():
            if value is not None:
                setting = table.by_key[key]
                flag = setting.flag or key
                level.take(setting, value, flag, f"flag {flag}")
        return level

    @classmethod
    def of_arguments(cls, options: Mapping[str, Any], table: Table) -> _Level:
        level = cls()
        for key, value in options.items():
            if key not in table.by_key:
                raise UsageError(
                    f"there is no option {key!r}",
                    table.lost(key) or "options are named like the keys of a settings file",
                    did_you_mean(key, table.by_key)
                    or f"the options are {', '.join(_current(table))}",
                )
            if value is not None:
                level.take(table.by_key[key], value, key, f"argument {key}")
        return level

    @classmethod
    def of_environment(cls, environ: Mapping[str, str], table: Table) -> _Level:
        level = cls()
        for setting in table.settings:
            value = environ.get(setting.env, "")
            if value:  # an empty variable is an unset one
                level.take(setting, value, setting.env, f"environment {setting.env}")
        return level

    @classmethod
    def of_file(cls, path: Path | None, table: Table) -> _Level:
        level = cls()
        for key, value in (_read(path) if path else {}).items():
            if key not in table.by_key:
                raise UsageError(
                    f"{path}: unknown key {key!r}",
                    table.lost(key) or "a settings file holds settings and nothing else",
                    did_you_mean(key, table.by_key) or f"the keys are {', '.join(_current(table))}",
                )
            level.take(table.by_key[key], value, f"{path}: {key}", f"file {path}")
        return level

    def take(self, setting: Setting, value: Any, name: str, origin: str) -> None:
        """Check a value and keep it; `name` is what the user calls the place it came from."""
        if setting.pending:
            raise UsageError(
                f"{name} is not available in this version",
                "what it controls has not been built yet, and nothing that is given is ignored",
                f"leave {name} out",
            )
        try:
            parsed = setting.parse(value)
        except BadValue as error:
            raise UsageError(
                f"{name}: {_shown(setting, value)} is not a value it can have",
                f"{error}; {setting.origin} declares it" if setting.origin else str(error),
                _remedy(setting, value),
            ) from None
        if setting.alias is not None:
            if parsed:
                self._choose_source(setting.alias, name, origin)
        elif setting.key == "source":
            self._choose_source(parsed, f"{name} {parsed}", origin)
        else:
            self.values[setting.key] = parsed
            self.origins[setting.key] = origin

    def lay_over(self, values: dict[str, Any], origins: dict[str, str]) -> None:
        """Put these values over those of places that count less.

        Raises UsageError where this place asks for something and for its opposite.
        """
        if self.values.get("no_low_ram"):
            if self.values.get("source") == _LOW_RAM:
                raise UsageError(
                    f"{self.origins['no_low_ram']} contradicts {self.origins['source']}",
                    f"one refuses the source {_LOW_RAM}, the other asks for it",
                    "give one of the two",
                )
            if values["source"] == _LOW_RAM:
                values["source"] = CORE.by_key["source"].default
                origins.pop("source", None)
        values |= self.values
        origins |= self.origins

    def _choose_source(self, source: str, name: str, origin: str) -> None:
        before = self.values.get("source", source)
        if before != source:
            raise UsageError(
                f"{name} contradicts the source {before!r}",
                f"it asks for the source {source!r}, and {self.origins['source']} for another",
                "give one of the two",
            )
        self.values["source"] = source
        self.origins["source"] = origin


def _layered(levels: Iterable[_Level], table: Table) -> Settings:
    found = table.by_key
    values = {key: found[key].default for key in _current(table) if found[key].alias is None}
    origins: dict[str, str] = {}
    for level in levels:
        level.lay_over(values, origins)
    return Settings(values, origins, table)


def _current(table: Table) -> list[str]:
    return [setting.key for setting in table.settings if not setting.pending]


def _shown(setting: Setting, value: Any) -> str:
    text = HIDDEN if setting.hides(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _remedy(setting: Setting, value: Any) -> str:
    near = did_you_mean(str(value), setting.choices)
    return near or "leave it out to get the default"


def _told(setting: Setting, value: Any) -> Any:
    return HIDDEN if setting.hides(value) else _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value) if isinstance(value, Path) else value


# --- the settings file -------------------------------------------------------------------------


def _settings_file(environ: Mapping[str, str], named: str | Path | None) -> Path | None:
    """The file to read: named by flag or variable (it must exist), or the user's own if any."""
    if named is not None:
        return _existing(named, "--config")
    if environ.get(CONFIG_VARIABLE):
        return _existing(environ[CONFIG_VARIABLE], CONFIG_VARIABLE)
    folder = user_folder(environ)
    own = folder / "strata" / "settings.toml" if folder else None
    return own if own and _is_file(own) else None


def _existing(named: str | Path, name: str) -> Path:
    path = Path(named)
    if not _is_file(path):
        raise UsageError(
            f"{name}: there is no file {str(named)!r}",
            "it names the settings file to read",
            "give the path of a TOML file, or leave it out",
        )
    return path


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a folder that may not be entered, a name that cannot be one
        return False


def user_folder(environ: Mapping[str, str]) -> Path | None:
    """The platform's folder for a user's settings; None where it cannot be told."""
    if sys.platform == "win32":
        return Path(environ["APPDATA"]) if environ.get("APPDATA") else None
    if sys.platform != "darwin" and Path(environ.get("XDG_CONFIG_HOME", "")).is_absolute():
        return Path(environ["XDG_CONFIG_HOME"])
    home = environ.get("HOME")
    if not home:
        return None
    below = "Library/Application Support" if sys.platform == "darwin" else ".config"
    return Path(home) / below


def cache_folder(environ: Mapping[str, str] | None = None) -> Path | None:
    """The folder for what can be made again, when `cache_dir` names none; None: none is known."""
    variables = os.environ if environ is None else environ
    home = variables.get("HOME")
    base: str | None
    if sys.platform == "win32":
        base = variables.get("LOCALAPPDATA")
    elif sys.platform == "darwin":
        base = f"{home}/Library/Caches" if home else None
    elif Path(variables.get("XDG_CACHE_HOME", "")).is_absolute():
        base = variables["XDG_CACHE_HOME"]
    else:
        base = f"{home}/.cache" if home else None
    return Path(base) / "strata" if base else None


def _read(path: Path) -> dict[str, Any]:
    import tomllib

    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
    except OSError as error:
        raise UsageError(
            f"{path}: the settings file cannot be read",
            error.strerror or str(error),
            "make it readable, or name another with --config",
        ) from error
    if len(data) > _LARGEST_FILE:
        raise UsageError(
            f"{path}: the settings file is larger than 1 MiB",
            "a settings file holds a few lines",
            "name another with --config",
        )
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        deep = isinstance(error, RecursionError)
        reason = "it is nested too deeply" if deep else " ".join(str(error).split())
        raise UsageError(
            f"{path}: the settings file is not TOML", reason, "correct it, or leave it out"
        ) from None
