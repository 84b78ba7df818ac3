"""How fast a model runs: a prompt of random ids, and a continuation from one token, run by run.

The two kinds of run are llama-bench's tests `pp` and `tg`, so that figures can be set side by
side. A prompt run computes a prompt of the given length in an empty context, with the logits of its
last position. A decode run feeds one token a round, the first at position 0; each round ends with a
token drawn (greedy), but the next one fed is a random id as well. Its time is that of all rounds,
the one of the first token included. Ids are uniform over the vocabulary. Each kind is run once
before it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Literal

import numpy as np
from attrs import frozen

from strata_core.engine.messages import Finished
from strata_core.errors import EngineError

Kind = Literal["prompt", "decode"]
Generate = Callable[[tuple[int, ...], tuple[int, ...], int], Finished]
"""Runs a prompt and so many tokens after it, of which it is given all but the last; how it went."""


@frozen
class Run:
    """One counted run: the tokens it computed, its seconds, its rounds of one token.

    `distinct` counts the different ids that were fed.
    """

    tokens: int
    seconds: float
    rounds: int
    distinct: int

    @property
    def tok_s(self) -> float:
        """Tokens a second."""
        return self.tokens / max(self.seconds, 1e-9)


@frozen
class Series:
    """The counted runs of one kind, all of the same length, in the order they were run."""

    kind: Kind
    runs: tuple[Run, ...]

    @property
    def tok_s(self) -> float:
        """Median of the runs' tokens a second."""
        return median(run.tok_s for run in self.runs)

    @property
    def spread(self) -> tuple[float, float]:
        """Lowest and highest of the runs' tokens a second."""
        rates = [run.tok_s for run in self.runs]
        return min(rates), max(rates)


@frozen(kw_only=True)
class Bench:
    """What to run: tokens of a prompt and of a continuation (0 leaves one out), and how often.

    `first` is the id that a text of this model begins with, None where it has none: it stands at
    position 0 of every run, as in llama-bench. All other ids follow from `seed`.
    """

    prompt: int
    decode: int
    repeats: int
    seed: int
    vocabulary: int
    first: int | None = None

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of runs asked for, in order."""
        asked: tuple[tuple[Kind, int], ...] = (("prompt", self.prompt), ("decode", self.decode))
        return tuple(kind for kind, tokens in asked if tokens)

    @property
    def runs(self) -> int:
        """Runs in all, those included that do not count."""
        return len(self.kinds) * (self.repeats + 1)

    def ids(self, kind: Kind, run: int) -> tuple[int, ...]:
        """The uniform ids that a run feeds, in order; run 0 is the one not counted."""
        count = self.prompt if kind == "prompt" else self.decode
        numbers = np.random.default_rng((self.seed, int(kind == "decode"), run))
        drawn = [int(i) for i in numbers.integers(self.vocabulary, size=count)]
        return tuple(drawn if self.first is None else [self.first, *drawn[1:]])

    def measure(
        self, generate: Generate, on_run: Callable[[int, int], None] | None = None
    ) -> tuple[Series, ...]:
        """Run every kind on the caller's thread.

        `on_run(done, total)` is called after each run, never during one. What `generate` raises
        passes through; EngineError where it does not run what it was asked to.
        """
        measured = []
        done = 0
        for kind in self.kinds:
            counted = []
            for number in range(self.repeats + 1):
                run = self._run(kind, number, generate)
                if number:
                    counted.append(run)
                done += 1
                if on_run is not None:
                    on_run(done, self.runs)
            measured.append(Series(kind, tuple(counted)))
        return tuple(measured)

    def _run(self, kind: Kind, number: int, generate: Generate) -> Run:
        ids = self.ids(kind, number)
        fed_at_once, wanted = (len(ids), 0) if kind == "prompt" else (1, self.decode)
        done = generate(ids[:fed_at_once], ids[fed_at_once:], wanted)
        if done.reason != "length" or len(done.token_ids) != wanted:
            raise EngineError(
                f"a {kind} run ended after {len(done.token_ids)} of {wanted} tokens",
                f"its reason was {done.reason!r}",
                "run it again; a run that is cut short measures nothing",
            )
        if kind == "prompt":
            return Run(len(ids), done.prompt_s, done.rounds, len(set(ids)))
        # The last token drawn is not fed: as many rounds as tokens, the prompt's one among them.
        return Run(len(ids), done.prompt_s + done.decode_s, done.rounds + 1, len(set(ids)))
