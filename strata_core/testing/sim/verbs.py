"""What every verb of the simulator has in common: one lock, counted calls, pending errors."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from threading import Condition, RLock, local
from typing import Concatenate, ParamSpec, TypeVar

from strata_core.errors import DeviceError, Refused
from strata_core.testing.sim.account import Account, Level, LinkAccount
from strata_core.testing.sim.failure import (
    INVALID_DEVICE,
    LAUNCH_FAILED,
    NO_CONTEXT,
    OUT_OF_MEMORY,
    SHUT_DOWN,
    UNKNOWN,
    broken,
    code_of,
)
from strata_core.testing.sim.hardware import REFUSABLE, SimFaults, SimHardware
from strata_core.testing.sim.places import Places
from strata_core.testing.sim.work import Queues

P = ParamSpec("P")
R = TypeVar("R")


_MOMENT = 20e-6
"""Seconds between two looks of a kernel that waits for the host."""


class _Thread(local):
    """What the driver keeps for each thread of the host: the code of its pending error."""

    pending: str | None = None


class SimState:
    """The simulated machine behind the verbs, and the rules that hold for all of them."""

    label = "SIM"

    def __init__(self, hardware: SimHardware, faults: SimFaults) -> None:
        devices = len(hardware.vram)
        self.hardware = hardware
        self.faults = faults
        self.lock = RLock()
        self._moment = Condition(self.lock)
        self.account = Account(
            links=tuple(LinkAccount() for _ in range(devices)),
            vram=tuple(Level() for _ in range(devices)),
        )
        self.places = Places(hardware, self.account)
        self.queues = Queues()
        self.contexts: set[int] = set()
        self.breaches: list[str] = []
        self.closed = self.lost = False
        self._calls: Counter[str] = Counter()
        self._thread = _Thread()
        self._kept: BaseException | None = None
        self._noted: DeviceError | None = None

    def enter(self, verb: str, *, heed_error: bool = True) -> None:
        """Begin a verb: count it, fail it where that is wanted, or for what is pending."""
        self._calls[verb] += 1
        if self.closed:
            raise broken(
                f"{verb}: the runtime is closed",
                SHUT_DOWN,
                "nothing is done after close",
                "close the runtime last",
            )
        self.lost = self.lost or self.faults.loses(verb, self._calls[verb])
        if self.lost and verb not in ("take_error", "close"):
            raise DeviceError(
                f"{verb} failed",
                f"{LAUNCH_FAILED}: a kernel went wrong before",
                "the devices are lost to this process: start again",
            )
        if self.faults.hits(verb, self._calls[verb]):
            raise self.keep(_injected(verb, self._calls[verb]))
        if not heed_error:
            return
        if self._kept is not None:
            kept, self._kept = self._kept, None
            self.keep(_as_device_error(kept))
            raise kept
        if self._thread.pending is not None:
            raise DeviceError(
                f"{verb} failed for an error that was pending",
                self._thread.pending,
                "take the error after a refusal, before going on",
            )

    def keep(self, error: DeviceError) -> DeviceError:
        """Make an error the thread's pending one, unless it has one already; returns it."""
        if self._thread.pending is None:
            self._thread.pending = code_of(error)
        return error

    def taken(self) -> str | None:
        """This thread's pending error, or what was kept for the next verb; both are gone then."""
        text, self._thread.pending = self._thread.pending, None
        kept, self._kept = self._kept, None
        if kept is None:
            return text
        if not isinstance(kept, Exception):
            raise kept  # an interrupt is no error of the driver
        return text or code_of(_as_device_error(kept))

    def keep_for_next(self, error: BaseException) -> None:
        """Have the next verb of any thread raise what happened where nothing could be raised."""
        self.keep(_as_device_error(error))
        if self._kept is None:
            self._kept = error

    def failed_aside(self, error: BaseException) -> None:
        """Work that nobody waits for failed: a broken rule is noted, the next verb raises it."""
        if isinstance(error, DeviceError):
            self.note_breach(error)
        self.keep_for_next(error)

    def let_others_go_on(self) -> None:
        """A kernel that waits lets the lock go for a moment; its thread holds it."""
        self._moment.wait(_MOMENT)

    def note_breach(self, error: DeviceError) -> None:
        """Record a broken rule; a refusal is none."""
        if not isinstance(error, Refused) and error is not self._noted:
            self._noted = error  # a kernel's own error passes through here twice
            self.breaches.append(str(error))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """Record the rules that are found broken inside, where no verb does."""
        try:
            yield
        except DeviceError as error:
            self.note_breach(error)
            raise

    def need_device(self, device: int, verb: str) -> None:
        """Refuse an index that no device has."""
        if not 0 <= device < len(self.hardware.vram):
            raise broken(
                f"{verb}: there is no device {device}",
                INVALID_DEVICE,
                f"there are {len(self.hardware.vram)}, counted from 0",
                "name a device that devices() lists",
            )

    def need_context(self, device: int, verb: str) -> None:
        """Refuse to use a device before its context is open."""
        self.need_device(device, verb)
        if device not in self.contexts:
            raise broken(
                f"{verb}: {self.label}{device} has no context yet",
                NO_CONTEXT,
                "a device is used after open_context",
                "open its context first",
            )

    def need_any_context(self, verb: str) -> None:
        """Refuse to pin host memory before any device is in use."""
        if not self.contexts:
            raise broken(
                f"{verb}: no device has a context yet",
                NO_CONTEXT,
                "host memory is page-locked for open devices",
                "open a context first",
            )


S = TypeVar("S", bound=SimState)


def verb(
    method: Callable[Concatenate[S, P], R],
) -> Callable[Concatenate[S, P], R]:
    """Make a method a verb: it is alone, counted and faulted, and its error stays pending."""
    name = method.__name__

    @wraps(method)
    def call(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.lock:
            self.enter(name)
            try:
                return method(self, *args, **kwargs)
            except DeviceError as error:
                self.note_breach(error)
                self.keep(error)
                raise

    return call


def _injected(verb: str, call: int) -> DeviceError:
    kind, code = (Refused, OUT_OF_MEMORY) if verb in REFUSABLE else (DeviceError, UNKNOWN)
    return kind(
        f"{verb} failed",
        f"{code}: call {call} was to fail",
        "this is a fault that a test asked for",
    )


def _as_device_error(error: BaseException) -> DeviceError:
    if isinstance(error, DeviceError):
        return error
    return broken("a launch failed", UNKNOWN, repr(error), "see the error itself")
