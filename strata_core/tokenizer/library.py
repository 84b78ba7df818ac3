"""Calls into the `tokenizers` library, whose failures come in every kind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from strata_core.errors import CheckpointError, StrataError

_NOT_ITS_OWN = (KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError, StrataError)


@contextmanager
def guarded(what: str, remedy: str) -> Iterator[None]:
    """Whatever the library raises inside becomes a CheckpointError that begins with `what`.

    It raises plain Exception for what it foresees. What it does not foresee is a panic of its Rust
    code, which pyo3 raises as a BaseException so that nobody catches it by the way.
    """
    try:
        yield
    except _NOT_ITS_OWN:
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise CheckpointError(what, reason, remedy) from error
