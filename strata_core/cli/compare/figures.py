"""What processes measured, and the ratios of pairs of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

from attrs import frozen

Kind = Literal["prompt", "decode"]
KINDS: tuple[Kind, ...] = ("prompt", "decode")


def spread(numbers: Sequence[float]) -> dict[str, float]:
    """Median, lowest and highest of at least one number."""
    return {"median": median(numbers), "low": min(numbers), "high": max(numbers)}


@frozen
class Asked:
    """What every process is asked to measure; 0 tokens leave a kind out.

    `threads` are the peer's; Strata takes as many where they were `named`, else what its backend
    takes by itself: beside a device a core is left to the driver.
    """

    prompt: int
    decode: int
    repeats: int
    threads: int
    named: bool = False

    @property
    def tokens(self) -> dict[Kind, int]:
        """The kinds to measure, with their tokens."""
        both = zip(KINDS, (self.prompt, self.decode), strict=True)
        return {kind: count for kind, count in both if count}

    @property
    def flags(self) -> list[str]:
        """The flags that both programs have alike."""
        return ["-p", str(self.prompt), "-n", str(self.decode), "-r", str(self.repeats)]


@frozen
class Figures:
    """Tokens a second of each repeat of one process, by kind, and what it said about itself."""

    samples: Mapping[Kind, tuple[float, ...]]
    about: Mapping[str, Any]

    def tok_s(self, kind: Kind) -> float:
        """The process's figure: the median of its repeats."""
        return median(self.samples[kind])

    def as_json(self) -> dict[str, Any]:
        """The figures as a document's part."""
        return {"samples": {k: list(v) for k, v in self.samples.items()}, "about": dict(self.about)}


@frozen
class Pair:
    """One process of each program, run one after the other."""

    strata: Figures
    peer: Figures

    def ratio(self, kind: Kind) -> float:
        """Strata's figure over the peer's: above 1 Strata is the faster one."""
        return self.strata.tok_s(kind) / self.peer.tok_s(kind)


Summary = dict[Kind, dict[str, dict[str, float]]]


def summary(pairs: Sequence[Pair], kinds: Sequence[Kind]) -> Summary:
    """For each kind the spread over pairs of both programs' figures and of their ratio.

    Ratios are taken pair by pair, so that a machine that slows down for some pairs changes none.
    """
    return {
        kind: {
            "strata_tok_s": spread([pair.strata.tok_s(kind) for pair in pairs]),
            "peer_tok_s": spread([pair.peer.tok_s(kind) for pair in pairs]),
            "ratio": spread([pair.ratio(kind) for pair in pairs]),
        }
        for kind in kinds
    }
