"""The Python interface: `load` a model, then generate, ask for logits, measure perplexity."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import BytesIO
from itertools import count
from operator import index
from pathlib import Path
from queue import Empty, SimpleQueue
from time import perf_counter
from types import TracebackType
from typing import Any, Self
from weakref import finalize

import numpy as np
from attrs import define, evolve, field, frozen
from numpy.typing import NDArray

from strata_core.cache.profile import Profile, refuse_unwritable
from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.checkpoint.own_files import refuse_own_file
from strata_core.config import Settings, resolve_arguments
from strata_core.engine.assemble import Running, start
from strata_core.engine.beside import PlanBeside, plan_beside
from strata_core.engine.ending import closing
from strata_core.engine.messages import Cancel, Event, Failed, Finished, Logits, Shutdown, Submit
from strata_core.engine.perplexity import Perplexity, perplexity
from strata_core.engine.prepare import Prepared, prepare
from strata_core.engine.tier import Known, keep_profile, learns
from strata_core.errors import Degradation, Degradations, EngineError, StrataError, UsageError
from strata_core.interfaces import Capabilities, Progress
from strata_core.machine import Machine, read_machine
from strata_core.pack.reads import reads_report
from strata_core.plan.plan import Plan
from strata_core.plugins.naming import naming, plugins_among, remedy
from strata_core.sampler import Sampling
from strata_core.selection import Selection
from strata_core.tokenizer import Tokenizer, open_tokenizer

DEMO = "demo"
"""The name of the model that ships with the package."""


class _NoProgress:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@define(eq=False)
class Model:
    """A loaded model; made by `load`, usable until `close`.

    `generate`, `logits` and `perplexity` may be called from any thread; requests wait for each
    other. Usable as a context manager. After `close` every call raises StrataError. A model that
    is dropped, or still open when the interpreter exits, is closed then. `beside` sets the plan
    beside what became of it.
    """

    checkpoint: Checkpoint
    tokenizer: Tokenizer | None
    plan: Plan
    selections: tuple[Selection, ...]
    degradations: Degradations
    timings: dict[str, float]
    _settings: Settings
    _running: Running
    beside: PlanBeside
    _known: Known = field(factory=Known)
    _learn: bool = True
    _names: Iterator[int] = field(factory=lambda: count(1))
    _closed: bool = False
    _picks: Mapping[int, NDArray[np.int64]] | None = None
    _end: finalize[Any, Any] = field(init=False)

    def __attrs_post_init__(self) -> None:
        # Also at exit: the engine's thread must not compute in memory that is being taken down.
        self._end = finalize(self, _stop, self._running)

    def generate(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int = 128,
        sampling: Sampling | None = None,
        stop: str | Sequence[str] = (),
        ignore_eos: bool = False,
        continuation: Sequence[int] = (),
        **sampling_fields: Any,
    ) -> Iterator[Event]:
        """Continue a prompt (text or token ids): PromptProgress and Token events, then Finished.

        Sampling is greedy unless `sampling` or its fields (`temperature=0.8`, `seed=1`, ...) say
        otherwise. `continuation` are ids to feed in place of the first ones drawn, for measuring.
        A request that fails raises its StrataError. Closing the iterator cancels the
        request.
        """
        if sampling is not None and sampling_fields:
            raise UsageError(
                "sampling and its fields were both given",
                f"{', '.join(sampling_fields)} would contradict it",
                "give one or the other",
            )
        dump = self._settings.dump_first_logits
        if dump is not None:
            refuse_own_file(dump, self.checkpoint, "the logits", "STRATA_DUMP_FIRST_LOGITS")
        submit = Submit(
            request=f"r{next(self._names)}",
            prompt=self.prompt_ids(prompt),
            max_tokens=max_tokens,
            sampling=sampling or Sampling(**sampling_fields),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            ignore_eos=ignore_eos,
            continuation=_token_ids(continuation),
            logits="none" if dump is None else "first",
        )
        for event in self._events(submit):
            if isinstance(event, Logits):
                _dump(dump, event.logits[0])
            else:
                yield event

    def prompt_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The ids of a prompt given as text or as ids."""
        if not isinstance(prompt, str):
            return _token_ids(prompt)
        if self.tokenizer is None:
            raise UsageError(
                "the prompt cannot be given as text",
                f"{self.checkpoint.path} has no tokenizer",
                "give token ids, on the command line with --prompt-ids",
            )
        return tuple(self.tokenizer.encode(prompt))

    def logits(self, ids: Sequence[int]) -> NDArray[np.float32]:
        """Float32 logits [len(ids), vocabulary] of every position of a sequence."""
        rows = [logits for _, logits in self._logits_chunks(_token_ids(ids))]
        return np.concatenate(rows)

    def perplexity(
        self,
        ids: Sequence[int],
        context: int = 512,
        on_window: Callable[[int, int], None] | None = None,
    ) -> Perplexity:
        """How well the model predicts `ids`, in windows of `context` tokens."""
        return perplexity(_token_ids(ids), context, self._logits_chunks, on_window)

    def _logits_chunks(self, ids: tuple[int, ...]) -> Iterator[tuple[int, NDArray[np.float32]]]:
        submit = Submit(request=f"r{next(self._names)}", prompt=ids, max_tokens=0, logits="prompt")
        for event in self._events(submit):
            if isinstance(event, Logits):
                yield event.start, event.logits

    def _events(self, submit: Submit) -> Iterator[Event]:
        """Submit a request and yield its events; cancel it when the caller stops early."""
        if self._closed:
            raise StrataError("the model is closed", "close() was called", "load it again")
        engine = self._running.engine
        queue: SimpleQueue[Event] = SimpleQueue()
        engine.send(submit, queue.put)
        ended = False
        try:
            while not ended:
                event = _next(queue)
                ended = isinstance(event, Finished | Failed)
                if isinstance(event, Failed):
                    raise self._told(event)
                if isinstance(event, Finished):
                    self.beside.finished(event)
                yield event
        finally:
            # Nothing is waited for: this may run on any thread, even the engine's, when a dropped
            # generator is collected there.
            if not ended:
                engine.send(Cancel(submit.request), queue.put)

    def _told(self, failed: Failed) -> StrataError:
        """The error of a request; one that nobody foresaw names the plugins at work."""
        others = plugins_among(self.selections)
        if failed.trace and others:
            why = f"{failed.why}; at work was {others}"
            failed = evolve(failed, why=why, remedy=remedy(others))
        return failed.as_error()

    @property
    def capabilities(self) -> Capabilities:
        """What the built backend can do, after its self-test."""
        with naming("the backend does not say what it can do", self.selections):
            return self._running.backend.capabilities

    @property
    def context(self) -> int:
        """How many tokens a request has room for, its prompt's included."""
        return self._running.engine.limits.context

    @property
    def kv_type(self) -> str:
        """Type of the stored keys and values."""
        return self._running.engine.limits.kv_type

    @property
    def counters(self) -> Mapping[str, Mapping[str, int]]:
        """Experts and bytes served so far, by lane."""
        with naming("what was served is not known", self.selections):
            return self._running.counters()

    @property
    def reads(self) -> dict[str, Any]:
        """What --verify-reads has compared so far; see docs/pack.md."""
        return reads_report(self.checkpoint.experts, self._settings.verify_reads)

    @property
    def lanes(self) -> Mapping[str, Any] | None:
        """How misses are split between the link and the CPU; None without a device."""
        with naming("how misses are split is not known", self.selections):
            return self._running.lanes()

    @contextmanager
    def timed_prompts(self) -> Iterator[Callable[[], Sequence[Mapping[str, Any]]]]:
        """Keep where the time of prompts goes, inside; gives what tells the chunks so far.

        No request may be under way when it begins and ends. Raises UsageError where the backend
        does not tell.
        """
        with naming("where the time goes is not known", self.selections):
            if not self._running.time_prompts(on=True):
                backend = next(item.name for item in self.selections if item.role == "backend")
                raise UsageError(
                    f"backend {backend} does not tell where the time of a prompt goes",
                    "it computes prompts without bringing experts to a device",
                    "choose a backend with devices with --backend, or leave --timeline out",
                )
        try:
            yield self._running.prompt_times
        finally:
            self._running.time_prompts(on=False)

    def profile(self) -> Profile:
        """How often each expert was chosen so far. Raises UsageError where nobody counts."""
        picks = self._running.picks()
        if picks is None:
            backend = next(item.name for item in self.selections if item.role == "backend")
            raise UsageError(
                f"backend {backend} does not count which experts are chosen",
                "a profile is made of these counts",
                "choose --backend cpu",
            )
        return Profile.of(self.checkpoint.origin_hash, picks)

    def close(self) -> None:
        """Stop the engine and free everything; calling it again does nothing.

        What the run learned of the experts' use is kept where settings say so; a StrataError where
        that fails, or where a part fails or cannot be asked, comes after everything is free.
        """
        if self._closed:
            return
        self._closed = True
        with ExitStack() as last:  # each of these, whatever fails before it
            last.callback(self._keep_picks)
            last.callback(self.checkpoint.close)
            last.callback(self._free)
            with naming("the model did not close", self.selections, EngineError):
                # no round is under way any more when the parts are asked
                _halt(self._running)
                self._picks = self._running.picks()
                if self._learn:
                    self.beside.keep(self._running.counters())

    def _free(self) -> None:
        with naming("the model did not close", self.selections, EngineError):
            self._end()

    def _keep_picks(self) -> None:
        """Keep the use of the experts, where it is known."""
        if self._picks is not None:
            counted = Profile.of(self.checkpoint.origin_hash, self._picks)
            learning = self._learn and learns(self.plan)
            keep_profile(self.checkpoint, self._settings, self._known, counted, learning=learning)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        closing(self.close)(kind, error, trace)


def _halt(running: Running) -> bool:
    """End the engine; whether it has. Calling it again does nothing."""
    running.engine.send(Shutdown(), lambda _event: None)
    return running.engine.join()


def _stop(running: Running) -> None:
    """End the engine, then free what it stood on."""
    # On the engine's own thread, where a dropped model may be collected, the thread still needs
    # the parts; they go when it drops them.
    if _halt(running):
        running.close()


def _next(queue: SimpleQueue[Event]) -> Event:
    """The next event; Ctrl-C is heard while waiting, also where a wait cannot be interrupted."""
    while True:
        try:
            return queue.get(timeout=0.2)
        except Empty:
            continue


def _token_ids(ids: Sequence[int]) -> tuple[int, ...]:
    """Whole numbers of any kind as ids. Raises UsageError for anything else."""
    if isinstance(ids, bytes | bytearray | memoryview):
        raise UsageError(
            "a prompt cannot be given as bytes",
            "it is text or token ids",
            "decode it to text first",
        )
    try:
        return tuple(index(i) for i in ids)
    except TypeError as error:
        raise UsageError(
            "these are not token ids", str(error), "give a sequence of whole numbers"
        ) from error


@frozen(kw_only=True)
class Planned:
    """What `make_plan` decides: the plan, the parts chosen, and what works less well than it could.

    A part may report more degradations when it is built.
    """

    plan: Plan
    selections: tuple[Selection, ...]
    degradations: tuple[Degradation, ...]

    def as_json(self) -> dict[str, Any]:
        """The plan's members, beside `selections` and `degradations`."""
        return {
            **self.plan.as_json(),
            "selections": [selection.as_json() for selection in self.selections],
            "degradations": [item.as_json() for item in self.degradations],
        }


def load(
    model: str | Path,
    *,
    progress: Progress | None = None,
    settings: Settings | None = None,
    learn: bool = True,
    **options: Any,
) -> Model:
    """Load a model: a GGUF file, a hub-layout folder, or "demo".

    `options` are settings by key (`source="mmap"`, `max_context=4096`, ...; docs/cli.md lists
    them). What the run counts and measures is kept for later runs unless `learn` is False; a
    profile that settings ask for is written all the same. Raises StrataError: a model that is
    damaged, does not fit, or that nothing can run.
    """
    began = perf_counter()
    prepared = _prepared(model, settings, options, None)
    tokenizer = open_tokenizer(prepared.checkpoint)
    degradations = Degradations()
    running = start(prepared, tokenizer, degradations, progress or _NoProgress())
    return Model(
        checkpoint=prepared.checkpoint,
        tokenizer=tokenizer,
        plan=prepared.plan,
        selections=prepared.selections,
        degradations=degradations,
        timings={"load_s": perf_counter() - began},
        settings=prepared.settings,
        running=running,
        beside=plan_beside(prepared, running),
        known=prepared.known,
        learn=learn,
    )


def make_plan(
    model: str | Path,
    settings: Settings | None = None,
    machine: Machine | None = None,
    **options: Any,
) -> Planned:
    """What would be chosen and go where if `model` were loaded, on this or a recorded machine."""
    prepared = _prepared(model, settings, options, machine)
    return Planned(
        plan=prepared.plan,
        selections=prepared.selections,
        degradations=prepared.degradations,
    )


def model_path(model: str | Path) -> Path:
    """The path behind MODEL: the shipped file for "demo", else the path itself."""
    if model == "":
        raise UsageError(
            "MODEL is empty", "it would stand for the current folder", "give . for that, or a path"
        )
    if str(model) == DEMO:
        return Path(__file__).with_name("demo") / "kjv-Q4_0.gguf"
    return Path(model)


def _prepared(
    model: str | Path,
    settings: Settings | None,
    options: Mapping[str, Any],
    machine: Machine | None,
) -> Prepared:
    known = resolve_arguments({}) if settings is None else settings
    known = known.with_arguments(options)
    checkpoint = open_checkpoint(model_path(model))
    saved = known.expert_profile_save
    if saved is not None:
        refuse_own_file(saved, checkpoint, "the profile", known.origin("expert_profile_save"))
        refuse_unwritable(saved)
    return prepare(checkpoint, known, machine or read_machine())


def _dump(path: Path, logits: NDArray[np.float32]) -> None:
    """Write one row of logits; where that fails, what was at `path` may be incomplete."""
    content = BytesIO()
    np.save(content, logits)
    try:
        path.write_bytes(content.getvalue())
    except OSError as error:
        raise StrataError(
            f"cannot write {path}",
            f"STRATA_DUMP_FIRST_LOGITS names it, and the system says: {error}",
            "name a file in a folder that can be written",
        ) from error
