"""Waiting on the host for an event of a device, with a bound."""

from __future__ import annotations

import time

from attrs import define, field

from strata_core.errors import EngineError
from strata_core.runtime import Runtime

STRETCH = 2048
"""Tokens of a chunk that one bound is for; each further so many, or part of them, add another."""

PAUSES = (0.0, 0.00002, 0.0001, 0.0005)
"""Seconds between looks at an event, longer and longer; the last one goes on."""


def happens(runtime: Runtime, event: int, bound: float) -> bool:
    """Wait for an event, `bound` seconds at most; whether it has happened. Raises DeviceError.

    The clock is read before the event is asked for: one that happened while this process was held
    up has happened in time.
    """
    limit = time.monotonic() + bound
    turn = 0
    while True:
        late = time.monotonic() > limit
        if runtime.finished(event):
            return True
        if late:
            return False
        time.sleep(PAUSES[min(turn, len(PAUSES) - 1)])
        turn += 1


def await_event(runtime: Runtime, event: int, bound: float, what: str) -> None:
    """Wait until an event has happened. Raises EngineError after `bound` seconds, DeviceError."""
    if not happens(runtime, event, bound):
        raise EngineError(
            f"the device did not come to an end with {what}",
            f"it took more than {bound:g} s",
            "if it happens again, look at the system's log for errors of the device",
        )


@define(eq=False)
class Patience:
    """The most seconds of any wait of a prompt: one bound for all of them, that follows the chunk.

    What is waited for may have the work of a whole chunk before it on its stream, since the host
    puts layer after layer there. `least` is the bound before the first chunk, and that of a layer
    of at most STRETCH tokens. Used by one thread.
    """

    runtime: Runtime
    least: float
    seconds: float = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.seconds = self.least

    def follow(self, tokens: int, layers: int) -> None:
        """A chunk of so many tokens begins, whose work comes in so many layers."""
        self.seconds = self.least * max(1, layers) * max(1, -(-tokens // STRETCH))

    def wait(self, event: int, what: str) -> None:
        """Wait until an event has happened. Raises EngineError, DeviceError.

        After a wait in vain the next ones take `least`: who cleans up need not be as patient.
        """
        try:
            await_event(self.runtime, event, self.seconds, what)
        except EngineError:
            self.seconds = self.least
            raise
