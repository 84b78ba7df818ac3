"""A request while it runs: its sequence, what it has produced, and when it ends."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from time import perf_counter

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.engine.messages import (
    Event,
    Finished,
    Logits,
    PromptProgress,
    Reason,
    Submit,
    Token,
)
from strata_core.engine.step import Feed, KernelClass, Sequence, prompt_class
from strata_core.interfaces import Limits
from strata_core.sampler import Sampler, sample
from strata_core.tokenizer.stream import TextStream

Send = Callable[[Event], None]


@define(eq=False)
class Sink:
    """Delivers events; a receiver that raised is `broken` and not called again.

    What a receiver does wrong is its own affair: it must not end the engine's thread.
    """

    _receiver: Send
    broken: bool = field(default=False, init=False)

    def __call__(self, event: Event) -> None:
        """Hand over one event."""
        if self.broken:
            return
        try:
            self._receiver(event)
        except Exception:  # noqa: BLE001  anybody's code
            self.broken = True


@define(eq=False)
class Request:
    """Turns logits into tokens and events for one `Submit`; used by the engine's thread alone.

    The prompt is computed in chunks, then each round feeds the last generated token.
    """

    submit: Submit
    send: Sink
    sequence: Sequence
    limits: Limits
    eos: frozenset[int]
    stream: TextStream | None
    sampler: Sampler = sample
    exact_prompt: bool = False
    history: list[int] = field(factory=list)
    text: list[str] = field(factory=list)
    rounds: int = 0
    reason: Reason | None = None
    _started: float = field(factory=perf_counter)
    _prompt_done: float = 0.0
    _first_hash: str = ""

    def __attrs_post_init__(self) -> None:
        self.history.extend(self.submit.prompt)

    @property
    def generated(self) -> tuple[int, ...]:
        """The tokens drawn so far."""
        return tuple(self.history[len(self.submit.prompt) :])

    @property
    def in_prompt(self) -> bool:
        """Whether prompt tokens are still to be computed."""
        return len(self.sequence.ids) < len(self.submit.prompt)

    def prompt_feed(self) -> Feed:
        """The next chunk of the prompt; its last chunk always wants the last row."""
        every = self.submit.logits == "prompt"
        size = min(self.limits.tokens, self.limits.logits) if every else self.limits.tokens
        done = len(self.sequence.ids)
        ids = self.submit.prompt[done : done + size]
        last = done + len(ids) == len(self.submit.prompt)
        return Feed(self.sequence, ids, "all" if every else "last" if last else "none")

    def decode_feed(self) -> Feed:
        """The last generated token."""
        return Feed(self.sequence, (self.history[-1],))

    @property
    def prompt_class(self) -> KernelClass:
        """Kernel class of the prompt's positions."""
        return prompt_class(len(self.submit.prompt), exact=self.exact_prompt)

    def take_prompt(self, logits: NDArray[np.float32]) -> None:
        """Account for a computed chunk; after the last one, draw the first token."""
        name, done, total = self.submit.request, len(self.sequence.ids), len(self.submit.prompt)
        if self.submit.logits == "prompt":
            self.send(Logits(name, done - len(logits), logits.copy()))
        self.send(PromptProgress(name, done, total))
        if done < total:
            return
        self._prompt_done = perf_counter()
        if self.submit.max_tokens == 0:
            self.reason = "length"
            return
        first = np.ascontiguousarray(logits[-1], "<f4")
        self._first_hash = hashlib.sha256(first.tobytes()).hexdigest()
        if self.submit.logits == "first":
            self.send(Logits(name, total - 1, first[None].copy()))
        self._draw(logits[-1])

    def take_decode(self, logits: NDArray[np.float32]) -> None:
        """Draw the next token from a decode round's logits."""
        self.rounds += 1
        self._draw(logits[-1])

    def _draw(self, logits: NDArray[np.float32]) -> None:
        position = len(self.history)
        token = self.sampler(logits, self.submit.sampling, self.history, position)
        given, number = self.submit.continuation, position - len(self.submit.prompt)
        token = given[number] if number < len(given) else token
        self.history.append(token)
        ended = token in self.eos and not self.submit.ignore_eos
        shown = ""
        stopped = False
        if self.stream is not None and not ended:
            shown = self.stream.push(token)
            stopped = self.stream.finished
        self.text.append(shown)
        self.send(Token(self.submit.request, token, shown, position))
        if ended:
            self.reason = "eos"
        elif stopped:
            self.reason = "stop"
        elif position + 1 - len(self.submit.prompt) >= self.submit.max_tokens:
            self.reason = "length"
        elif position >= self.limits.context:
            self.reason = "context"

    def finish(self) -> None:
        """Send what text was held back, and the last event."""
        now = perf_counter()
        prompt_done = self._prompt_done or now
        if self.stream is not None and self.reason != "stop":
            self.text.append(self.stream.flush())
        self.send(
            Finished(
                request=self.submit.request,
                reason=self.reason or "cancelled",
                text="".join(self.text),
                token_ids=self.generated,
                prompt_tokens=len(self.submit.prompt),
                first_logits_sha256=self._first_hash,
                prompt_s=prompt_done - self._started,
                decode_s=now - prompt_done,
                rounds=self.rounds,
            )
        )


def never_begun(submit: Submit) -> Finished:
    """The last event of a request that was cancelled while it waited."""
    return Finished(
        request=submit.request,
        reason="cancelled",
        text="",
        token_ids=(),
        prompt_tokens=len(submit.prompt),
        first_logits_sha256="",
        prompt_s=0.0,
        decode_s=0.0,
        rounds=0,
    )
