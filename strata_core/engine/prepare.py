"""Everything that is decided before anything is allocated: which parts, and what goes where."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import chain
from math import floor, prod
from pathlib import Path

from attrs import asdict, evolve, field, frozen

from strata_core.cache.rank import rates
from strata_core.checkpoint.open import Checkpoint
from strata_core.config import Settings, variable_degradations
from strata_core.engine.able import check_weight_types, choose_kv, unused_plugin_settings
from strata_core.engine.devices import accelerator, without_source, without_use
from strata_core.engine.rates import pace, rates_path, token_ops
from strata_core.engine.tier import Known, known_profile, low_ram, unlearned
from strata_core.errors import Degradation, UsageError
from strata_core.interfaces import BackendRecord, Capabilities, Expert, Limits, Probe, Role
from strata_core.kernels.kv import kv_bytes
from strata_core.kernels.program import Program
from strata_core.machine import Machine
from strata_core.model.build import build_program
from strata_core.pack.reads import unchecked_reads
from strata_core.plan.chunk import MOST, suiting
from strata_core.plan.devices import Accelerator
from strata_core.plan.explain import plan_degradations
from strata_core.plan.plan import RAM_BUDGET, Plan, PlanRequest, Sizes, decide, gib, make_plan
from strata_core.plugins import Catalogue, load_plugins, probe_catalogue
from strata_core.plugins.naming import naming
from strata_core.selection import (
    Selection,
    SourceChoice,
    chosen,
    select_allocator,
    select_backend,
    select_source,
)

WINDOW_TOKENS = 512
"""Most tokens of one window."""

DEVICE_CHUNKS = (MOST, 4096, 2048, 1024, 512, 256, 128, 64, 32, 16)
"""Tokens of a prompt's chunk on a device; which of them suits is the planner's to say."""

BUILT_IN_FORMS = ("gguf", "hub", "pack")

WINDOW_LOGITS = 64
"""Most logits rows of one window."""


@frozen(eq=False, kw_only=True)
class Prepared:
    """What was decided, each decision with its reason; `degradations` is what it makes worse.

    `known` is the profile that caches and tiers are filled by.
    """

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
    degradations: tuple[Degradation, ...]
    known: Known = field(factory=Known)
    rates_file: Path | None = None

    @property
    def ranking(self) -> tuple[Expert, ...] | None:
        """All experts, the most asked for first; None without a profile."""
        return self.known.order

    @property
    def rates(self) -> tuple[float, ...]:
        """How often a token asks for each expert of `ranking`; none without a profile."""
        if self.known.profile is None or self.known.order is None:
            return ()
        chosen = self.checkpoint.hyper.top_k / max(1, self.checkpoint.experts.count)
        return rates(self.known.profile, self.known.order, chosen)

    @property
    def selections(self) -> tuple[Selection, ...]:
        """What was chosen for each role."""
        return (self.backend, self.allocator, self.source)


def prepare(checkpoint: Checkpoint, settings: Settings, machine: Machine) -> Prepared:
    """Select a record for each role and plan. Raises StrataError; nothing is held afterwards."""
    found = load_plugins(blocked=settings.block_plugins)
    probes = probe_catalogue(found, machine)
    backend, allocator = _backend_and_allocator(found, probes, settings)
    record = found.backend(backend.name).record
    unused = without_use(settings, record)
    with naming("planning failed", (backend, allocator)):
        devices = accelerator(settings, machine, record, found.allocator(allocator.name).record)
    capabilities = record.capabilities
    kv_type = choose_kv(settings.kv, capabilities, backend.name)
    check_weight_types(checkpoint, capabilities, backend.name)
    program = build_program(checkpoint.hyper)
    with naming("planning failed", (backend,)):
        sizes, others = _chunked(checkpoint, program, capabilities, kv_type, settings, devices)
    choice = select_source(
        found.sources, found.broken, probes["source"], settings.source, checkpoint.form
    )
    given = chosen(choice.settled) if choice.settled else None
    memory = _memory(settings, machine)
    known = known_profile(checkpoint, settings)
    asked = given.name if given else None
    used = devices.devices if devices else ()
    measured = rates_path(checkpoint, settings, machine, backend.name, used)
    request = evolve(
        _plan_request(checkpoint, settings, memory, sizes, given),
        accelerator=devices,
        low_ram=low_ram(checkpoint, settings, machine, sizes, devices, known, asked),
        pace=pace(checkpoint, program, settings, machine, known, record, measured, used),
    )
    request, shorter = _suiting(request, others, settings)
    plan = make_plan(request)
    if not plan.fits:  # what shorter chunks take is worked out for an error alone
        plan = make_plan(evolve(request, chunks=tuple(shorter)))
    source = _source(choice, plan, checkpoint.form)
    selections = (backend, allocator, source)
    return Prepared(
        checkpoint=checkpoint,
        settings=settings,
        machine=machine,
        catalogue=found,
        backend=backend,
        allocator=allocator,
        source=source,
        program=program,
        limits=Limits(request.sizes.chunk, WINDOW_LOGITS, plan.context, kv_type),
        plan=plan,
        known=known,
        rates_file=measured,
        degradations=(
            *variable_degradations(table=settings.table),
            *unused,
            *unheeded(settings, selections, record),
            *memory.degradations,
            *_planned(request, plan, known),
            *unchecked_reads(settings, checkpoint.experts, source.name),
        ),
    )


def _chunked(
    checkpoint: Checkpoint,
    program: Program,
    capabilities: Capabilities,
    kv_type: str,
    settings: Settings,
    devices: Accelerator | None,
) -> tuple[Sizes, Iterator[Sizes]]:
    """The sizes with the longest chunk of prompts, and on devices those with shorter ones."""
    chunk = settings.prefill if isinstance(settings.prefill, int) else WINDOW_TOKENS
    chunk = min(chunk, settings.max_context or checkpoint.hyper.context)
    sizes = evolve(_sizes(checkpoint, program, capabilities, kv_type, chunk), chunk=chunk)
    if devices is None:
        return sizes, iter(())
    found = _on_devices(checkpoint, program, sizes, kv_type, settings)
    return next(found), found


def _planned(request: PlanRequest, plan: Plan, known: Known) -> Iterator[Degradation]:
    """What the plan makes worse."""
    yield from plan_degradations(request, plan)
    yield from unlearned(known, plan)


def unheeded(
    settings: Settings, selections: Collection[Selection], backend: BackendRecord
) -> Iterator[Degradation]:
    """What the selections make worse, and settings that nothing of what was chosen heeds.

    Raises UsageError where a flag or an argument gave such a setting.
    """
    yield from unused_plugin_settings(settings, selections)
    source = next(item.name for item in selections if item.role == "source")
    yield from without_source(settings, source, backend)
    yield from (item.degradation for item in selections if item.degradation)


def _backend_and_allocator(
    found: Catalogue, probes: Mapping[Role, Mapping[str, Probe]], settings: Settings
) -> tuple[Selection, Selection]:
    backend = chosen(
        select_backend(found.backends, found.broken, probes["backend"], settings.backend)
    )
    allocator = chosen(
        select_allocator(
            found.allocators, found.broken, probes["allocator"], backend.name, settings.allocator
        )
    )
    return backend, allocator


def _source(choice: SourceChoice, plan: Plan, form: str) -> Selection:
    """The source in the end: the planner's where the form is one that built-in sources read."""
    planned = plan.source if form in BUILT_IN_FORMS else None
    return chosen(choice.final(planned, plan.source_because))


# --- what the plan is made from ----------------------------------------------------------------


def _sizes(
    checkpoint: Checkpoint,
    program: Program,
    capabilities: Capabilities,
    kv_type: str,
    chunk: int,
) -> Sizes:
    dense = 0
    for weight in program.weights():
        tensor = checkpoint.tensor(weight.role, weight.layer)
        count = capabilities.dense_bytes
        dense += count(tensor.type.name, prod(tensor.shape)) if count else tensor.nbytes
    rows: Mapping[str, int] = {
        "token": chunk,
        "pick": chunk * program.top_k,
        "logits": WINDOW_LOGITS,
    }
    layouts = checkpoint.experts.layouts.values()
    expert = max(map(capabilities.expert_bytes, layouts)) if capabilities.expert_bytes else 0
    return Sizes(
        dense=dense,
        experts=checkpoint.experts.count * sum(layout.nbytes for layout in layouts),
        kv_position=kv_bytes(kv_type, program.kv_layers, program.kv_width),
        workspace=expert + sum(4 * b.width * rows[b.rows] for b in program.buffers),
        count=checkpoint.experts.count * len(layouts),
        layers=len(layouts),
        token_ops=token_ops(checkpoint, program),
    )


def _on_devices(
    checkpoint: Checkpoint,
    program: Program,
    sizes: Sizes,
    kv_type: str,
    settings: Settings,
) -> Iterator[Sizes]:
    """The same where a model lies on devices, by chunks of prompts, the longest first.

    The first is of the chunk that was named, where one was.
    """
    from strata_core.kernels.device.sizes import StoredWeight, device_sizes

    stored = {}
    for weight in program.weights():
        tensor = checkpoint.tensor(weight.role, weight.layer)
        stored[weight] = StoredWeight(tensor.type.name, tensor.shape, tensor.nbytes)
    length = settings.max_context or checkpoint.hyper.context
    experts = checkpoint.experts
    named = settings.prefill if isinstance(settings.prefill, int) else None
    asked = DEVICE_CHUNKS if named is None else (named, *DEVICE_CHUNKS)
    for tokens in dict.fromkeys(min(n, length, asked[0]) for n in asked):
        limits = Limits(tokens, WINDOW_LOGITS, length, kv_type)
        needed = device_sizes(program, stored, experts.layouts, experts.count, limits)
        yield evolve(sizes, **asdict(needed))


def _suiting(
    request: PlanRequest, others: Iterator[Sizes], settings: Settings
) -> tuple[PlanRequest, Iterator[Sizes]]:
    """The request with the chunk that suits the devices, and the sizes with shorter ones."""
    if isinstance(settings.prefill, int) or request.accelerator is None:
        return request, others
    sizes, because, shorter = suiting(chain([request.sizes], others), request, decide)
    return evolve(request, sizes=sizes, chunk_because=because), shorter


@frozen
class _Memory:
    """The host memory to plan with, as `PlanRequest` has it."""

    ram: int
    origin: str
    reserve: int
    degradations: tuple[Degradation, ...] = ()


def _memory(settings: Settings, machine: Machine) -> _Memory:
    available = machine.memory_available
    if settings.ram_budget is None:
        return _Memory(available, "available", int(settings.ram_reserve_gib * 2**30))
    budget = int(settings.ram_budget * 2**30)
    if budget <= available:
        return _Memory(budget, RAM_BUDGET, 0)
    most = floor(available / 2**30 * 100) / 100
    clamped = Degradation(
        what=f"of the {gib(budget)} of --ram-budget only {gib(available)} is used",
        why="no more memory is available",
        cost="less fits into memory than was asked for",
        remedy=f"free memory, or give a --ram-budget of at most {most}",
    )
    return _Memory(available, f"available; --ram-budget is {gib(budget)}", 0, (clamped,))


def _plan_request(
    checkpoint: Checkpoint,
    settings: Settings,
    memory: _Memory,
    sizes: Sizes,
    given: Selection | None,
) -> PlanRequest:
    trained = checkpoint.hyper.context
    if settings.max_context is not None and settings.max_context > trained:
        raise UsageError(
            f"--max-context {settings.max_context} is too long",
            f"{checkpoint.path} was trained on {trained} tokens",
            f"give at most {trained}",
        )
    resident = settings.resident_budget_gib
    return PlanRequest(
        sizes=sizes,
        ram=memory.ram,
        ram_origin=memory.origin,
        reserve=memory.reserve,
        trained=trained,
        source=given.name if given else None,
        source_because=given.because if given else "",
        context=settings.max_context,
        resident=None if resident is None else int(resident * 2**30),
    )
