"""Jobs without a thread, for tests of who hands them over."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from strata_core.cache.beside import Job

Given = TypeVar("Given")


class AtOnce:
    """Jobs that are done when `begin` is over, in the thread that calls it."""

    def begin(self, work: Callable[[], Given]) -> Job[Given]:
        """Run the function now."""
        job = Job(work)
        job.run()
        return job

    def close(self, bound: float) -> None:
        """Nothing is under way."""
        del bound
