"""From a model's path to a running engine: the start-up phases, in order.

`prepare` reads, selects and plans without allocating anything; `strata plan` stops there. `start`
builds what was planned. A failure in any phase undoes the phases before it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from math import prod
from typing import Any, TypeVar

from attrs import frozen

from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings
from strata_core.engine.loop import Engine
from strata_core.errors import Degradations, PluginError, StrataError, UsageError
from strata_core.interfaces import (
    Allocator,
    AllocatorContext,
    Backend,
    BackendContext,
    Capabilities,
    Executor,
    Limits,
    Progress,
    Role,
    Source,
    SourceContext,
)
from strata_core.kernels.kv import kv_bytes
from strata_core.kernels.program import Program
from strata_core.machine import Machine
from strata_core.model.build import build_program
from strata_core.plan.explain import does_not_fit
from strata_core.plan.plan import Plan, PlanRequest, Sizes, make_plan
from strata_core.plugins import Catalogue, Offer, load_plugins, probe_catalogue
from strata_core.plugins.guard import describe
from strata_core.selection import (
    AUTO,
    Selection,
    chosen,
    select_allocator,
    select_backend,
    select_source,
)
from strata_core.tokenizer import Tokenizer

_Made = TypeVar("_Made")

CORE = "strata-core"
"""The distribution whose own failures are told as they are."""

WINDOW_TOKENS = 512
"""Most tokens of one window."""

WINDOW_LOGITS = 64
"""Most logits rows of one window."""


@frozen(eq=False, kw_only=True)
class Prepared:
    """Everything that is decided before anything is allocated."""

    checkpoint: Checkpoint
    settings: Settings
    machine: Machine
    catalogue: Catalogue
    backend: Selection
    allocator: Selection
    source: Selection
    program: Program
    limits: Limits
    plan: Plan


@frozen(eq=False, kw_only=True)
class Running:
    """A started model: the engine and the parts that it stands on, until `close`."""

    engine: Engine
    executor: Executor
    parts: ExitStack

    def close(self) -> None:
        """Free the executor, the source, the allocator and the backend, in this order."""
        self.parts.close()


def prepare(checkpoint: Checkpoint, settings: Settings, machine: Machine) -> Prepared:
    """Select a record for each role and plan. Raises StrataError; nothing is held afterwards."""
    found = load_plugins(blocked=settings.block_plugins)
    probes = probe_catalogue(found, machine)
    backend = chosen(
        select_backend(found.backends, found.broken, probes["backend"], settings.backend)
    )
    allocator = chosen(
        select_allocator(
            found.allocators, found.broken, probes["allocator"], backend.name, settings.allocator
        )
    )
    capabilities = found.backend(backend.name).record.capabilities
    kv_type = _kv_type(settings.kv, capabilities, backend.name)
    _check_types(checkpoint, capabilities, backend.name)
    program = build_program(checkpoint.hyper)
    sizes = _sizes(checkpoint, program, capabilities, kv_type)
    plan = make_plan(_plan_request(checkpoint, settings, machine, sizes))
    source = chosen(
        select_source(
            found.sources,
            found.broken,
            probes["source"],
            settings.source,
            checkpoint.form,
            plan.source,
            plan.source_because,
        )
    )
    return Prepared(
        checkpoint=checkpoint,
        settings=settings,
        machine=machine,
        catalogue=found,
        backend=backend,
        allocator=allocator,
        source=source,
        program=program,
        limits=Limits(WINDOW_TOKENS, WINDOW_LOGITS, plan.context, kv_type),
        plan=plan,
    )


def start(
    prepared: Prepared,
    tokenizer: Tokenizer | None,
    degradations: Degradations,
    progress: Progress,
) -> Running:
    """Build what was planned and start the engine. Raises StrataError; then nothing is held."""
    if not prepared.plan.fits:
        raise does_not_fit(prepared.plan, str(prepared.checkpoint.path))
    with ExitStack() as parts:
        backend = _build_backend(prepared, degradations)
        parts.callback(backend.close)
        allocator = _build_allocator(prepared, backend, degradations)
        parts.callback(allocator.close)
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
        )
        engine.start()
        return Running(engine=engine, executor=executor, parts=parts.pop_all())


def _build_backend(prepared: Prepared, degradations: Degradations) -> Backend:
    offer = prepared.catalogue.backend(prepared.backend.name)
    context = BackendContext(
        machine=prepared.machine,
        options=prepared.settings.options(),
        degrade=degradations.report,
    )
    return _made("backend", offer, lambda: offer.record.build(context))


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


# --- what the plan is made from ----------------------------------------------------------------


def _kv_type(asked: str | None, capabilities: Capabilities, backend: str) -> str:
    if asked is None:
        return capabilities.kv_types[0]
    if asked not in capabilities.kv_types:
        raise UsageError(
            f"--kv {asked} cannot be used with backend {backend}",
            f"it keeps keys and values as {', '.join(capabilities.kv_types)}",
            "leave --kv out to get the backend's default",
        )
    return asked


def _check_types(checkpoint: Checkpoint, capabilities: Capabilities, backend: str) -> None:
    if capabilities.types is None:
        return
    stored = {t.type.name for t in checkpoint.tensors.values()}
    stored |= {p.type for layout in checkpoint.experts.layouts.values() for p in layout.parts}
    missing = sorted(stored - capabilities.types)
    if missing:
        raise UsageError(
            f"backend {backend} cannot compute with {checkpoint.path}",
            f"it has no kernels for weights of type {', '.join(missing)}",
            "choose another backend, or a model with other weight types",
        )


def _sizes(
    checkpoint: Checkpoint, program: Program, capabilities: Capabilities, kv_type: str
) -> Sizes:
    dense = 0
    for weight in program.weights():
        tensor = checkpoint.tensor(weight.role, weight.layer)
        count = capabilities.dense_bytes
        dense += count(tensor.type.name, prod(tensor.shape)) if count else tensor.nbytes
    rows: Mapping[str, int] = {
        "token": WINDOW_TOKENS,
        "pick": WINDOW_TOKENS * program.top_k,
        "logits": WINDOW_LOGITS,
    }
    experts = checkpoint.experts
    return Sizes(
        dense=dense,
        experts=experts.count * sum(layout.nbytes for layout in experts.layouts.values()),
        kv_position=kv_bytes(kv_type, program.kv_layers, program.kv_width),
        workspace=sum(4 * b.width * rows[b.rows] for b in program.buffers),
    )


def _plan_request(
    checkpoint: Checkpoint, settings: Settings, machine: Machine, sizes: Sizes
) -> PlanRequest:
    trained = checkpoint.hyper.context
    if settings.max_context is not None and settings.max_context > trained:
        raise UsageError(
            f"--max-context {settings.max_context} is too long",
            f"{checkpoint.path} was trained on {trained} tokens",
            f"give at most {trained}",
        )
    available = machine.memory_available
    budgeted = settings.ram_budget is not None
    return PlanRequest(
        sizes=sizes,
        ram=int(settings.ram_budget * 2**30) if budgeted else available,
        ram_origin="--ram-budget" if budgeted else "available",
        reserve=0 if budgeted else int(settings.ram_reserve_gib * 2**30),
        trained=trained,
        source=None if settings.source == AUTO else settings.source,
        context=settings.max_context,
    )
