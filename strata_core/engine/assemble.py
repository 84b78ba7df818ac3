"""From what was prepared to a running engine: the start-up phases, in order.

`prepare` has read, selected and planned; `start` builds what was planned. A failure in any phase
undoes the phases before it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

from attrs import frozen

from strata_core.engine.able import check_built, unmet_wishes
from strata_core.engine.loop import Engine
from strata_core.engine.prepare import Prepared
from strata_core.errors import Degradations, PluginError, StrataError
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    Backend,
    BackendContext,
    Executor,
    Progress,
    Role,
    Source,
    SourceContext,
)
from strata_core.plan.explain import does_not_fit
from strata_core.plugins import Offer
from strata_core.plugins.guard import describe
from strata_core.sampler import open_sampler
from strata_core.tokenizer import Tokenizer

_Made = TypeVar("_Made")

CORE = "strata-core"
"""The distribution whose own failures are told as they are."""


@frozen(eq=False, kw_only=True)
class Running:
    """A started model: the engine and the parts that it stands on, until `close`."""

    engine: Engine
    executor: Executor
    backend: Backend
    parts: ExitStack

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
    with ExitStack() as parts:
        backend = _build_backend(prepared, degradations)
        parts.callback(backend.close)
        check_built(
            prepared.checkpoint,
            prepared.limits.kv_type,
            backend.capabilities,
            prepared.backend.name,
        )
        allocator = _build_allocator(prepared, backend, degradations)
        parts.callback(allocator.close)
        for item in unmet_wishes(allocator, prepared.allocator.name):
            degradations.report(item)
        source = _build_source(prepared, allocator, degradations, progress)
        parts.callback(source.close)
        executor = _bind(prepared, backend, source, progress)
        parts.callback(executor.close)
        engine = Engine(
            executor=executor,
            limits=prepared.limits,
            vocabulary=prepared.checkpoint.hyper.vocabulary,
            eos=frozenset(tokenizer.eos if tokenizer else prepared.checkpoint.hyper.eos),
            tokenizer=tokenizer,
            sampler=open_sampler(_backend_context(prepared, degradations)),
            exact_prompt=prepared.settings.exact_prompt,
        )
        engine.start()
        return Running(engine=engine, executor=executor, backend=backend, parts=parts.pop_all())


def _build_backend(prepared: Prepared, degradations: Degradations) -> Backend:
    offer = prepared.catalogue.backend(prepared.backend.name)
    context = _backend_context(prepared, degradations)
    return _made("backend", offer, lambda: offer.record.build(context))


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
    return _made("allocator", offer, lambda: offer.record.build(context))


def _build_source(
    prepared: Prepared, allocator: Allocator, degradations: Degradations, progress: Progress
) -> Source:
    offer = prepared.catalogue.source(prepared.source.name)
    context = SourceContext(
        machine=prepared.machine,
        options=prepared.settings.options(),
        degrade=degradations.report,
        experts=prepared.checkpoint.experts,
        allocator=allocator,
        progress=progress,
    )
    return _made("source", offer, lambda: offer.record.build(context))


def _bind(prepared: Prepared, backend: Backend, source: Source, progress: Progress) -> Executor:
    offer = prepared.catalogue.backend(prepared.backend.name)
    return _made(
        "backend",
        offer,
        lambda: backend.bind(
            prepared.program,
            prepared.checkpoint,
            prepared.checkpoint.experts,
            source,
            prepared.limits,
            progress,
        ),
    )


def _made(role: Role, offer: Offer[Any], make: Callable[[], _Made]) -> _Made:
    """What a record makes. Raises PluginError where a plugin raises its own, or makes nothing."""

    def failed(reason: str) -> PluginError:
        return PluginError(
            f"{role} {offer.name} of {offer.origin} did not start",
            reason,
            f"update or remove that plugin, or choose another {role} with --{role}",
        )

    try:
        made = make()
    except (StrataError, KeyboardInterrupt, MemoryError):
        raise
    except BaseException as error:
        if offer.distribution == CORE:
            raise
        raise failed(describe(error)) from error
    if made is None:
        raise failed("it gave nothing that could be used")
    return made
