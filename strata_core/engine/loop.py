"""The engine's thread: takes commands, runs rounds, sends events.

Front ends never wait for a round: they put a command in the inbox and read events from their own
sink. A round is either one chunk of one prompt or one decode step of every running request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import suppress
from numbers import Integral
from queue import Empty, SimpleQueue
from threading import RLock, Thread, current_thread

import numpy as np
from attrs import define, field
from numpy.typing import NDArray

from strata_core.engine.messages import (
    AskStatus,
    Cancel,
    Command,
    Failed,
    Shutdown,
    Status,
    Stopped,
    Submit,
)
from strata_core.engine.request import Request, Send, Sink, never_begun
from strata_core.engine.step import Sequence, step
from strata_core.errors import EngineError, UsageError
from strata_core.interfaces import Executor, Limits
from strata_core.sampler import Sampler, sample
from strata_core.tokenizer import Tokenizer

Floats = NDArray[np.float32]


def _nothing() -> None:
    """No guard."""


@define(eq=False)
class Engine:
    """Owns the executor from `start` to the end of its thread.

    `max_running` requests share the rounds; others wait in order of arrival. `sampler` draws their
    tokens, on the engine's thread; `exact_prompt` gives their prompts to window kernels. `guard` is
    called before each round, which does not take place where it raises. `context_because` says why
    the context is as long as it is. `send` may be called from any thread; the sink given with a
    command receives its events, on the engine's thread, and must not block. Every `Submit` is
    answered by a `Finished` or `Failed`, whatever happens: also one that is sent after the end,
    then on the sender's own thread.
    """

    executor: Executor
    limits: Limits
    vocabulary: int
    eos: frozenset[int]
    tokenizer: Tokenizer | None
    max_running: int = 1
    sampler: Sampler = sample
    exact_prompt: bool = False
    guard: Callable[[], None] = _nothing
    context_because: str = ""
    _inbox: SimpleQueue[tuple[Command, Sink]] = field(factory=SimpleQueue)
    _waiting: deque[tuple[Submit, Sink]] = field(factory=deque)
    _running: dict[str, Request] = field(factory=dict)
    _rounds: int = 0
    _prompt_tokens: int = 0
    _generated_tokens: int = 0
    _thread: Thread | None = None
    _stopped: Sink | None = None
    _ended: bool = False
    # Reentrant: a generator that is collected while its thread sends a command sends one too.
    _lock: RLock = field(factory=RLock)

    def start(self) -> None:
        """Begin taking commands, on a thread of its own."""
        self._thread = Thread(target=self._run, name="strata-engine", daemon=True)
        self._thread.start()

    def send(self, command: Command, sink: Send) -> None:
        """Hand over a command; returns at once."""
        guarded = Sink(sink)
        with self._lock:
            if not self._ended:
                self._inbox.put((command, guarded))
                return
        self._answer_late(command, guarded)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the thread to end after a `Shutdown`; whether it has (on itself: it has not)."""
        if self._thread is None:
            return True
        if self._thread is current_thread():
            return False
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- on the engine's thread ----------------------------------------------------------------

    def _run(self) -> None:
        cause: BaseException | None = None
        try:
            while self._stopped is None:
                self._take_commands()
                self._admit()
                if self._stopped is None and self._running:
                    self._round()
        except BaseException as error:  # noqa: BLE001  nobody may wait for a thread that is gone
            cause = error
        self._end(cause)

    def _end(self, cause: BaseException | None) -> None:
        """Answer whoever still waits; from here on `send` answers itself."""
        with self._lock:
            self._ended = True
        for request in list(self._running.values()):
            self._fail(request, cause or _stopped_error())
        for submit, sink in self._waiting:
            sink(Failed.of(submit.request, cause or _stopped_error()))
        self._waiting.clear()
        with suppress(Empty):
            while True:
                self._answer_late(*self._inbox.get_nowait())
        if self._stopped is not None:
            self._stopped(Stopped())

    def _answer_late(self, command: Command, sink: Sink) -> None:
        """Answer a command that comes after the end."""
        if isinstance(command, Submit):
            sink(Failed.of(command.request, _stopped_error()))
        elif isinstance(command, AskStatus):
            sink(self.status())
        elif isinstance(command, Shutdown):
            sink(Stopped())

    def _take_commands(self) -> None:
        """Handle everything in the inbox; wait for a command where there is nothing else to do."""
        idle = not self._running and not self._waiting
        while idle or not self._inbox.empty():
            self._handle(*self._inbox.get())
            if self._stopped is not None:
                return
            idle = False

    def _handle(self, command: Command, sink: Sink) -> None:
        if isinstance(command, Submit):
            try:
                self._check(command)
            except Exception as error:  # noqa: BLE001  a field may be of any wrong type
                sink(Failed.of(command.request, error))
                return
            self._waiting.append((command, sink))
        elif isinstance(command, Cancel):
            self._cancel(command.request)
        elif isinstance(command, AskStatus):
            sink(self.status())
        elif isinstance(command, Shutdown):
            for name in [*self._running, *(s.request for s, _ in self._waiting)]:
                self._cancel(name)
            self._stopped = sink

    def status(self) -> Status:
        """How things stand; exact on the engine's thread."""
        return Status(
            running=tuple(self._running),
            waiting=tuple(submit.request for submit, _ in self._waiting),
            rounds=self._rounds,
            prompt_tokens=self._prompt_tokens,
            generated_tokens=self._generated_tokens,
        )

    def _check(self, submit: Submit) -> None:
        """Refuse what cannot run, before it takes a place in the queue."""
        names = {*self._running, *(s.request for s, _ in self._waiting)}
        if submit.request in names:
            raise UsageError(f"request {submit.request} is already there", "names are unique")
        check_prompt(submit.prompt, self.vocabulary, self.limits.context, self.context_because)
        if not _is_whole(submit.max_tokens) or submit.max_tokens < 0:
            raise UsageError(
                f"cannot generate {submit.max_tokens!r} tokens",
                "the number of tokens is a whole number of 0 and more",
                "give 0 to compute the prompt alone",
            )
        if submit.continuation:
            check_ids("token of the continuation", submit.continuation, self.vocabulary)
        if submit.stop:
            if self.tokenizer is None:
                raise UsageError(
                    "--stop cannot be used",
                    "the model has no tokenizer, so there is no text to look for stop strings in",
                    "leave --stop out and bound the output with -n",
                )
            self.tokenizer.stream(submit.stop)  # raises for what cannot be a stop string

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self.max_running:
            submit, sink = self._waiting.popleft()
            try:
                stream = self.tokenizer.stream(submit.stop) if self.tokenizer else None
                sequence = Sequence.open(self.executor)
            except BaseException as error:  # noqa: BLE001  the executor may be a plugin's
                sink(Failed.of(submit.request, error))
                continue
            self._running[submit.request] = Request(
                submit,
                sink,
                sequence,
                self.limits,
                self.eos,
                stream,
                self.sampler,
                self.exact_prompt,
            )

    def _cancel(self, name: str) -> None:
        for submit, sink in self._waiting:
            if submit.request == name:
                self._waiting.remove((submit, sink))
                sink(never_begun(submit))
                return
        request = self._running.get(name)
        if request is not None:
            request.reason = "cancelled"
            self._finish(request)

    def _finish(self, request: Request) -> None:
        del self._running[request.submit.request]
        try:
            request.sequence.close()
        except BaseException as error:  # noqa: BLE001  the executor may be a plugin's
            request.send(Failed.of(request.submit.request, error))
            return
        request.finish()

    def _fail(self, request: Request, error: BaseException) -> None:
        """End a request with an error; its slot is given back if that still works."""
        self._running.pop(request.submit.request, None)
        with suppress(BaseException):  # the first error is the one that tells
            request.sequence.close()
        request.send(Failed.of(request.submit.request, error))

    def _round(self) -> None:
        """One chunk of the oldest prompt, or one token for every running request."""
        prompts = [r for r in self._running.values() if r.in_prompt]
        requests = prompts[:1] or list(self._running.values())
        try:
            self.guard()
            if prompts:
                self._prompt_round(prompts[0])
            else:
                self._decode_round(requests)
        except BaseException as error:  # noqa: BLE001  whatever it was (a plugin may even raise
            # SystemExit), its requests must hear of it.
            for request in requests:
                self._fail(request, error)
            return
        for request in requests:
            if request.send.broken:
                request.reason = "cancelled"
            if request.reason is not None and request.submit.request in self._running:
                self._finish(request)

    def _prompt_round(self, request: Request) -> None:
        feed = request.prompt_feed()
        (logits,) = step(self.executor, [feed], request.prompt_class)
        self._rounds += 1
        self._prompt_tokens += len(feed.ids)
        self._take(request, request.take_prompt, logits)

    def _decode_round(self, requests: list[Request]) -> None:
        rows = step(self.executor, [r.decode_feed() for r in requests])
        self._rounds += 1
        self._generated_tokens += len(requests)
        for request, logits in zip(requests, rows, strict=True):
            self._take(request, request.take_decode, logits)

    def _take(self, request: Request, take: Callable[[Floats], None], logits: Floats) -> None:
        """Give a request its logits; what is wrong with them concerns that request alone."""
        try:
            take(logits)
        except Exception as error:  # noqa: BLE001  the others in the round go on
            self._fail(request, error)


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral)


def _stopped_error() -> EngineError:
    return EngineError(
        "the engine has stopped",
        "the model was closed, or its thread has failed",
        "load the model again",
    )


def check_prompt(prompt: tuple[int, ...], vocabulary: int, context: int, because: str = "") -> None:
    """Raise UsageError unless the ids are a prompt that a context has room for.

    `because` says why the context is as long as it is.
    """
    if not prompt:
        raise UsageError(
            "the prompt is empty",
            "a prompt needs at least one token",
            "give some text, or ids with --prompt-ids",
        )
    if len(prompt) > context:
        raise UsageError(
            f"the prompt of {len(prompt)} tokens is too long",
            f"the context holds {context} tokens" + (f" ({because})" if because else ""),
            "shorten the prompt, or raise --max-context where the model allows it",
        )
    check_ids("prompt token", prompt, vocabulary)


def check_ids(what: str, ids: tuple[int, ...], vocabulary: int) -> None:
    """Raise UsageError for an id that the vocabulary lacks; `what` is what each of them is."""
    for position, token in enumerate(ids):
        if not 0 <= token < vocabulary:
            raise UsageError(
                f"{what} {position} is {token}, which is not in the vocabulary",
                f"ids go from 0 to {vocabulary - 1}",
                "check --prompt-ids against the model's tokenizer",
            )
