"""Running a model in every way, and comparing what it answers with what the CPU backend does.

Compared are the hash of the first logits and all token ids of a few short prompts. Prompts that a
backend sums in an order of its own are compared with what it answers in its first way. One run at a
time is loaded, in this process; a way that does not fit is left out, with the reason. One that
gives the same, but never did what it is about, is idle: it proves nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from attrs import evolve, frozen

from strata_core.api import load, make_plan
from strata_core.checkpoint.open import open_checkpoint
from strata_core.checkpoint.packed import PACK
from strata_core.config import Settings
from strata_core.engine.messages import Finished
from strata_core.engine.prepare import BUILT_IN_FORMS
from strata_core.errors import DoesNotFit, StrataError, UsageError
from strata_core.interfaces import Progress
from strata_core.kernels.device.options import used_devices
from strata_core.machine import read_machine
from strata_core.plan.explain import does_not_fit
from strata_core.plan.sizes import EXPERTS
from strata_core.plugins import load_plugins
from strata_core.setting_table import SETTINGS
from strata_core.sources.tier_sizes import placings
from strata_core.verify.answers import (
    TOKENS,
    Answer,
    Expected,
    Prompt,
    Run,
    in_own_order,
    prompts_of,
)
from strata_core.verify.ways import Model, Way

REFERENCE = "cpu"
"""The backend whose answers the others must have."""

Verdict = Literal["equal", "idle", "differs", "failed", "skipped"]
VERDICTS: tuple[Verdict, ...] = get_args(Verdict)


@frozen(kw_only=True)
class Outcome:
    """One row of the table. `note` says why a way was left out, failed, or in what it differs.

    Of one that is idle, whose tokens are equal, it says what did not happen.
    """

    way: Way
    verdict: Verdict
    note: str = ""
    run: Run | None = None

    @property
    def logits(self) -> str:
        """The hash of the first prompt's first logits, "" where it did not run."""
        return next(iter(self.run.answers.values())).logits if self.run else ""

    @property
    def served(self) -> dict[str, int]:
        """Experts that each lane served."""
        counters = self.run.counters if self.run else {}
        return {lane: c["experts"] for lane, c in counters.items() if c["experts"]}

    def as_json(self) -> dict[str, Any]:
        """The row as an entry of a document."""
        run = self.run
        options = {k: list(v) if isinstance(v, tuple) else v for k, v in self.way.options.items()}
        return {
            "place": self.way.place,
            "cache": self.way.cache or None,
            "options": options,
            "verdict": self.verdict,
            "exact": run.exact if run else None,
            "own_order": sorted(run.own_order) if run else [],
            "note": self.note,
            "about": [str(each) for each in self.way.about],
            "first_logits_sha256": self.logits or None,
            "tokens_equal": None if run is None else self.verdict != "differs",
            "counters": {k: dict(v) for k, v in run.counters.items()} if run else {},
            "paths": list(run.actual.paths) if run else [],
            "reads": dict(run.reads) if run else {},
            "degradations": list(run.degradations) if run else [],
            "seconds": run.seconds if run else 0.0,
        }


def never() -> bool:
    """No end of the time: what `run` asks where there is no limit."""
    return False


def run(
    model: str | Path,
    settings: Settings,
    prompts: Sequence[Prompt],
    progress: Progress | None = None,
    late: Callable[[], bool] = never,
) -> Run:
    """Load the model once and continue every prompt. Raises StrataError.

    Once `late()` is true, which is asked at every token, the running request is cancelled and _Late
    raised.
    """
    began = time.perf_counter()
    answers = {}
    with load(model, settings=settings, progress=progress, learn=False) as loaded:
        for prompt in prompts:
            room = loaded.plan.context - len(prompt.ids)
            events = loaded.generate(
                prompt.ids,
                max_tokens=max(1, min(TOKENS, room)),
                temperature=prompt.temperature,
                seed=7,
                ignore_eos=True,
            )
            done = None
            for event in events:
                if late():
                    raise _Late
                done = event
            assert isinstance(done, Finished), "a request that does not fail ends so"
            answers[prompt.name] = Answer.of(done)
        counters, actual, reads = loaded.counters, loaded.beside.actual, loaded.reads
        lanes, able = loaded.lanes or {}, loaded.capabilities
        degradations = tuple(item.what for item in loaded.degradations)
    return Run(
        answers=answers,
        counters=counters,
        actual=actual,
        reads=reads,
        lanes=lanes,
        exact=able.exact,
        own_order=in_own_order(prompts, able, exact_prompt=settings.exact_prompt),
        degradations=degradations,
        seconds=time.perf_counter() - began,
    )


class _Late(Exception):
    """The time for a run is over."""


@frozen(kw_only=True)
class Subject:
    """What is to be proven: a model with settings, and the devices of its backend.

    `facts` are what the ways are made from; `prompts` what is asked.
    """

    model: str | Path
    settings: Settings
    backend: str
    devices: tuple[int, ...]
    facts: Model
    prompts: tuple[Prompt, ...]
    own_form: bool = False

    @property
    def reference(self) -> Settings:
        """The settings of the CPU backend's run: what was given, less what is about devices.

        It computes with the mapped file itself, unless a plugin's source alone reads the model.
        """
        settings = self.settings
        own = {item.key for item in SETTINGS if item.group == "device"}
        own |= {"backend", "allocator", "source", "resident_budget_gib"}
        catalogue = load_plugins(blocked=settings.block_plugins)
        plugin = catalogue.backend(self.backend).distribution
        own |= {item.key for item in settings.table.plugged if item.distribution == plugin}
        options = {"backend": REFERENCE}
        if not self.own_form:
            options["source"] = "mmap"
        return settings.without(own).with_arguments(options)


def subject(model: str | Path, path: Path, settings: Settings, *, long: bool = False) -> Subject:
    """Look at a model and the backend that would run it; nothing is loaded. Raises StrataError.

    `path` is where the model named `model` lies. A context and a type of keys and values that were
    not given are set, so that every run has the same. Nothing is written down of the runs.
    """
    settings = settings.without({"expert_profile_save", "dump_first_logits"})
    checkpoint = open_checkpoint(path)
    try:
        hyper, experts = checkpoint.hyper, checkpoint.experts
        prompts = prompts_of(hyper.vocabulary, settings.max_context or hyper.context, long=long)
        need = min(hyper.context, max(len(prompt.ids) for prompt in prompts) + TOKENS)
        more = {"max_context": need, "kv": _kv(settings)}
        same = settings.with_arguments({k: v for k, v in more.items() if k not in settings.given()})
        planned = make_plan(model, same)
        backend = next(item.name for item in planned.selections if item.role == "backend")
        facts = Model(
            experts=experts.count * len(experts.layouts),
            nbytes=sum(experts.count * layout.nbytes for layout in experts.layouts.values()),
            cells=sum(placing.nbytes for placing in placings(experts).values()),
            hashed=checkpoint.form == PACK,
        )
    finally:
        checkpoint.close()
    devices = _devices(same, backend)
    facts = evolve(facts, beside=_beside(model, same, devices))
    return Subject(
        model=model,
        settings=same,
        backend=backend,
        devices=devices,
        facts=facts,
        prompts=prompts,
        own_form=checkpoint.form not in BUILT_IN_FORMS,
    )


def _kv(settings: Settings) -> str:
    """The type of keys and values that the reference has by itself."""
    catalogue = load_plugins(blocked=settings.block_plugins)
    return catalogue.backend(REFERENCE).record.capabilities.kv_types[0]


def _devices(settings: Settings, backend: str) -> tuple[int, ...]:
    record = load_plugins(blocked=settings.block_plugins).backend(backend).record
    if record.devices is None:
        return ()
    options = settings.options()
    return tuple(d.index for d in used_devices(options, record.devices(read_machine(), options)))


def _beside(model: str | Path, settings: Settings, devices: Sequence[int]) -> int:
    """Bytes of host memory besides the experts, where they are read from the file; 0: not known."""
    options: dict[str, Any] = {"source": "tiered-file"}
    if devices:
        options["device"] = tuple(devices[:1])
        if "expert_cache" not in settings.given():
            # with one that moves, which takes more of it than a cache that holds all or nothing
            options["expert_cache"] = 1
    try:
        plan = make_plan(model, settings.with_arguments(options)).plan
    except StrataError:
        return 0  # every way with a budget will say why it cannot be
    return sum(item.nbytes for item in plan.tier("ram").items if item.name != EXPERTS)


def prove(
    asked: Subject,
    ways: Collection[Way],
    *,
    seconds: float | None = None,
    progress: Progress | None = None,
    on_row: Callable[[Outcome], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Run, list[Outcome]]:
    """The CPU backend's run, and the outcome of each way, in order.

    After `seconds` of `clock` in all no further way is begun, and the one that runs is given up;
    None: no limit. `on_row` sees each outcome when it is there. Raises the StrataError of the
    reference: an error of a way is a row of the table.
    """
    began = clock()
    late = never if seconds is None else lambda: clock() - began > seconds
    try:
        expected = run(asked.model, asked.reference, asked.prompts, progress, late)
    except _Late:
        raise StrataError(
            f"backend {REFERENCE} did not end within {seconds:g} s",
            "the others are compared with it",
            "give it more time with --time-limit",
        ) from None
    outcomes = []
    for outcome in _outcomes(asked, ways, expected, late, progress):
        outcomes.append(outcome)
        if on_row is not None:
            on_row(outcome)
    return expected, outcomes


def _outcomes(
    asked: Subject,
    ways: Collection[Way],
    expected: Run,
    late: Callable[[], bool],
    progress: Progress | None,
) -> Iterator[Outcome]:
    """Each way's row. Prompts in an order of the backend's own are compared with its first way."""
    wanted = Expected(expected.answers)
    for way in ways:
        if late():
            yield Outcome(way=way, verdict="skipped", note="the time was over before its turn")
            continue
        found = _found(asked, way, late, progress)
        if isinstance(found, Run):
            found = _compared(asked, way, wanted, found)
        yield found


def _found(
    asked: Subject, way: Way, late: Callable[[], bool], progress: Progress | None
) -> Run | Outcome:
    """One way's run, or its row; nothing that a run raises gets out, except what ends the process.

    Only what the plan says beforehand, or the clock, leaves a way out: what goes wrong after a plan
    that fits is a failure.
    """
    try:
        settings = asked.settings.with_arguments(way.options)
        plan = make_plan(asked.model, settings).plan
        if not plan.fits:
            raise does_not_fit(plan, str(asked.model))
    except (UsageError, DoesNotFit) as error:
        return Outcome(way=way, verdict="skipped", note=_said(error))
    except Exception as error:  # noqa: BLE001 - an error in a way is a row of the table
        return Outcome(way=way, verdict="failed", note=_said(error))
    try:
        return run(asked.model, settings, asked.prompts, progress, late)
    except _Late:
        return Outcome(way=way, verdict="skipped", note="it did not end in the time there was")
    except Exception as error:  # noqa: BLE001 - an error in a way is a row of the table
        return Outcome(way=way, verdict="failed", note=_said(error))


def _compared(asked: Subject, way: Way, wanted: Expected, found: Run) -> Outcome:
    if wrong := wanted.wrong(found.answers, found.own_order):
        note = f"other logits or tokens for: {', '.join(wrong)}"
        if own := [name for name in wrong if name in found.own_order]:
            note += f"; than in the first way for: {', '.join(own)}"
        if not found.exact:
            note += f"; backend {asked.backend} does not say that it is exact"
        return Outcome(way=way, verdict="differs", note=note, run=found)
    did = found.counters, found.actual, found.reads, found.lanes
    missed = (about.missed(*did) for about in way.about)
    idle = "; ".join(filter(None, missed))
    return Outcome(way=way, verdict="idle" if idle else "equal", note=idle, run=found)


def _said(error: Exception) -> str:
    if not isinstance(error, StrataError):
        return f"{type(error).__name__}: {error}"
    return " ".join(f"{error.what}: {error.why}".split())
