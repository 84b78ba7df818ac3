"""Settings that plugins declare: read from their packages' `settings.toml`, importing nothing.

An entry point of the group `strata.settings` names a top-level package. The file `settings.toml` in
that package declares settings, one table each:

    api = [1, 0]

    [url]
    kind = "text"
    help = "Where the experts are."

The entry point's name is their namespace: with `fsspec`, this is the key `fsspec_url` of a settings
file, the flag `--fsspec-url` and the variable `STRATA_FSSPEC_URL`. A declaration that is wrong in
any way is left out as a whole and listed with its error; it changes nothing for the others.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

from attrs import field, frozen

from strata_core.installed import describe, entry_points_of, origin_of
from strata_core.interfaces import API
from strata_core.setting import BadValue, Kind, Setting, made
from strata_core.setting_table import SETTINGS

GROUP = "strata.settings"
FILE = "settings.toml"
_LARGEST_FILE = 1 << 16
_MOST_SETTINGS = 64
_LONGEST_HELP = 400

OPTION_WORDS = frozenset(
    {
        *("config", "context", "debug", "decode", "file", "help", "ignore", "json", "machine"),
        *("compare", "hashes", "long", "pairs", "peer", "quick", "report", "time", "timeout"),
        *("max", "min", "model", "out", "plain", "profile", "prompt", "quiet", "raw", "repeats"),
        *("repetition", "role", "seed", "stop", "system", "temperature", "text", "top", "version"),
        *("timeline", "windows"),
    }
)
"""First words of the commands' own options, which no namespace may be; a test keeps the list."""

_NUMBERS = ("low", "high")
_FIELDS = {"kind", "help", "default", "choices", "metavar", "flag", "secret", "above", *_NUMBERS}
_NUMERIC = ("integer", "count", "indices", "real", "gib", "share")


@frozen
class BrokenSettings:
    """A plugin whose settings could not be read, and why, in one line."""

    distribution: str
    version: str
    entry_point: str
    error: str

    def concerns(self, name: str) -> bool:
        """Whether a flag, variable or key may be a setting that it would have declared."""
        word = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_").removeprefix("strata_")
        return word.startswith(f"{_namespace(self.entry_point)}_")

    def __str__(self) -> str:
        return (
            f"{self.distribution} {self.version} ({self.entry_point}) declares settings that could "
            f"not be read: {self.error}"
        )


@frozen(eq=False, slots=False)
class Table:
    """All settings: core's, then those of plugins, sorted by key. Immutable."""

    plugged: tuple[Setting, ...] = ()
    broken: tuple[BrokenSettings, ...] = ()

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """Every setting, in the order of `--help`."""
        return (*SETTINGS, *self.plugged)

    @cached_property
    def by_key(self) -> Mapping[str, Setting]:
        """Every setting by its key."""
        return {setting.key: setting for setting in self.settings}

    def lost(self, name: str) -> str:
        """Why a flag, variable or key that nobody has may be missing; "" where nothing tells."""
        return "; ".join(str(item) for item in self.broken if item.concerns(name))


CORE = Table()
"""The table without plugins."""


class _Unsound(Exception):
    """Says what is wrong with a declaration, in one line."""


@frozen
class _Declared:
    distribution: str
    version: str
    entry_point: str
    settings: tuple[Setting, ...] = field(factory=tuple)

    def broken(self, error: str) -> BrokenSettings:
        return BrokenSettings(self.distribution, self.version, self.entry_point, error)


def installed_settings(entry_points: Iterable[metadata.EntryPoint] | None = None) -> Table:
    """The table with what installed plugins declare; no plugin can make this fail.

    `entry_points` are those to read, by default all installed ones of the group. Nothing is
    imported. The result does not depend on their order: a key, flag or variable that two plugins
    declare is neither's, and both are broken. Ctrl-C passes through.
    """
    broken: list[BrokenSettings] = []
    if entry_points is None:
        entry_points, unreadable = entry_points_of(GROUP)
        broken += [BrokenSettings(u.distribution, u.version, "?", u.error) for u in unreadable]
    declared: list[_Declared] = []
    for entry_point in entry_points:
        found = _Declared(*origin_of(entry_point), entry_point.name)
        try:
            declared.append(_read(found, entry_point))
        except _Unsound as error:
            broken.append(found.broken(str(error)))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - finding a package runs others' hooks
            broken.append(found.broken(describe(error)))
    sound, doubled = _unique(declared)
    plugged = sorted((s for item in sound for s in item.settings), key=lambda s: s.key)
    broken = sorted([*broken, *doubled], key=lambda b: (b.distribution, b.version, b.entry_point))
    return Table(tuple(plugged), tuple(broken))


def _unique(declared: list[_Declared]) -> tuple[list[_Declared], list[BrokenSettings]]:
    owners: dict[str, list[str]] = {}
    for item in declared:
        for setting in item.settings:
            owners.setdefault(setting.key, []).append(f"{item.distribution} {item.version}")
    doubled = {key: sorted(names) for key, names in owners.items() if len(names) > 1}
    sound: list[_Declared] = []
    broken: list[BrokenSettings] = []
    for item in declared:
        twice = [setting.key for setting in item.settings if setting.key in doubled]
        if twice:
            by = " and by ".join(doubled[twice[0]])
            broken.append(item.broken(f"the setting {twice[0]!r} is declared by {by}"))
        else:
            sound.append(item)
    return sound, broken


# --- one plugin --------------------------------------------------------------------------------


def _namespace(entry_point: str) -> str:
    return re.sub(r"[-.]", "_", entry_point)


def _read(found: _Declared, entry_point: metadata.EntryPoint) -> _Declared:
    namespace = _namespace(found.entry_point)
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", namespace):
        raise _Unsound("the entry point's name must be lower-case words joined by '-'")
    first = namespace.split("_")[0]
    if first in OPTION_WORDS or first in {setting.key.split("_")[0] for setting in SETTINGS}:
        raise _Unsound(f"settings of core begin with {first!r}, so no plugin's may")
    document = _document(entry_point.value)
    _check_api(document.pop("api", None))
    if not document or len(document) > _MOST_SETTINGS:
        raise _Unsound(f"{FILE} must declare 1 to {_MOST_SETTINGS} settings, not {len(document)}")
    settings = tuple(_setting(found, namespace, name, item) for name, item in document.items())
    return _Declared(found.distribution, found.version, found.entry_point, settings)


def _document(package: str) -> dict[str, Any]:
    import tomllib

    if not package.isidentifier():
        raise _Unsound(f"{package!r} is not the name of a top-level package")
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise _Unsound(f"there is no package {package!r}")
    for folder in spec.submodule_search_locations:
        data = _content(folder, spec.loader)
        if data is None:
            continue
        if len(data) > _LARGEST_FILE:
            raise _Unsound(f"{FILE} of {package} is larger than {_LARGEST_FILE} bytes")
        try:
            return tomllib.loads(data.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise _Unsound(f"{FILE} of {package} is not TOML: {describe(error)}") from None
    raise _Unsound(f"the package {package} holds no {FILE}")


def _content(folder: str, loader: object) -> bytes | None:
    """The file's bytes, a little more than allowed at most; None where it is not there."""
    path = Path(folder) / FILE
    if path.is_file():
        with path.open("rb") as stream:
            return stream.read(_LARGEST_FILE + 1)
    get_data = getattr(loader, "get_data", None)  # a package inside a zip file
    if get_data is None or Path(folder).is_dir():
        return None
    try:
        return bytes(get_data(os.fspath(path)))
    except OSError:
        return None


def _check_api(api: object) -> None:
    if not (isinstance(api, list) and len(api) == 2 and all(type(n) is int for n in api)):
        raise _Unsound("api must be [major, minor], the interface version it was written for")
    if api[0] != API[0] or api[1] > API[1]:
        theirs, ours = (".".join(map(str, version)) for version in (api, API))
        raise _Unsound(f"written for interface version {theirs}; this core has {ours}")


def _setting(found: _Declared, namespace: str, name: str, item: object) -> Setting:
    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise _Unsound(f"[{name}]: a setting's name must be lower-case words joined by '_'")
    if not isinstance(item, dict):
        raise _Unsound(f"{name}: a table is wanted")
    _check_fields(name, item)
    key = f"{namespace}_{name}"
    more: dict[str, Any] = {
        k: item[k] for k in ("above", "metavar", "secret", *_NUMBERS) if k in item
    }
    if item.get("flag") is False:
        more["flag"] = None
    more["choices"] = tuple(item.get("choices", ()))
    help_text = f"{item['help'].rstrip('.')}. ({found.distribution} {found.version})"
    more |= {"distribution": found.distribution, "version": found.version}
    setting = made(key, item["kind"], "plugins", help_text, **more)
    default = item.get("default", False if setting.kind == "switch" else None)
    if default is None:
        return setting
    try:
        more["default"] = setting.parse(default)
    except BadValue as error:
        raise _Unsound(f"[{name}]: default {default!r}: {error}") from None
    return made(key, item["kind"], "plugins", help_text, **more)


def _check_fields(name: str, item: Mapping[str, Any]) -> None:
    """Raises _Unsound for a field that is unknown or does not hold what it should."""
    unknown = sorted(set(item) - _FIELDS)
    if unknown:
        raise _Unsound(f"[{name}]: unknown field {unknown[0]!r}")
    kind = item.get("kind")
    if kind not in get_args(Kind):
        raise _Unsound(f"[{name}]: kind must be one of {', '.join(get_args(Kind))}")
    checks = {
        "help": ("one line of text", _is_line(item.get("help"))),
        "flag": ("true or false", type(item.get("flag", True)) is bool),
        "secret": ("true or false", type(item.get("secret", False)) is bool),
        "above": ("true or false", type(item.get("above", False)) is bool),
        "metavar": ("one line of text", _is_line(item.get("metavar", "X"))),
        "choices": ("a list of words", _are_words(item.get("choices", []))),
        **{n: ("a number", type(item.get(n, 0)) in (int, float)) for n in _NUMBERS},
    }
    for field_name, (expected, sound) in checks.items():
        if not sound:
            raise _Unsound(f"[{name}]: {field_name} must be {expected}")
    if kind in ("choice", "count") and not item.get("choices"):
        raise _Unsound(f"[{name}]: a {kind} needs choices")
    limits = sorted(set(item) & {"above", *_NUMBERS})
    if limits and kind not in _NUMERIC:
        raise _Unsound(f"[{name}]: {limits[0]} is for numbers, not for a {kind}")


def _is_line(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _LONGEST_HELP and value.isprintable()


def _are_words(value: object) -> bool:
    return (
        isinstance(value, list)
        and all(isinstance(v, str) and re.fullmatch(r"[A-Za-z0-9._-]+", v) for v in value)
        and max(Counter(value).values(), default=1) == 1
    )
