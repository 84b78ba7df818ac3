"""A process with a model loaded that runs what it is asked, one JSON document a line.

    python tests/device/tables/worker.py MODEL OPTIONS

OPTIONS are settings by key, as JSON. The first line out tells what was loaded. Then for each line
in, `{"do": "run", "kind": "decode", "tokens": N, "seed": S, "number": R}` and the like, one comes
out. Runs are those of `strata bench`: random ids that follow from seed and number. Ends with its
input.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT)]

import strata_core  # noqa: E402
from strata_core.cache.profile import write_profile  # noqa: E402
from strata_core.engine.bench import Bench  # noqa: E402
from strata_core.engine.messages import Finished  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402


class Served:
    """One loaded model."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        began = time.perf_counter()
        self.model = strata_core.load(model, learn=False, **options)
        self.ready = time.perf_counter() - began
        self.rounds = 0.0
        executor = self.model._running.executor
        self.timed = hasattr(executor, "_run_round")
        if self.timed:
            executor._run_round = self._clocked(executor._run_round)

    def _clocked(self, call: Any) -> Any:
        """What a round takes from its first launch to its end; the rest is the host's time."""

        def timed(*args: Any) -> None:
            began = time.perf_counter()
            try:
                call(*args)
            finally:
                self.rounds += time.perf_counter() - began

        return timed

    def about(self) -> dict[str, Any]:
        """What was loaded, and where it lies."""
        model = self.model
        return {
            "load_s": self.ready,
            "plan": model.beside.as_json(model.counters),
            "lanes": model.lanes,
            "threads": model.capabilities.threads,
            "selections": [f"{s.role} {s.name}" for s in model.selections],
            "degradations": [str(item) for item in model.degradations],
        }

    def run(self, kind: str, tokens: int, seed: int, number: int) -> dict[str, Any]:
        """One run of `strata bench`, with what the lanes served meanwhile."""
        both = {"prompt": 0, "decode": 0, kind: tokens}
        vocabulary = self.model.checkpoint.hyper.vocabulary
        bench = Bench(repeats=1, seed=seed, vocabulary=vocabulary, **both)
        before, self.rounds = self._counts(), 0.0
        done = bench._run(kind, number, self._generate)
        after = self._counts()
        host = None
        if kind == "decode" and self.timed:
            host = (done.seconds - self.rounds) / done.rounds * 1e6
        return {
            "tok_s": done.tok_s,
            "seconds": done.seconds,
            "host_us": host,
            "counters": {
                lane: {k: v - before.get(lane, {}).get(k, 0) for k, v in counts.items()}
                for lane, counts in after.items()
            },
        }

    def _counts(self) -> dict[str, dict[str, int]]:
        return {lane: dict(counts) for lane, counts in self.model.counters.items()}

    def _generate(self, ids: tuple[int, ...], later: tuple[int, ...], tokens: int) -> Finished:
        events = self.model.generate(ids, max_tokens=tokens, ignore_eos=True, continuation=later)
        *_, last = events
        assert isinstance(last, Finished)
        return last

    def profile(self, path: str) -> dict[str, Any]:
        """Write which experts were asked for so far."""
        found = self.model.profile()
        write_profile(found, Path(path))
        return {"picks": found.picks}


def main() -> int:
    """Load, answer, close. Errors are answers as well."""
    out, sys.stdout = sys.stdout, sys.stderr

    def say(**answer: Any) -> None:
        print(json.dumps(answer), file=out, flush=True)

    try:
        served = Served(sys.argv[1], json.loads(sys.argv[2]))
    except StrataError as error:
        say(error=" ".join(str(error).split()))
        return 1
    with served.model:
        say(**served.about())
        for line in sys.stdin:
            asked = json.loads(line)
            try:
                say(**getattr(served, asked.pop("do"))(**asked))
            except StrataError as error:
                say(error=" ".join(str(error).split()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
