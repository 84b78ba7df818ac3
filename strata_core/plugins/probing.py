"""Probing: every record is asked about the machine, all at once, within a bounded time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import get_args

from strata_core.interfaces import Probe, Record, Role, Unusable, Usable
from strata_core.machine import Machine
from strata_core.plugins.catalogue import Catalogue, Offer
from strata_core.plugins.guard import describe, folder_kept, stdout_to_stderr

PROBE_SECONDS = 10.0
"""How long all probes together may take; they run at the same time.

Only one that hangs takes all of it, of every start. A driver that wakes several devices takes
seconds, and a busy machine or a cold disk takes its time for the libraries.
"""

Probes = Mapping[Role, Mapping[str, Probe]]
"""What each record answered: role -> record name -> answer."""


def probe_catalogue(
    catalogue: Catalogue,
    machine: Machine,
    seconds: float = PROBE_SECONDS,
    clock: Callable[[], float] = time.monotonic,
) -> dict[Role, dict[str, Probe]]:
    """Ask every offered record about `machine`; each record has an answer in the result.

    Each probe runs in a thread of its own. One that raises, returns something else than `Usable`
    or `Unusable`, or has not answered after `seconds` of `clock` counts as `Unusable`, with a
    reason that says so. A late probe's thread cannot be ended: it is a daemon, its answer is
    dropped. What probes write to `sys.stdout` meanwhile goes to stderr, and the current folder is
    the same afterwards. Ctrl-C passes through.
    """
    roles: tuple[Role, ...] = get_args(Role)
    deadline = clock() + seconds
    with stdout_to_stderr(), folder_kept():
        asked = [
            (role, offer, _Asking(offer, machine))
            for role in roles
            for offer in catalogue.offers(role)
        ]
        answers: dict[Role, dict[str, Probe]] = {role: {} for role in roles}
        for role, offer, asking in asked:
            answers[role][offer.name] = asking.answer(max(deadline - clock(), 0), seconds)
    return answers


class _Asking:
    """One probe under way."""

    def __init__(self, offer: Offer[Record], machine: Machine) -> None:
        self._offer = offer
        self._machine = machine
        self._result: Probe | None = None
        self._thread = threading.Thread(
            target=self._run, name=f"probe of {offer.name}", daemon=True
        )
        self._thread.start()

    def answer(self, left: float, seconds: float) -> Probe:
        """The answer, waited for `left` of all `seconds`."""
        self._thread.join(left)
        result = self._result
        if result is not None:
            return result
        return Unusable(f"its probe gave no answer within {seconds:g} s", self._report())

    def _run(self) -> None:
        try:
            answer: object = self._offer.record.probe(self._machine)
        except BaseException as error:  # noqa: BLE001 - a plugin may raise anything, SystemExit too
            self._result = Unusable(f"its probe raised {describe(error)}", self._report())
            return
        self._result = self._checked(answer)

    def _checked(self, answer: object) -> Probe:
        if isinstance(answer, Usable) and isinstance(answer.detail, str):
            return answer
        if isinstance(answer, Unusable) and isinstance(answer.hint, str):
            if isinstance(answer.reason, str) and answer.reason:
                return answer
            return Unusable("its probe said no without a reason", self._report())
        kind = type(answer).__name__
        return Unusable(f"its probe returned {kind}, not Usable or Unusable", self._report())

    def _report(self) -> str:
        return f"tell the authors of {self._offer.origin}"
