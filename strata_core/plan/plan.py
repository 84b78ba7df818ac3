"""What goes where: byte arithmetic over a model's sizes and a machine's memory.

Pure: nothing is opened or allocated, and the same numbers give the same plan. The order of
decisions: the source that was given, else the arena where it fits beside the reserve, else the
mapped file; then the context that was given, else the trained length, else what fits beside the
reserve. Only what was given, or the least that a model can run with, takes from the reserve.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import asdict, evolve, field, frozen

from strata_core.plan import devices, tier
from strata_core.plan.chunk import Balance, balance
from strata_core.plan.devices import Accelerator, Cache, Layout, Pinning
from strata_core.plan.sizes import (
    BASE_BYTES,
    DENSE,
    EXPERTS,
    KV,
    PROGRAM,
    WORK,
    Item,
    Option,
    Sizes,
    Tier,
    gib,
)
from strata_core.plan.smaller import smaller
from strata_core.plan.speed import Pace, Placed, Speed, predict
from strata_core.plan.tier import LowRam, Reads

__all__ = [
    "BASE_BYTES", "Item", "Option", "Plan", "PlanRequest", "Sizes", "Tier", "gib", "make_plan",
]  # fmt: skip

BUILT_IN = ("arena", "sliced-pinned", tier.SOURCE, "mmap")
"""Sources of which it is known where they keep experts."""

RAM_BUDGET = "--ram-budget"
"""The `ram_origin` of a request whose RAM is what the user allowed."""

SMALLEST_CONTEXT = 512
"""A context is not cut below this many tokens unless the model was trained on fewer."""


@frozen(kw_only=True)
class PlanRequest:
    """What the planner decides from.

    `ram` is what may be taken (the budget, or what is available), `ram_origin` says which;
    `reserve` is what the planner's own choices leave free of it. `source` and `context` are None
    where the choice is the planner's; `source_because` says who gave the source. `trained` is the
    trained context length; `accelerator` the devices, None where the backend has none;
    `low_ram` what the tiered file would do; `pace` what a prediction goes by, None for none.
    `resident` are the most bytes of experts that the resident complement keeps, None for any.
    `chunks` are the sizes with shorter chunks of prompts, the longest first, to propose;
    `chunk_because` says why the chunk is as long as it is.
    """

    sizes: Sizes
    ram: int
    ram_origin: str
    reserve: int
    trained: int
    source: str | None = None
    source_because: str = "named by --source"
    context: int | None = None
    accelerator: Accelerator | None = None
    low_ram: LowRam = field(factory=LowRam)
    pace: Pace | None = None
    resident: int | None = None
    chunks: tuple[Sizes, ...] = ()
    chunk_because: str = "named by --prefill"

    @property
    def room(self) -> int:
        """What the planner's own choices may take."""
        return max(0, self.ram - self.reserve)


@frozen(kw_only=True)
class Plan:
    """The decisions, each with its reason, and the tiers they lead to.

    `reserve` is what was to stay free of the memory there is, `reserve_used` what is taken of it
    all the same, and `reserve_because` for what reason. `options` are smaller ways that would fit;
    they are there only where the plan does not. `caches` are the experts that devices hold.
    `budget` is what the source may keep experts in, and `reads` what it reads then; None where it
    keeps all, or none. `speed` is what decoding is expected to reach, `pinning`
    how the experts' memory is expected to be page-locked, `prompts` what a chunk of a prompt
    copies and computes.
    """

    source: str
    source_because: str
    context: int
    context_because: str
    tiers: tuple[Tier, ...]
    ram_origin: str
    reserve: int
    reserve_used: int = 0
    reserve_because: str = ""
    options: tuple[Option, ...] = field(default=())
    caches: tuple[Cache, ...] = ()
    budget: int | None = None
    reads: Reads | None = None
    speed: Speed | None = None
    pinning: Pinning | None = None
    prompts: Balance | None = None

    @property
    def fits(self) -> bool:
        """Whether every tier has what it needs."""
        return all(tier.short_by == 0 for tier in self.tiers)

    def tier(self, name: str) -> Tier:
        """The tier of that name; KeyError where there is none."""
        found = {tier.name: tier for tier in self.tiers}
        return found[name]

    @property
    def expert_room(self) -> int | None:
        """Bytes of host memory that the source may keep experts in; None where that is all."""
        if self.source != "sliced-pinned":
            return self.budget
        ram = self.tier("ram")
        return ram.have - sum(item.nbytes for item in ram.items if item.name != EXPERTS)

    def as_json(self) -> dict[str, Any]:
        """The plan as a member of a `--json` document; sizes in bytes."""
        return {
            "fits": self.fits,
            "source": self.source,
            "source_because": self.source_because,
            "context": self.context,
            "context_because": self.context_because,
            "reserve": self.reserve,
            "reserve_used": self.reserve_used,
            "reserve_because": self.reserve_because,
            "tiers": [
                {
                    "name": tier.name,
                    "device": tier.label or None,
                    "need": tier.need,
                    "have": tier.have,
                    "short_by": tier.short_by,
                    "items": [asdict(item) for item in tier.items],
                }
                for tier in self.tiers
            ],
            "caches": [asdict(cache) for cache in self.caches],
            "reads": asdict(self.reads) if self.reads else None,
            "speed": self.speed.as_json() if self.speed else None,
            "pinning": asdict(self.pinning) if self.pinning else None,
            "prompts": self.prompts.as_json() if self.prompts else None,
            "options": [asdict(option) for option in self.options],
        }


def make_plan(request: PlanRequest) -> Plan:
    """Decide source and context and lay out the tiers; never raises for lack of memory."""
    plan = decide(request)
    if plan.fits:
        prompts = balance(request, plan)
        return evolve(plan, speed=_speed(request, plan), prompts=prompts)
    options = _device_options if request.accelerator else _options
    return evolve(plan, options=options(request, plan.source, plan.context))


def decide(request: PlanRequest) -> Plan:
    """The plan itself, whether it fits or not, without predictions and other ways."""
    source, source_because = _choose_source(request)
    context, context_because = _choose_context(request, source)
    need = _need(request, source, context)
    used = min(max(0, need - request.room), request.ram - request.room)
    layout = devices.lay_out(request, source, context) if request.accelerator else None
    items = _ram(request, source, context)
    budget, reads = None, None
    if source == tier.SOURCE:
        budget = tier.granted(request.low_ram, request.room - need)
        items = (Item("experts", budget, EXPERTS), *items)
        cached = sum(cache.experts for cache in layout.caches) if layout else 0
        reads = tier.reads(request.low_ram, request.sizes, budget, cached)
        if layout is not None:
            held = budget + tier.ring(request.low_ram).nbytes
            layout = devices.with_bulk(request, layout, source, held)
    return Plan(
        source=source,
        source_because=source_because,
        context=context,
        context_because=context_because,
        tiers=(
            *((*layout.vram, layout.pinned) if layout else ()),
            Tier("ram", items, request.ram if used else request.room),
            _file(request, items, layout),
        ),
        caches=layout.caches if layout else (),
        pinning=layout.pinning if layout else None,
        budget=budget,
        reads=reads,
        ram_origin=request.ram_origin,
        reserve=request.ram - request.room,
        reserve_used=used,
        reserve_because=_reserve_because(request) if used else "",
    )


def keeps_experts_in_ram(source: str) -> bool:
    """Whether a source keeps in memory every expert that no device holds."""
    return source in ("arena", "sliced-pinned")


def _choose_source(request: PlanRequest) -> tuple[str, str]:
    if request.source is not None:
        return request.source, request.source_because
    context = request.context or _least_context(request)
    need = _need(request, "arena", context)
    if need <= request.room:
        return "arena", f"everything takes {gib(need)} of the {gib(request.room)} that may be used"
    outside = _need(request, "sliced-pinned", context)
    if request.accelerator and outside <= request.room:
        return "sliced-pinned", (
            f"what no device holds takes {gib(outside)} of the {gib(request.room)} that may be "
            f"used; all experts would take {gib(need)}"
        )
    if request.low_ram.because and not request.low_ram.unmet:
        buffers = _need(request, tier.SOURCE, context)
        if buffers <= request.room or _need(request, "mmap", context) > request.room:
            return tier.SOURCE, request.low_ram.because
        return "mmap", (
            f"with the buffers of a tier in memory it would take {gib(buffers)}, and only "
            f"{gib(request.room)} may be used"
        )
    return "mmap", (
        f"all experts in memory would take {gib(need)}, and only {gib(request.room)} may be used"
    )


def _choose_context(request: PlanRequest, source: str) -> tuple[int, str]:
    if request.context is not None:
        return request.context, "named by --max-context"
    fitting = _most_context(request, source, request.room)
    if fitting >= request.trained:
        return request.trained, "the trained length"
    context = max(_least_context(request), fitting)
    if context == request.trained:
        return context, "the trained length, which is the least"
    beside = " beside the reserve" if request.reserve else ""
    if request.accelerator:
        beside = f" in {devices.most_context(request)[1]}"
    what = f"what fits{beside}" if fitting == context else "the least"
    return context, f"{what}; the model was trained on {request.trained}"


def _least_context(request: PlanRequest) -> int:
    return min(request.trained, SMALLEST_CONTEXT)


def _most_context(request: PlanRequest, source: str, ram: int) -> int:
    """Tokens whose keys and values fit beside the rest; negative where that does not.

    They are in `ram`, or on a device.
    """
    if request.accelerator:
        return devices.most_context(request)[0]
    return (ram - _need(request, source, 0)) // max(1, request.sizes.kv_position)


def _reserve_because(request: PlanRequest) -> str:
    """Why a plan that takes from the reserve does so."""
    if _need(request, "mmap", _least_context(request)) > request.room:
        return "the least that the model can run with needs it"
    given = []
    if request.source is not None:
        given.append(f"source {request.source} ({request.source_because})")
    if request.context is not None:
        given.append(f"--max-context {request.context}")
    return f"asked for: {' and '.join(given)}"


def _need(request: PlanRequest, source: str, context: int) -> int:
    return sum(item.nbytes for item in _ram(request, source, context))


def _ram(request: PlanRequest, source: str, context: int) -> tuple[Item, ...]:
    buffers = (tier.ring(request.low_ram),) if source == tier.SOURCE else ()
    if request.accelerator:
        return (*devices.lay_out(request, source, context).ram, *buffers)
    sizes = request.sizes
    items = [
        Item("dense weights", sizes.dense, DENSE),
        Item(f"keys and values of {context} tokens", sizes.kv_position * context, KV),
        Item("working memory", sizes.workspace, WORK),
        Item("program", BASE_BYTES, PROGRAM),
        *buffers,
    ]
    if keeps_experts_in_ram(source):
        kept = sizes.experts
        if source == "sliced-pinned" and request.resident is not None:
            kept = min(kept, request.resident)
        items.insert(1, Item("experts", kept, EXPERTS))
    return tuple(items)


def _file(request: PlanRequest, ram: tuple[Item, ...], layout: Layout | None) -> Tier:
    """Experts that stay in the model's files, which always have what they need."""
    held = sum(item.nbytes for item in ram if item.name == EXPERTS)
    held += sum(cache.nbytes for cache in layout.caches) if layout else 0
    nbytes = max(0, request.sizes.experts - held)
    return Tier("file", (Item("experts", nbytes, EXPERTS),) if nbytes else (), nbytes)


def _speed(request: PlanRequest, plan: Plan) -> Speed | None:
    """What decoding is expected to reach; None for a source that nothing is known of."""
    sizes = request.sizes
    if request.pace is None or plan.source not in BUILT_IN:
        return None
    counts = [cache.experts for cache in plan.caches] or [0]
    blob = sizes.experts / max(1, sizes.count)
    held = sum(item.nbytes for item in plan.tier("ram").items if item.name == EXPERTS)
    in_ram = plan.reads.experts_kept if plan.reads else round(held / blob) if blob else 0
    pinning = plan.pinning
    placed = Placed(
        cached=counts[0],
        helped=sum(counts[1:]),
        in_ram=in_ram,
        blob=blob,
        pinned=pinning.nbytes / pinning.of if pinning else 0.0,
        mapped=plan.budget is None,
        dense_in="vram" if request.accelerator else "host",
    )
    return predict(request.pace, placed)


def _options(request: PlanRequest, source: str, context: int) -> tuple[Option, ...]:
    """Smaller ways that fit, each a change of as little as possible; as named ways they may take
    from the reserve.
    """
    found = []
    for other in dict.fromkeys((source, "mmap")):
        flags = [] if other == source else [f"--source {other}"]
        need = _need(request, other, context)
        if need <= request.ram:
            found.append(Option(" ".join(flags), need))
            continue
        fewer = min(context, _most_context(request, other, request.ram))
        if fewer >= 1:
            flags.append(f"--max-context {fewer}")
            found.append(Option(" ".join(flags), _need(request, other, fewer)))
    return tuple(found)


def _device_options(request: PlanRequest, source: str, context: int) -> tuple[Option, ...]:
    """Smaller ways that fit on the devices; the need is what the first of them then holds."""
    found: list[tuple[Mapping[str, Any], Option]] = []
    for flags, other in smaller(evolve(request, source=source, context=context)):
        plan = decide(other)
        if plan.fits and not any(_as_good(before, flags) for before, _ in found):
            text = " ".join(f"{flag} {value}" for flag, value in flags.items())
            found.append((flags, Option(text, plan.tiers[0].need)))
    return tuple(option for _, option in found)


def _as_good(before: Mapping[str, Any], flags: Mapping[str, Any]) -> bool:
    """Whether other flags change no more than `flags` do, and nothing by more."""
    return all(flag in flags and value >= flags[flag] for flag, value in before.items())
