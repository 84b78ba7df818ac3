"""A profile: how often a model's router chose each expert, counted over some text.

The file is JSON: `format` "strata-profile", `version` 1, `model_hash` (as `strata inspect` shows
it; of a pack that of the model it was made from), `experts` in each layer, `counts` with one list
of whole numbers for each layer number.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from attrs import frozen

from strata_core.errors import StrataError, UsageError

FORMAT = "strata-profile"
VERSION = 1
_LONGEST_KEY = 9
_LARGEST_FILE = 64 << 20
_MOST = 1 << 40
"""Sums above this are halved: what was counted long ago weighs less."""


@frozen
class Profile:
    """Counts by layer, one for each of `experts`, of the model with that hash. Immutable."""

    model_hash: str
    experts: int
    counts: Mapping[int, tuple[int, ...]]

    @classmethod
    def of(cls, model_hash: str, counts: Mapping[int, Iterable[int]]) -> Profile:
        """From counts as an executor gives them."""
        plain = {layer: tuple(int(n) for n in row) for layer, row in counts.items()}
        return cls(model_hash, max(map(len, plain.values()), default=0), plain)

    @property
    def picks(self) -> int:
        """How many picks were counted in all."""
        return sum(map(sum, self.counts.values()))

    def plus(self, other: Profile) -> Profile:
        """Both together; they are of the same model."""
        rows = {
            layer: tuple(a + b for a, b in zip(row, other.counts[layer], strict=True))
            for layer, row in self.counts.items()
        }
        if any(sum(row) > _MOST for row in rows.values()):
            rows = {layer: tuple(n // 2 for n in row) for layer, row in rows.items()}
        return Profile(self.model_hash, self.experts, rows)

    def fits(self, model_hash: str, layers: Sequence[int], experts: int) -> str:
        """Why it is of no use for a model; "" where it is."""
        if self.model_hash != model_hash:
            return f"it is of the model {self.model_hash[:16]}, and this one is {model_hash[:16]}"
        if self.experts != experts or sorted(self.counts) != sorted(layers):
            return f"it counts {self.experts} experts in the layers {sorted(self.counts)}"
        return ""


def read_profile(path: Path) -> Profile:
    """Read a profile. Raises UsageError naming file and field."""
    try:
        with path.open("rb") as stream:
            data = stream.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ValueError("it is larger than 64 MiB")
        document = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise _bad(path, " ".join(reason.split())) from error
    return _parsed(path, document)


def _parsed(path: Path, document: Any) -> Profile:
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise _bad(path, f'its field format is not "{FORMAT}"')
    if document.get("version") != VERSION:
        raise _bad(path, f"its field version is {document.get('version')!r}, not {VERSION}")
    name, experts, rows = (document.get(key) for key in ("model_hash", "experts", "counts"))
    if not isinstance(name, str) or not name:
        raise _bad(path, "its field model_hash is no text")
    if not _whole(experts) or not experts:
        raise _bad(path, "its field experts is no whole number above 0")
    if not isinstance(rows, dict) or not rows:
        raise _bad(path, "its field counts has no layers")
    counts = {}
    for key, row in rows.items():
        if not key.isascii() or not key.isdecimal() or len(key) > _LONGEST_KEY:
            raise _bad(path, f"its field counts has {key[:40]!r} for the number of a layer")
        if not isinstance(row, list) or len(row) != experts or not all(map(_whole, row)):
            raise _bad(path, f"its field counts.{key} is no list of {experts} whole numbers")
        counts[int(key)] = tuple(row)
    return Profile(name, experts, counts)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 1 << 62


def _bad(path: Path, reason: str) -> UsageError:
    return UsageError(
        f"{path} is no profile that can be used",
        reason,
        "make one with `strata profile MODEL --text FILE -o OUT`",
    )


def refuse_unwritable(path: Path) -> None:
    """Raise StrataError where it is clear before any work that no profile can be written there."""
    real = Path(os.path.realpath(path))
    try:
        if real.exists() and not real.is_file():
            raise OSError(errno.EINVAL, "it is there already and no regular file")
        if not real.parent.is_dir():
            raise OSError(errno.ENOENT, f"there is no folder {real.parent}")
        if not os.access(real.parent, os.W_OK):
            raise OSError(errno.EACCES, f"the folder {real.parent} may not be written to")
    except OSError as error:
        raise _unwritten(path, error) from error


def _unwritten(path: Path, error: OSError) -> StrataError:
    return StrataError(
        f"cannot write the profile {path}",
        error.strerror or str(error),
        "name a file in a folder that can be written",
    )


def write_profile(profile: Profile, path: Path) -> None:
    """Write a profile: it is there whole, or what was there before. Raises StrataError.

    A link is written through; what is no regular file, such as a device, is left alone.
    """
    document = {
        "format": FORMAT,
        "version": VERSION,
        "model_hash": profile.model_hash,
        "experts": profile.experts,
        "counts": {str(layer): list(row) for layer, row in sorted(profile.counts.items())},
    }
    real = Path(os.path.realpath(path))
    beside = real.with_name(f"{real.name}.{os.getpid()}.tmp")
    try:
        if real.exists() and not real.is_file():
            raise OSError(errno.EINVAL, "it is there already and no regular file")
        try:
            beside.write_text(json.dumps(document) + "\n", "utf-8")
            beside.replace(real)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritten(path, error) from error
