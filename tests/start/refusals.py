"""Refuses every call of a start's verbs in turn, and looks at what becomes of the start.

    python tests/start/refusals.py [--sources arena,sliced-pinned] [--orders plain,wsl] [--every N]

For each verb and each n up to its last call in a clean start, the n-th call is refused (or fails,
where the verb cannot be refused). Each start must end in a StrataError with all three lines, or go
well: then with the same tokens, and with a degradation beyond those of the clean start where what
was refused is missing. Nothing may be left behind: memory, claims, threads. Each is bounded.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import evolve, field, frozen

from strata_core import api
from strata_core.engine import prepare
from strata_core.errors import StrataError
from strata_core.interfaces import AllocatorRecord
from strata_core.machine.kernel_log import KEY
from strata_core.plugins import Offer, load_plugins
from strata_core.testing import sim_backend
from strata_core.testing.machines import recorded_pc
from strata_core.testing.sim import SimFaults
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

BOUND_S = 120.0
PROMPT = (5, 9, 3)
TOKENS = 4
HARMLESS = {"take_error", "memory", "host_free"}
"""Verbs whose failure may cost nothing: one only tells what is free, one clears an error, and what
the probe could not free it frees once more."""


@frozen(eq=False)
class End:
    """How one start ended."""

    error: BaseException | None
    tokens: tuple[int, ...]
    degradations: tuple[str, ...]
    calls: dict[str, int]
    left: list[str]


@frozen
class Count:
    """What became of the refusals of one verb."""

    calls: int
    errors: int
    degraded: int
    unharmed: int


@frozen(eq=False)
class Lab:
    """Starts one small model on three simulated devices, two of them helpers.

    `order` is "plain", or "wsl" for the policy of strata-wsl with its probe.
    """

    folder: Path
    source: str
    order: str = "plain"
    model: Path = field(init=False)

    def __attrs_post_init__(self) -> None:
        path = self.folder / "tiny.gguf"
        if not path.exists():
            write_tiny_gguf(path, hyper=tiny_hyper(layers=1), seed=3)
        object.__setattr__(self, "model", path)

    def start(self, faults: SimFaults | None = None) -> End:
        """One start and a few tokens, in a thread that is waited for so long and no longer."""
        ends: list[End] = []
        thread = threading.Thread(target=lambda: ends.append(self._start(faults)), daemon=True)
        thread.start()
        thread.join(BOUND_S)
        if not ends:
            raise AssertionError(f"{faults} hangs: no end after {BOUND_S:g} s")
        return ends[0]

    def _start(self, faults: SimFaults | None) -> End:
        for remembered in self.folder.glob("pins-*.json"):
            remembered.unlink()  # so that each start asks the driver anew
        made: list[Any] = []
        before = set(threading.enumerate())
        error: BaseException | None = None
        tokens: tuple[int, ...] = ()
        told: tuple[str, ...] = ()
        calls: dict[str, int] = {}
        with _installed(made, faults, self.order):
            try:
                with api.load(self.model, **self._options()) as model:
                    calls = made[0].runtime.calls()
                    events = list(model.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True))
                    tokens = events[-1].token_ids
                    told = tuple(item.what for item in model.degradations)
            except BaseException as failure:  # noqa: BLE001 - whatever it is, it is the answer
                error = failure
        left = [t.name for t in set(threading.enumerate()) - before if t.is_alive()]
        for backend in made:
            left += [str(claim) for claim in backend.ledger.outstanding()]
            left += backend.runtime.leaks()
            left += [] if backend.runtime.closed else ["the runtime is open"]
        return End(error, tokens, told, calls, left)

    def _options(self) -> dict[str, Any]:
        return {
            "backend": "sim",
            "threads": 1,
            "source": self.source,
            "cache_dir": self.folder,
            "sim_devices": 3,
            "sim_vram": 0.25,
            "sim_pin_budget": 0.3,
            "expert_cache": 2,
            "expert_cache_device1": 2,
            "expert_cache_device2": 2,
            "max_context": 64,
        }


@contextmanager
def _installed(made: list[Any], faults: SimFaults | None, order: str) -> Iterator[None]:
    """While this runs, sim's devices have these faults, and no plugin is there but one for WSL."""

    def build(context: Any) -> Any:
        backend = sim_backend.build(context, faults=faults)
        made.append(backend)
        return backend

    found = load_plugins([])
    sim = found.backend("sim")
    others = tuple(offer for offer in found.backends if offer.name != "sim")
    found = evolve(found, backends=(*others, evolve(sim, record=evolve(sim.record, build=build))))
    if order == "wsl":
        found = evolve(found, allocators=(*found.allocators, wsl_offer()))
    machine = recorded_pc(
        {"module:llvmlite": True, "path:/dev/dxg": True, KEY: {"readable": False}},
        physical_cores=2,
        wsl=2 if order == "wsl" else None,
    )
    with (
        mock.patch.object(prepare, "load_plugins", return_value=found),
        mock.patch.object(api, "read_machine", return_value=machine),
    ):
        yield


def wsl_offer() -> Offer[AllocatorRecord]:
    """strata-wsl's record, made to serve the simulated devices."""
    from strata_wsl.plugin import strata_allocators

    (record,) = strata_allocators()
    return Offer(evolve(record, serves=("sim",), supersedes=("sim-pinned",)), "strata-wsl", "0")


def check(clean: End, end: End, what: str) -> str:
    """What became of a start with a refusal: "error", "degraded" or "unharmed".

    Raises AssertionError where it is none of what is allowed.
    """
    assert not end.left, f"{what} leaves {end.left}"
    if end.error is not None:
        assert isinstance(end.error, StrataError), f"{what} ends in {end.error!r}"
        lines = (end.error.what, end.error.why, end.error.remedy)
        assert all(lines), f"{what} ends in an error that lacks a line: {lines}"
        return "error"
    assert end.tokens == clean.tokens, f"{what} changes tokens"
    return "degraded" if set(end.degradations) - set(clean.degradations) else "unharmed"


def harmless(verb: str, order: str) -> bool:
    """Whether a start may go well with nothing to report.

    A refused piece of the probe makes the limit smaller; what is left of it may still be enough.
    """
    return verb in HARMLESS or (verb == "host_alloc" and order == "wsl")


def cases(calls: dict[str, int], every: int) -> Iterator[tuple[str, int]]:
    """(verb, n) for every n, or the first, the last and each `every`-th between."""
    for verb, count in sorted(calls.items()):
        for n in range(1, count + 1):
            if every == 1 or n in (1, count) or n % every == 0:
                yield verb, n


def sweep(lab: Lab, every: int = 1) -> tuple[dict[str, Count], list[str]]:
    """Refuse calls one at a time: counts by verb, and what ended otherwise than it may."""
    clean = lab.start()
    assert clean.error is None, clean.error
    assert not clean.left, clean.left
    found: dict[str, Counter[str]] = {}
    wrong: list[str] = []
    for verb, n in cases(clean.calls, every):
        where = f"source {lab.source}, {lab.order} order"
        what = f"{verb} refused at call {n} of {clean.calls[verb]} ({where})"
        ends = found.setdefault(verb, Counter())
        try:
            end = check(clean, lab.start(SimFaults({verb: n})), what)
            assert end != "unharmed" or harmless(verb, lab.order), f"{what} goes unnoticed"
            ends[end] += 1
        except AssertionError as error:
            wrong.append(str(error))
    counts = {
        verb: Count(sum(ends.values()), ends["error"], ends["degraded"], ends["unharmed"])
        for verb, ends in found.items()
    }
    return counts, wrong


def table(counts: dict[str, Count]) -> str:
    """The counts as lines of text."""
    rows = [f"{'verb':16}{'refused':>8}{'error':>8}{'degraded':>10}{'unharmed':>10}"]
    for verb, count in counts.items():
        rows.append(
            f"{verb:16}{count.calls:8}{count.errors:8}{count.degraded:10}{count.unharmed:10}"
        )
    return "\n".join(rows)


def main() -> int:
    """Sweep the sources and orders asked for and print a table for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sources", default="arena,sliced-pinned,mmap")
    parser.add_argument("--orders", default="plain,wsl")
    parser.add_argument("--every", type=int, default=1)
    asked = parser.parse_args()
    sys.path.append(str(Path(__file__).parents[2] / "plugins" / "wsl"))
    failed = False
    for source, order in product(asked.sources.split(","), asked.orders.split(",")):
        with tempfile.TemporaryDirectory() as folder:
            counts, wrong = sweep(Lab(Path(folder), source, order), asked.every)
        print(f"source {source}, {order} order:\n{table(counts)}\n")
        print(*(f"WRONG: {line}" for line in wrong), sep="\n", flush=True)
        failed = failed or bool(wrong)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
