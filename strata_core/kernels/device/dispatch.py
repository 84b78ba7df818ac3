"""Whether rounds in which other lanes take part are stepped or a doorbell: the choice, and why.

It is made once, at start: by what was asked for, by what the runtime and the source allow, else by
a few rounds of either kind. Where rounds of a doorbell come too late it is taken back. See
docs/decisions/0010. No bit depends on it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from itertools import cycle
from statistics import median
from typing import Any, Literal

import numpy as np
from attrs import define, field

from strata_core.errors import Degradation, DeviceError
from strata_core.interfaces import Expert, Source, StableSource, Window
from strata_core.machine import Machine
from strata_core.runtime import BoundsWaits, Runtime, StatesLink

_log = logging.getLogger("strata.device")

Asked = Literal["auto", "stepped", "doorbell"]

BOUND = 0.02
"""Seconds that a device waits for a layer's answer before it gives up; more after long rounds."""

BUDGET = 0.1
"""Seconds in which rounds are timed, the last pair apart."""

PAIRS = (3, 24)
"""Fewest and most pairs of rounds that tell something."""

GAIN = 0.01
"""Part of a stepped round by which a doorbell has to be faster."""

APART = 1000
"""Rounds within which a second time-out ends the use of doorbells; rarer ones cost little."""


def obstacle(
    machine: Machine, runtime: Runtime, device: int, source: Source, away: Iterable[Expert]
) -> str:
    """Why the kernels of a device must not wait for the host; empty where they may.

    `away` are the experts that no device holds.
    """
    # a simulated device has no driver
    if (machine.wsl or machine.os == "windows") and not isinstance(runtime, StatesLink):
        return "drivers of Windows and WSL hold launches back, and end kernels that wait"
    if not isinstance(runtime, BoundsWaits):
        return "the runtime tells of no clock by which kernels could bound a wait"
    clock = runtime.wait_clock(device)
    if not clock.ticks:
        return clock.why_not
    if not isinstance(source, StableSource) or not all(_in_ram(source, each) for each in away):
        return "rounds may have to read experts from a file, which takes as long as it takes"
    return ""


def _in_ram(source: Source, expert: Expert) -> bool:
    found = source.view(expert).in_ram
    source.release(expert)
    return found


def _without_effect(why_not: str) -> Degradation:
    return Degradation(
        what="--dispatch doorbell has no effect",
        why=why_not,
        cost="rounds are stepped: a few hundredths of their time",
        remedy="leave it out; experts that all lie in memory come with --source arena",
    )


def random_tokens(slot: int, vocabulary: int, positions: int) -> Iterator[Window]:
    """Windows of one random token each, at the positions of a sequence in turn, without end."""
    ids = np.random.default_rng(0)
    for position in cycle(range(positions)):
        yield Window(
            ids=ids.integers(vocabulary, size=1, dtype=np.int32),
            positions=np.array([position], np.int32),
            slots=np.array([slot], np.int32),
            logits_rows=np.zeros(1, np.int32),
            kernel_class="window",
        )


@define(eq=False, kw_only=True)
class Dispatcher:
    """The choice of one bound model; the engine's thread changes it, any thread may ask.

    `ticks` are those in a second of the device's clock, `least` the seconds that it waits for an
    answer at least; `measurable`: times of its rounds tell something. `because` is why it is as it
    is.
    """

    asked: Asked
    ticks: float
    least: float
    measurable: bool
    degrade: Callable[[Degradation], None]
    doorbell: bool = field(default=False, init=False)
    because: str = field(default="", init=False)
    alone: bool = field(default=False, init=False)
    time_outs: int = field(default=0, init=False)
    _last: int | None = field(default=None, init=False)
    _round: float = field(default=0.0, init=False)
    _medians: dict[str, float] = field(factory=dict, init=False)

    @classmethod
    def of(
        cls,
        machine: Machine,
        runtime: Runtime,
        device: int,
        source: Source,
        away: Iterable[Expert],
        asked: Asked,
        least: float,
        degrade: Callable[[Degradation], None],
    ) -> Dispatcher:
        """The choice before anything was timed: stepped, where it is not open."""
        why_not = "" if asked == "stepped" else obstacle(machine, runtime, device, source, away)
        if why_not and asked == "doorbell":
            degrade(_without_effect(why_not))
        clock = runtime.wait_clock(device) if isinstance(runtime, BoundsWaits) else None
        made = cls(
            asked=asked,
            ticks=clock.ticks if clock else 0.0,
            least=least,
            measurable=not isinstance(runtime, StatesLink),
            degrade=degrade,
        )
        made.because = "--dispatch stepped" if asked == "stepped" else why_not
        if not made.because and asked == "auto" and not made.measurable:
            made.because = "times of a simulated device say nothing; --dispatch doorbell takes it"
        return made

    @property
    def undecided(self) -> bool:
        """Whether rounds are to be timed: to choose, or to know how long a lane may take."""
        return not self.because

    def stand_aside(self) -> None:
        """No other lane takes part in a round: the device needs nobody to wait for."""
        self.alone, self.because = True, "no other lane takes part"

    def go_without(self, error: DeviceError) -> None:
        """A doorbell could not be made: an error only where it was asked for."""
        if self.asked == "doorbell":
            raise error
        self.because = f"a round could not be made one graph: {error.why}"

    def bound(self, tokens: int) -> float:
        """Seconds that a device waits for the answer to one layer of so many tokens at most.

        As long as a whole round takes, which has many layers, so that only what hangs is late.
        """
        return max(self.least, self._round * tokens)

    def choose(self, attempt: Callable[[bool], bool]) -> None:
        """Time rounds in turn and choose.

        `attempt` runs one, as a doorbell or not, and says whether it was in time.
        """
        attempt(False)  # what is done for the first time
        start = time.perf_counter()
        attempt(False)
        self._round = time.perf_counter() - start
        late = not attempt(True)  # whose bound is known now
        began = time.perf_counter()
        times: dict[bool, list[float]] = {False: [], True: []}
        while len(times[True]) < PAIRS[1] and not late:
            for doorbell, taken in times.items():
                start = time.perf_counter()
                late = not attempt(doorbell) or late
                taken.append(time.perf_counter() - start)
            if time.perf_counter() - began > BUDGET:
                break
        self._round = max(self._round, *times[False], 0.0)
        self._decide(times[False], times[True], late=late)

    def _decide(self, stepped: list[float], doorbell: list[float], *, late: bool) -> None:
        pairs = len(doorbell)
        if pairs:
            self._medians = {"stepped": median(stepped), "doorbell": median(doorbell)}
        said = f"{pairs} rounds each: " + ", ".join(
            f"{name} {seconds * 1e3:.3f} ms" for name, seconds in self._medians.items()
        )
        if self.asked == "doorbell":
            self.doorbell, self.because = True, "--dispatch doorbell"
        elif late:
            self.because = "a round that waited for the host came too late"
        elif pairs < PAIRS[0]:
            self.because = f"rounds are too long for it to matter ({said})"
        else:
            won = self._medians["doorbell"] < (1 - GAIN) * self._medians["stepped"]
            self.doorbell, self.because = won, said
        _log.info("rounds are %s: %s", "doorbells" if self.doorbell else "stepped", self.because)

    def timed_out(self, where: str, seconds: float, number: int) -> None:
        """The doorbell of round `number` came too late; it is run again, stepped."""
        self.time_outs += 1
        last, self._last = self._last, number
        waited = f"the device waited for the CPU's part of {where} for more than {seconds:g} s"
        _log.warning("%s; the round is run again, stepped", waited)
        if last is None or number - last > APART:
            return
        self.doorbell = False
        self.because = f"two doorbells within {APART} rounds came too late"
        self.degrade(
            Degradation(
                what="rounds are stepped from now on instead of doorbells",
                why=f"{waited}, the second time within {APART} rounds",
                cost="a few hundredths of the time of a round",
                remedy="leave the CPU's cores to this program, or give --dispatch stepped",
            )
        )

    def as_json(self) -> dict[str, Any]:
        """For `--json`: how rounds of one token run, and why."""
        return {
            "mode": "device" if self.alone else "doorbell" if self.doorbell else "stepped",
            "because": self.because,
            "round_ms": {name: round(s * 1e3, 3) for name, s in self._medians.items()},
            "time_outs": self.time_outs,
        }
