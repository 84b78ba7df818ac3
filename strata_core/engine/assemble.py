"""From what was prepared to a running engine: the start-up phases, in order.

`prepare` has read, selected and planned; `start` builds what was planned. A failure in any phase
undoes the phases before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol, TypeVar

import numpy as np
from attrs import field, frozen
from numpy.typing import NDArray

from strata_core.abilities import (
    AskingExecutor,
    CountingExecutor,
    CountingSource,
    SplittingExecutor,
    TimingExecutor,
)
from strata_core.checkpoint.whole import WholeFiles
from strata_core.config import cache_folder
from strata_core.engine.able import check_built, checked_policy, unmet_wishes
from strata_core.engine.actual import actual
from strata_core.engine.ending import Leave, closing
from strata_core.engine.loop import Engine
from strata_core.engine.mapped import mapped_needs
from strata_core.engine.prepare import Prepared
from strata_core.engine.start.run import DeviceStart, StartRequest
from strata_core.engine.start.staged import StagedBackend
from strata_core.errors import (
    Degradations,
    EngineError,
    PluginError,
    StrataError,
    UsageError,
)
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    Backend,
    BackendContext,
    Executor,
    Expert,
    Progress,
    Role,
    Source,
    SourceContext,
    StartPolicy,
)
from strata_core.plan.actual import Actual
from strata_core.plan.explain import does_not_fit
from strata_core.plan.plan import Plan
from strata_core.plugins import Offer
from strata_core.plugins.guard import describe, folder_kept
from strata_core.plugins.naming import CORE, naming
from strata_core.sampler import open_sampler
from strata_core.selection import Selection
from strata_core.tokenizer import Tokenizer

_Made = TypeVar("_Made")


class Closable(Protocol):
    """What has to be closed in the end."""

    def close(self) -> None:
        """Free what it holds."""


@frozen(eq=False, kw_only=True)
class Running:
    """A started model: the engine and the parts that it stands on, until `close`."""

    engine: Engine
    executor: Executor
    backend: Backend
    allocator: Allocator
    source: Source
    parts: ExitStack

    def actual(self, plan: Plan, *, simulated: bool) -> Actual:
        """What it holds now, to be set beside its plan."""
        return actual(self.backend, self.allocator, plan, simulated=simulated)

    def counters(self) -> dict[str, Mapping[str, int]]:
        """Experts and bytes by lane: the executor's, what it asked for, and the source's own."""
        found = dict(self.executor.counters())
        if isinstance(self.executor, AskingExecutor) and (asked := self.executor.asked()):
            found["asked"] = asked
        if isinstance(self.source, CountingSource):
            found |= self.source.counters()
        return found

    def picks(self) -> Mapping[int, NDArray[np.int64]] | None:
        """How often each expert was chosen so far, by layer; None where nobody counts."""
        return self.executor.picks() if isinstance(self.executor, CountingExecutor) else None

    def lanes(self) -> Mapping[str, Any] | None:
        """How misses are split between lanes; None where there is nothing to split."""
        return self.executor.lanes() if isinstance(self.executor, SplittingExecutor) else None

    def time_prompts(self, *, on: bool) -> bool:
        """Keep the times of prompts' chunks, or no longer; False where nobody can."""
        if not isinstance(self.executor, TimingExecutor):
            return False
        self.executor.time_prompts(on=on)
        return True

    def prompt_times(self) -> Sequence[Mapping[str, Any]]:
        """The times of the chunks since then."""
        return self.executor.prompt_times() if isinstance(self.executor, TimingExecutor) else ()

    def close(self) -> None:
        """Free the executor, the source, the allocator and the backend, in this order."""
        self.parts.close()


def start(
    prepared: Prepared,
    tokenizer: Tokenizer | None,
    degradations: Degradations,
    progress: Progress,
) -> Running:
    """Build what was planned and start the engine. Raises StrataError; then nothing is held."""
    if not prepared.plan.fits:
        raise does_not_fit(prepared.plan, str(prepared.checkpoint.path))
    for item in prepared.degradations:
        degradations.report(item)
    selections = prepared.selections
    with naming("the model did not start", selections, StrataError), ExitStack() as parts:
        backend = _build_backend(prepared, degradations)
        parts.push(_closing(prepared.backend, backend))
        check_built(
            prepared.checkpoint,
            prepared.limits.kv_type,
            backend.capabilities,
            prepared.backend.name,
        )
        allocator = _build_allocator(prepared, backend, degradations)
        parts.push(_closing(prepared.allocator, allocator))
        policy = checked_policy(allocator, prepared.allocator)
        parts_made = _Parts(prepared, backend, allocator, degradations, progress)
        if isinstance(backend, StagedBackend):
            executor = parts_made.on_devices(backend, policy, parts)
        else:
            for item in unmet_wishes(policy, prepared.allocator.name):
                degradations.report(item)
            executor = parts_made.on_host(parts)
        if prepared.settings.expert_profile_save and not isinstance(executor, CountingExecutor):
            raise UsageError(
                "--expert-profile-save has no effect here",
                f"backend {prepared.backend.name} does not count which experts are chosen",
                "leave it out, or choose --backend cpu",
            )
        whole = WholeFiles.open(mapped_needs(prepared, backend), degradations.report)
        parts.push(closing(whole.close))
        engine = Engine(
            executor=executor,
            limits=prepared.limits,
            vocabulary=prepared.checkpoint.hyper.vocabulary,
            eos=frozenset(tokenizer.eos if tokenizer else prepared.checkpoint.hyper.eos),
            tokenizer=tokenizer,
            sampler=open_sampler(_backend_context(prepared, degradations)),
            exact_prompt=prepared.settings.exact_prompt,
            guard=whole.check,
            context_because=prepared.plan.context_because,
        )
        engine.start()
        return Running(
            engine=engine,
            executor=executor,
            backend=backend,
            allocator=allocator,
            source=parts_made.sources[-1],
            parts=parts.pop_all(),
        )


def _build_backend(prepared: Prepared, degradations: Degradations) -> Backend:
    offer = prepared.catalogue.backend(prepared.backend.name)
    context = _backend_context(prepared, degradations)
    return _made("backend", offer, lambda: offer.record.build(context), Backend)


def _backend_context(prepared: Prepared, degradations: Degradations) -> BackendContext:
    return BackendContext(
        machine=prepared.machine,
        options=prepared.settings.options(),
        degrade=degradations.report,
    )


def _build_allocator(prepared: Prepared, backend: Backend, degradations: Degradations) -> Allocator:
    offer = prepared.catalogue.allocator(prepared.allocator.name)
    context = AllocatorContext(
        machine=prepared.machine,
        options=prepared.settings.options(),
        degrade=degradations.report,
        backend=backend,
    )
    return _made("allocator", offer, lambda: offer.record.build(context), Allocator)


@frozen(eq=False)
class _Parts:
    """Builds the source and binds the executor, once backend and allocator are there."""

    prepared: Prepared
    backend: Backend
    allocator: Allocator
    degradations: Degradations
    progress: Progress
    sources: list[Source] = field(factory=list)

    def on_host(self, parts: ExitStack) -> Executor:
        """One after the other."""
        source = self.source(frozenset())
        parts.push(_closing(self.prepared.source, source))
        executor = self.bind(source)
        parts.push(_closing(self.prepared.backend, executor))
        return executor

    def on_devices(self, backend: StagedBackend, policy: StartPolicy, parts: ExitStack) -> Executor:
        """In the phases of `engine.start`."""
        prepared = self.prepared
        request = StartRequest(
            machine=prepared.machine,
            backend=backend,
            allocator=self.allocator,
            policy=policy,
            early=prepared.settings.early_remote_contexts,
            memory_folder=prepared.settings.cache_dir or cache_folder(),
            prepare=lambda: backend.prepare(
                prepared.program,
                prepared.checkpoint,
                prepared.checkpoint.experts,
                prepared.limits,
                self.progress,
                prepared.ranking,
                prepared.rates,
            ),
            make_source=self.source,
            bind=self.bind,
        )
        return DeviceStart(request, parts).run()

    def source(self, excluded: frozenset[Expert]) -> Source:
        """The source, for experts of which devices hold those that are `excluded`."""
        prepared = self.prepared
        offer = prepared.catalogue.source(prepared.source.name)
        context = SourceContext(
            machine=prepared.machine,
            options=prepared.settings.options(),
            degrade=self.degradations.report,
            experts=prepared.checkpoint.experts,
            allocator=self.allocator,
            progress=self.progress,
            excluded=excluded,
            ranking=prepared.ranking,
            budget=prepared.plan.expert_room,
        )
        self.sources.append(_made("source", offer, lambda: offer.record.build(context), Source))
        return self.sources[-1]

    def bind(self, source: Source) -> Executor:
        """The program, made runnable."""
        prepared = self.prepared
        return _made(
            "backend",
            prepared.catalogue.backend(prepared.backend.name),
            lambda: self.backend.bind(
                prepared.program,
                prepared.checkpoint,
                prepared.checkpoint.experts,
                source,
                prepared.limits,
                self.progress,
            ),
            Executor,
        )


def _closing(part: Selection, made: Closable) -> Leave:
    """Closes what was made of a record; an error that nobody foresaw names the plugin."""

    def close() -> None:
        with naming(f"{part.role} {part.name} did not close", (part,), EngineError):
            made.close()

    return closing(close)


def _made(role: Role, offer: Offer[Any], make: Callable[[], _Made], kind: type) -> _Made:
    """What a record makes, of the protocol `kind`.

    Raises PluginError where a plugin raises its own, or makes something else.
    """

    def failed(reason: str) -> PluginError:
        return PluginError(
            f"{role} {offer.name} of {offer.origin} did not start",
            reason,
            f"update or remove that plugin, or choose another {role} with --{role}",
        )

    try:
        with folder_kept():
            made = make()
        missing = [name for name in vars(kind) if name[0] != "_" and not hasattr(made, name)]
    except (StrataError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        if offer.distribution == CORE:
            raise
        raise failed(describe(error)) from error
    if missing:
        lacks = f"a {type(made).__name__} without {', '.join(missing)}"
        raise failed(f"it gave no {kind.__name__}: {'nothing' if made is None else lacks}")
    return made
