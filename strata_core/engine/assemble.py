"""From what was prepared to a running engine: the start-up phases, in order.

`prepare` has read, selected and planned; `start` builds what was planned. A failure in any phase
undoes the phases before it.
"""

from __future__ import annotations

from contextlib import ExitStack

from attrs import frozen

from strata_core.engine.able import check_built, unmet_wishes
from strata_core.engine.loop import Engine
from strata_core.engine.prepare import Prepared
from strata_core.errors import Degradations
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    Backend,
    BackendContext,
    Executor,
    Progress,
    Source,
    SourceContext,
)
from strata_core.plan.explain import does_not_fit
from strata_core.tokenizer import Tokenizer


@frozen(eq=False, kw_only=True)
class Running:
    """A started model: the engine and the parts that it stands on, until `close`."""

    engine: Engine
    executor: Executor
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
        executor = backend.bind(
            prepared.program,
            prepared.checkpoint,
            prepared.checkpoint.experts,
            source,
            prepared.limits,
            progress,
        )
        parts.callback(executor.close)
        engine = Engine(
            executor=executor,
            limits=prepared.limits,
            vocabulary=prepared.checkpoint.hyper.vocabulary,
            eos=frozenset(tokenizer.eos if tokenizer else prepared.checkpoint.hyper.eos),
            tokenizer=tokenizer,
        )
        engine.start()
        return Running(engine=engine, executor=executor, parts=parts.pop_all())


def _build_backend(prepared: Prepared, degradations: Degradations) -> Backend:
    record = prepared.catalogue.backend(prepared.backend.name).record
    return record.build(
        BackendContext(
            machine=prepared.machine,
            options=prepared.settings.options(),
            degrade=degradations.report,
        )
    )


def _build_allocator(prepared: Prepared, backend: Backend, degradations: Degradations) -> Allocator:
    record = prepared.catalogue.allocator(prepared.allocator.name).record
    return record.build(
        AllocatorContext(
            machine=prepared.machine,
            options=prepared.settings.options(),
            degrade=degradations.report,
            backend=backend,
        )
    )


def _build_source(
    prepared: Prepared, allocator: Allocator, degradations: Degradations, progress: Progress
) -> Source:
    record = prepared.catalogue.source(prepared.source.name).record
    return record.build(
        SourceContext(
            machine=prepared.machine,
            options=prepared.settings.options(),
            degrade=degradations.report,
            experts=prepared.checkpoint.experts,
            allocator=allocator,
            progress=progress,
        )
    )
