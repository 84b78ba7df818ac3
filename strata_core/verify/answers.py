"""What a model is asked in every way, and what comes of it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import field, frozen

from strata_core.engine.messages import Finished
from strata_core.engine.step import prompt_class
from strata_core.interfaces import Capabilities
from strata_core.plan.actual import Actual

TOKENS = 24
"""Tokens of each continuation."""


@frozen(kw_only=True)
class Prompt:
    """A prompt of seeded random ids, and how it is continued."""

    name: str
    ids: tuple[int, ...]
    temperature: float = 0.0


@frozen
class Answer:
    """What came of a prompt: hashes of the first logits and of the token ids."""

    logits: str
    tokens: str

    @classmethod
    def of(cls, done: Finished) -> Answer:
        """That of a request which has ended well."""
        tokens = hashlib.sha256(np.array(done.token_ids, "<i4").tobytes()).hexdigest()
        return cls(done.first_logits_sha256, tokens)


@frozen(kw_only=True)
class Run:
    """One way's answers by prompt, what served it, and what was degraded meanwhile.

    `exact`: the backend says that it keeps docs/arithmetic.md. `own_order` names the prompts that
    the backend sums in an order of its own (section 11 there).
    """

    answers: Mapping[str, Answer]
    counters: Mapping[str, Mapping[str, int]] = field(factory=dict)
    actual: Actual = field(factory=Actual)
    reads: Mapping[str, Any] = field(factory=dict)
    lanes: Mapping[str, Any] = field(factory=dict)
    exact: bool = True
    own_order: frozenset[str] = frozenset()
    degradations: tuple[str, ...] = ()
    seconds: float = 0.0


class Expected:
    """What runs have to answer: as a reference, or as the backend's own first run.

    The latter goes for the prompts whose bits are the backend's own, and is taken from the first
    run that is looked at. Not for several threads.
    """

    def __init__(self, reference: Mapping[str, Answer]) -> None:
        self._wanted, self._known = dict(reference), set[str]()

    def wrong(self, answers: Mapping[str, Answer], own_order: frozenset[str]) -> tuple[str, ...]:
        """Names of the prompts that were answered otherwise; `own_order`: the latter."""
        self._wanted |= {name: answers[name] for name in own_order - self._known}
        self._known |= own_order
        return tuple(name for name, answer in self._wanted.items() if answers[name] != answer)


def prompts_of(vocabulary: int, context: int, *, long: bool = False) -> tuple[Prompt, ...]:
    """The prompts for a model: the same in every way, as long as its context allows."""
    drawn = tuple(np.random.default_rng(5).integers(0, vocabulary, 1900).tolist())
    room = max(1, context - TOKENS)
    found = [
        Prompt(name="short", ids=drawn[:11][:room]),
        Prompt(name="sampled", ids=drawn[11:40][:room], temperature=0.8),
        Prompt(name="64", ids=drawn[:64][:room]),
        # long enough for the kernels of prompts
        Prompt(name="150", ids=drawn[64:214][:room]),
    ]
    if long and room >= len(drawn):
        found.append(Prompt(name="1900", ids=drawn))
    return tuple(found)


def in_own_order(
    prompts: Sequence[Prompt], capabilities: Capabilities, *, exact_prompt: bool
) -> frozenset[str]:
    """Names of the prompts whose bits are a backend's own, and not the CPU's."""
    if not capabilities.own_order:
        return frozenset()
    classes = {p.name: prompt_class(len(p.ids), exact=exact_prompt) for p in prompts}
    return frozenset(name for name, found in classes.items() if found == "prompt")
