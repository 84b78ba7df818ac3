"""Output files that would take the place of the model they are about."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from strata_core.checkpoint.open import Checkpoint
from strata_core.errors import UsageError


def refuse_own_file(path: Path, checkpoint: Checkpoint, what: str, named: str) -> None:
    """Raise UsageError where `path`, which `named` gives for `what`, is a file of the model."""
    with suppress(OSError):
        if any(path.samefile(file) for file in checkpoint.files):
            raise UsageError(
                f"cannot write {what} to {path}",
                f"{named} names a file of the model itself",
                "name another file",
            )
