"""What a setting is, and how the values of each kind are read.

A setting has a key (the name in the settings file and in Python), a flag, an environment variable
and a kind; `setting_table` holds them all.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from math import isfinite, nan
from pathlib import Path
from typing import Any, Literal

from attrs import frozen

Group = Literal["choice", "device", "memory", "model", "plugins", "diagnostics"]
Kind = Literal[
    "name",
    "names",
    "switch",
    "integer",
    "count",
    "indices",
    "real",
    "gib",
    "share",
    "choice",
    "path",
    "text",
]

LOADING: tuple[Group, ...] = ("choice", "device", "memory", "model", "plugins", "diagnostics")
"""Groups of the commands that load a model."""

_LARGEST = 2**31 - 1


class BadValue(Exception):
    """A value that its setting's kind does not allow; the text says what would be allowed."""


@frozen(kw_only=True)
class Setting:
    """One setting.

    `flag` is None where there is none; a switch's flag takes no value. `env` is its environment
    variable. `kind` says how a value is read, together with `choices`, `low` and `high` (inclusive,
    or exclusive at the low end where `above`); a "count" is a whole number or one of `choices`,
    "gib" a number of GiB or one of them, "share" a number or one of them, "indices" are different
    whole numbers. Giving a switch with an `alias` means giving `source` that value. A `pending`
    setting belongs to a later version: it is not shown, and giving it is an error. The value of a
    `secret` one is never shown. `distribution` and `version` say which plugin declares it; they are
    empty for core's own.
    """

    key: str
    help: str
    group: Group
    kind: Kind
    default: Any = None
    flag: str | None
    env: str
    metavar: str = ""
    choices: tuple[str, ...] = ()
    low: float = 0
    high: float = _LARGEST
    above: bool = False
    alias: str | None = None
    pending: bool = False
    secret: bool = False
    distribution: str = ""
    version: str = ""

    @property
    def origin(self) -> str:
        """The distribution and version that declare it, as messages name them; "" for core."""
        return f"{self.distribution} {self.version}" if self.distribution else ""

    @property
    def values(self) -> tuple[str, ...]:
        """What may be given, in words for help texts: choices, a metavar, or both."""
        numbers = not self.choices or self.kind in ("count", "gib", "share")
        return (*((self.metavar,) if self.metavar and numbers else ()), *self.choices)

    def parse(self, value: Any) -> Any:
        """The typed value of a flag's or variable's text, or of a file's or caller's value.

        Raises BadValue with a sentence that says what is allowed.
        """
        return _PARSERS[self.kind](self, value)

    def hides(self, value: Any) -> bool:
        """Whether a value must not be shown: the setting is secret, or the text carries a secret.

        A text does that has a word for one with something after it, as `"token": ...` in JSON or
        `sig=...` in an address, or a user's name and password in an address.
        """
        if value is None or value == self.default:
            return False
        if self.secret or _SECRET_WORDS & set(self.key.split("_")):
            return True
        return isinstance(value, str) and bool(_CARRIES.search(value))


HIDDEN = "(not shown)"
"""What stands for a value that is not shown."""

_SECRET_WORDS = frozenset({"secret", "token", "password", "passphrase", "credentials", "key"})

_CARRIES = re.compile(
    r"""(secret|token|passw|passphrase|credential|authorization|signature|(?<![a-z])(key|sig|auth))
    [a-z0-9_-]*["']?\s*[:=]|key["']?\s*[:=]|://[^/@\s]+@""",
    re.IGNORECASE | re.VERBOSE,
)


def _name(_setting: Setting, value: Any) -> str:
    if not isinstance(value, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,99}", value):
        raise BadValue("a name of letters, digits, '-', '_', '.' and ':' is wanted")
    return value


def _names(setting: Setting, value: Any) -> tuple[str, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, list | tuple):
        raise BadValue("names separated by commas are wanted")
    return tuple(_name(setting, part.strip() if isinstance(part, str) else part) for part in parts)


def _switch(_setting: Setting, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    words = {"1": True, "true": True, "yes": True, "on": True}
    words |= {"0": False, "false": False, "no": False, "off": False}
    if not isinstance(value, str) or value.lower() not in words:
        raise BadValue("it is switched by 1 or 0 (true or false, yes or no, on or off)")
    return words[value.lower()]


def _integer(setting: Setting, value: Any) -> int:
    if isinstance(value, str) and re.fullmatch(r"[+-]?[0-9]{1,18}", value, re.ASCII):
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise BadValue(f"a whole number {_bounds(setting)} is wanted")
    _within(setting, value, "a whole number")
    return value


def _count(setting: Setting, value: Any) -> int | str:
    if isinstance(value, str) and value in setting.choices:
        return value
    try:
        return _integer(setting, value)
    except BadValue as error:
        text = str(error).removesuffix(" is wanted")
        raise BadValue(f"{text}, or {' or '.join(setting.choices)}, is wanted") from None


def _indices(setting: Setting, value: Any) -> tuple[int, ...]:
    parts = value.split(",") if isinstance(value, str) else value
    if isinstance(parts, int) and not isinstance(parts, bool):
        parts = [parts]
    if not isinstance(parts, list | tuple) or not parts:
        raise BadValue("whole numbers separated by commas are wanted")
    found = tuple(
        _integer(setting, part.strip() if isinstance(part, str) else part) for part in parts
    )
    if len(set(found)) != len(found):
        raise BadValue("different whole numbers are wanted; one is there twice")
    return found


def _real(setting: Setting, value: Any) -> float:
    what = "a number of GiB" if setting.kind == "gib" else "a number"
    try:
        number = float(value) if isinstance(value, str | int | float) else nan
    except (ValueError, OverflowError):
        number = nan
    if isinstance(value, bool) or not isfinite(number):
        raise BadValue(f"{what} {_bounds(setting)} is wanted")
    return _within(setting, number, what)


def _real_or_word(setting: Setting, value: Any) -> float | str:
    return value if isinstance(value, str) and value in setting.choices else _real(setting, value)


def _within(setting: Setting, value: float, what: str) -> float:
    low = setting.low < value if setting.above else setting.low <= value
    if not (low and value <= setting.high):
        raise BadValue(f"{what} {_bounds(setting)} is wanted")
    return value


def _bounds(setting: Setting) -> str:
    text = f"{'above' if setting.above else 'of at least'} {setting.low:.15g}"
    if setting.high != _LARGEST:
        text += f" and at most {setting.high:.15g}"
    if setting.kind in ("gib", "share") and setting.choices:
        text += f", or {' or '.join(setting.choices)},"
    return text


def _choice(setting: Setting, value: Any) -> str:
    if value not in setting.choices:
        raise BadValue(f"it is one of {', '.join(setting.choices)}")
    return str(value)


def _path(_setting: Setting, value: Any) -> Path:
    if not isinstance(value, str | os.PathLike) or not str(value) or "\0" in str(value):
        raise BadValue("the path of a file is wanted")
    return Path(value)


def _text(_setting: Setting, value: Any) -> str:
    if not isinstance(value, str):
        raise BadValue("text is wanted")
    return value


_PARSERS: dict[str, Callable[[Setting, Any], Any]] = {
    "name": _name,
    "names": _names,
    "switch": _switch,
    "integer": _integer,
    "count": _count,
    "indices": _indices,
    "real": _real,
    "gib": _real_or_word,
    "share": _real_or_word,
    "choice": _choice,
    "path": _path,
    "text": _text,
}


def made(key: str, kind: Kind, group: Group, help: str, **more: Any) -> Setting:  # noqa: A002
    """A setting whose flag and variable follow from its key."""
    more.setdefault("flag", "--" + key.replace("_", "-"))
    more.setdefault("env", "STRATA_" + key.upper())
    metavars = {
        "gib": "GIB",
        "integer": "N",
        "count": "N",
        "indices": "N,...",
        "real": "F",
        "share": "F",
        "name": "NAME",
        "path": "FILE",
    }
    more.setdefault("metavar", metavars.get(kind, ""))
    return Setting(key=key, kind=kind, group=group, help=help, **more)


def later(key: str, kind: Kind = "text", **more: Any) -> Setting:
    """A setting of a later version: known by name, so that it is refused and never ignored."""
    return made(key, kind, "model", "", pending=True, **more)
