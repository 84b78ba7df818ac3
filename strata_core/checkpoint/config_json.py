"""Typed access to a hub folder's JSON configuration; every mistake names file and field."""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any, Self, TypeVar

from attrs import frozen

from strata_core.errors import CheckpointError

_T = TypeVar("_T")


@frozen(eq=False)
class Config:
    """The fields of one JSON object; a null counts as missing, as in transformers."""

    path: Path
    values: Mapping[str, Any]

    def bad(self, key: str, why: str) -> CheckpointError:
        """The error for a field that cannot be used."""
        return CheckpointError(
            f"{self.path}: bad field: {key}",
            why,
            "the file is damaged or not a model for Strata; download it again",
        )

    def get(self, *keys: str) -> tuple[str, Any]:
        """(key, value) of the first of several spellings that is there; ("", None) if none is."""
        for key in keys:
            if self.values.get(key) is not None:
                return key, self.values[key]
        return "", None

    def integer(self, *keys: str, default: int | None = None) -> int:
        """A whole number under any of several spellings; missing without a default is an error."""
        key, value = self.get(*keys)
        if value is None:
            return self._default(default, keys)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.bad(key, f"{_short(value)} where a whole number is expected")
        return value

    def real(self, *keys: str, default: float | None = None) -> float:
        """A finite number under any of several spellings."""
        key, value = self.get(*keys)
        if value is None:
            return self._default(default, keys)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.bad(key, f"{_short(value)} where a number is expected")
        try:
            number = float(value)
        except OverflowError as error:
            raise self.bad(key, "a number beyond every range") from error
        if not isfinite(number):
            raise self.bad(key, f"{number} is not finite")
        return number

    def flag(self, key: str, default: bool) -> bool:
        """True or false."""
        _, value = self.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.bad(key, f"{_short(value)} where true or false is expected")
        return value

    def text(self, key: str, default: str | None = None) -> str:
        """A text."""
        _, value = self.get(key)
        if value is None:
            return self._default(default, (key,))
        if not isinstance(value, str):
            raise self.bad(key, f"{_short(value)} where a text is expected")
        return value

    def integers(self, key: str) -> list[int]:
        """A whole number or a list of them, as a list; empty where missing."""
        _, value = self.get(key)
        if value is None:
            return []
        items = value if isinstance(value, list) else [value]
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int):
                raise self.bad(key, f"{_short(item)} where a whole number is expected")
        return list(items)

    def section(self, key: str) -> Self | None:
        """A nested object, None where missing."""
        _, value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.bad(key, f"{_short(value)} where an object is expected")
        return type(self)(self.path, value)

    def _default(self, default: _T | None, keys: tuple[str, ...]) -> _T:
        if default is None:
            raise self.bad(" or ".join(keys), "the field is missing")
        return default


def _short(value: object) -> str:
    return repr(value)[:60]
