"""A model's plan beside what became of it: memory once it is loaded, the rate once it generates."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from attrs import define, field

from strata_core.engine.assemble import Running
from strata_core.engine.devices import is_simulated
from strata_core.engine.messages import Finished
from strata_core.engine.prepare import Prepared
from strata_core.engine.rates import MEASURED, RECORDED, SHORT, remember
from strata_core.plan.actual import (
    Actual,
    Beside,
    disk_line,
    memory_beside,
    memory_line,
    speed_line,
)
from strata_core.plan.plan import Plan
from strata_core.plan.speed import Lane, learned

_LOG = logging.getLogger("strata.plan")

DECODE = "decode"
"""What the predicted rate is about."""

READ_ENOUGH = 64 << 20
"""Fewer bytes read from a file tell no rate of the disk."""


@define(eq=False)
class PlanBeside:
    """What was planned, and what there is to set beside it so far. Any thread may call it.

    `rates_file` is where measured rates are kept for the next plan; None: nowhere.
    """

    plan: Plan
    actual: Actual = field(factory=Actual)
    rates_file: Path | None = None
    _fastest: float = 0.0
    _lock: Lock = field(factory=Lock)

    def lines(self, counters: Mapping[str, Mapping[str, int]]) -> list[str]:
        """What a user is told: a line about memory, one about the rate and one about the disk.

        The last two once there is something to tell. `counters` are the model's.
        """
        found = [memory_line(memory_beside(self.plan, self.actual), self.actual.paths)]
        speed, disk = self.speed, self.disk(counters)
        if speed is not None and speed.actual is not None:
            found.append(speed_line(speed) + self._by_others())
        if disk is not None:
            found.append(disk_line(disk))
        return [f"plan: {line}" for line in found]

    def _by_others(self) -> str:
        """What to say of a prediction that no run here has had a part in; else nothing."""
        speed = self.plan.speed
        if speed is None:
            return ""
        used = [lane for lane, nbytes in speed.bytes_by_lane.items() if nbytes]
        if any(speed.rates[lane].origin == MEASURED for lane in used if lane in speed.rates):
            return ""
        return f" (predicted by rates {RECORDED})"

    def finished(self, done: Finished) -> None:
        """Take the rate of a request. Short ones tell nothing."""
        if done.rounds < SHORT or done.decode_s <= 0:
            return
        rate = done.rounds / done.decode_s
        with self._lock:
            self._fastest = max(self._fastest, rate)

    @property
    def speed(self) -> Beside | None:
        """The predicted rate beside the best that was measured; None: no prediction."""
        if self.plan.speed is None:
            return None
        return Beside(DECODE, self.plan.speed.tokens_s, self._fastest or None)

    def disk(self, counters: Mapping[str, Mapping[str, int]]) -> Beside | None:
        """The disk's rate by which was predicted, beside what it gave; None: nothing was read."""
        rate = disk_rate(counters)
        if rate is None or self.plan.speed is None:
            return None
        return Beside("file", self.plan.speed.rates["file"].bytes_s, rate)

    def as_json(self, counters: Mapping[str, Mapping[str, int]]) -> dict[str, Any]:
        """Plan and actual as a member of a document. `counters` are the model's."""
        speed, disk = self.speed, self.disk(counters)
        return {
            "memory": [row.as_json() for row in memory_beside(self.plan, self.actual)],
            "paths": list(self.actual.paths),
            "decode_tok_s": speed.as_json() if speed else None,
            "speed": self.plan.speed.as_json() if self.plan.speed else None,
            "file_bytes_s": disk.as_json() if disk else None,
        }

    def keep(self, counters: Mapping[str, Mapping[str, int]]) -> None:
        """Remember what was measured for the next plan of this model, and log the lines."""
        for line in self.lines(counters):
            _LOG.debug("%s", line)
        measured: dict[Lane, float] = {}
        if self.plan.speed is not None and self._fastest:
            found = learned(self.plan.speed, self._fastest, MEASURED)
            if found is not None:
                measured[found[0]] = found[1].bytes_s
        disk = disk_rate(counters)
        if disk is not None and counters["file"]["bytes"] >= READ_ENOUGH:
            measured["file"] = disk
        remember(self.rates_file, measured)


def plan_beside(prepared: Prepared, running: Running) -> PlanBeside:
    """The plan of a model that has just been started, beside what it took."""
    backend = prepared.backend.name
    simulated = is_simulated(prepared.catalogue.backend(backend).record)
    made = PlanBeside(
        plan=prepared.plan,
        actual=running.actual(prepared.plan, simulated=simulated),
        rates_file=prepared.rates_file,
    )
    for line in made.lines({}):
        _LOG.debug("%s", line)
    return made


def disk_rate(counters: Mapping[str, Mapping[str, int]]) -> float | None:
    """Bytes a second that were read from the file while a read was on its way; None: none were."""
    file = counters.get("file", {})
    if not file.get("read_us") or not file.get("bytes"):
        return None
    return file["bytes"] / file["read_us"] * 1e6
