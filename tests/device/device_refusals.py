"""Memory that a real driver refuses: every allocation in turn, and the settings that refuse.

    python tests/device/device_refusals.py MODEL [--backend cuda] [--every N]

For each verb that gives memory (on the device, page-locked, registered) and each n up to its last
call in a clean start, the n-th call is refused. Each start must end in an error with all three
lines, or go well with the same tokens; either way everything that was given is given back. Then the
settings: the complement refused, page-locked in part and not at all, a limit of 1 GiB with contexts
first. Their logits must be the clean start's. Leaves with 1 where one does not.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

from attrs import frozen

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

import strata_core  # noqa: E402
from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.errors import Refused, StrataError  # noqa: E402
from strata_core.kernels.device.driver_runtime import DriverRuntime  # noqa: E402
from strata_core.testing.sim import SimRuntime  # noqa: E402

PROMPT = (5, 9, 3, 7)
TOKENS = 6
GIVES = {"alloc": "free", "host_alloc": "host_free", "register": "unregister"}
"""Verbs that give memory, and those that take it back."""

WAYS: dict[str, dict[str, Any]] = {
    "complement refused": {"source": "sliced-pinned", "test_complement_refuse": True},
    "complement all": {"source": "sliced-pinned", "complement_pin_gib": "all"},
    "complement none": {"source": "sliced-pinned", "complement_pin_gib": 0.0},
    "1 GiB, contexts first": {
        "source": "sliced-pinned",
        "pin_limit_gib": 1.0,
        "early_remote_contexts": True,
    },
}


@frozen
class End:
    """How a start ended: the hash of its first logits and its tokens, or its error."""

    logits: str = ""
    tokens: tuple[int, ...] = ()
    error: str = ""
    degraded: int = 0
    paths: tuple[str, ...] = ()


class Counted:
    """Counts the calls of the verbs, refuses one, and knows what was not given back."""

    def __init__(self, verb: str = "", number: int = 0) -> None:
        self.verb, self.number = verb, number
        self.calls: Counter[str] = Counter()
        self.open: Counter[str] = Counter()

    @contextmanager
    def installed(self, runtime: type) -> Iterator[None]:
        """While this runs, every runtime of the class is counted."""
        changed = {}
        for gives, takes in GIVES.items():
            changed[gives] = self._gives(gives, getattr(runtime, gives))
            changed[takes] = self._takes(gives, getattr(runtime, takes))
        with mock.patch.multiple(runtime, **changed):
            yield

    def _gives(self, verb: str, call: Any) -> Any:
        def given(*args: Any) -> Any:
            self.calls[verb] += 1
            if (verb, self.calls[verb]) == (self.verb, self.number):
                why = f"call {self.number} of {verb} is refused by a test"
                raise Refused(f"{verb} was refused", why, "there is nothing to do")
            result = call(*args)
            self.open[verb] += 1
            return result

        return given

    def _takes(self, verb: str, call: Any) -> Any:
        def taken(*args: Any) -> Any:
            result = call(*args)
            self.open[verb] -= 1
            return result

        return taken

    @property
    def left(self) -> dict[str, int]:
        """What was given and not taken back, by verb."""
        return {verb: count for verb, count in self.open.items() if count}


def start(model: Path, options: dict[str, Any]) -> End:
    """A start and a few tokens."""
    try:
        with strata_core.load(model, learn=False, **options) as loaded:
            *_, done = loaded.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True)
            paths = loaded.beside.actual.paths
            degraded = len(list(loaded.degradations))
        return End(done.first_logits_sha256, tuple(done.token_ids), "", degraded, tuple(paths))
    except StrataError as error:
        if not (error.what and error.why and error.remedy):
            return End(error=f"an error that lacks a line: {error}")
        return End(error=f"StrataError: {' '.join(str(error).split())}")


def refused(model: Path, runtime: type, options: dict[str, Any], every: int) -> int:
    """Refuse each call in turn; how many starts did not end as they should."""
    clean = Counted()
    with clean.installed(runtime):
        wanted = start(model, options)
    if wanted.error or clean.left:
        print(f"the clean start: {wanted.error or 'went well'}, left {clean.left}")
        return 1
    wrong = 0
    for verb in GIVES:
        found: Counter[str] = Counter()
        for number in range(1, clean.calls[verb] + 1, every):
            counted = Counted(verb, number)
            with counted.installed(runtime):
                end = start(model, options)
            good = end.error.startswith("StrataError") or (end.logits, end.tokens) == (
                wanted.logits,
                wanted.tokens,
            )
            word = "error" if end.error else "degraded" if end.degraded else "went well"
            if not good or counted.left:
                wrong += 1
                word = "WRONG"
                print(f"{verb} {number}: {end}, left {counted.left}", flush=True)
            found[word] += 1
        print(f"{verb}: {clean.calls[verb]} calls; {dict(found)}", flush=True)
    return wrong


def settings(model: Path, options: dict[str, Any], nbytes: int) -> int:
    """The settings that refuse; how many have other tokens. The model's experts have `nbytes`."""
    wanted, wrong = start(model, options), 0
    part = {"source": "sliced-pinned", "complement_pin_gib": nbytes / 8 / 2**30}
    for name, more in {**WAYS, "complement in part": part}.items():
        end = start(model, {**options, **more})
        equal = (end.logits, end.tokens) == (wanted.logits, wanted.tokens)
        wrong += not equal
        say = "equal" if equal else f"DIFFERS {end.error}"
        print(f"{name}: {say}, {end.logits[:16]}; {'; '.join(end.paths)}", flush=True)
    return wrong


def main() -> int:
    """Both parts."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--every", type=int, default=1, help="refuse one call of so many")
    asked = parser.parse_args()
    checkpoint = open_checkpoint(asked.model)
    files = checkpoint.experts
    experts = files.count * len(files.layouts)
    nbytes = files.count * sum(layout.nbytes for layout in files.layouts.values())
    checkpoint.close()
    runtime = SimRuntime if asked.backend == "sim" else DriverRuntime
    options = {"backend": asked.backend, "expert_cache": experts // 2, "max_context": 64}
    wrong = 0
    for source in ("arena", "sliced-pinned"):
        print(f"## {source}", flush=True)
        wrong += refused(asked.model, runtime, {**options, "source": source}, asked.every)
    print("## settings", flush=True)
    wrong += settings(asked.model, options, nbytes)
    print(f"{wrong} starts did not end as they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
