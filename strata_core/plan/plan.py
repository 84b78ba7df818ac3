"""What goes where: byte arithmetic over a model's sizes and a machine's memory.

Pure: nothing is opened or allocated, and the same numbers give the same plan. The order of
decisions: the source that was named, else the arena where it fits beside the reserve, else the
mapped file; then the context that was named, else the trained length, else what fits.
"""

from __future__ import annotations

from typing import Any

from attrs import asdict, evolve, field, frozen

BASE_BYTES = 256 << 20
"""What the interpreter and its libraries take besides everything that is counted."""

SMALLEST_CONTEXT = 512
"""A context is not cut below this many tokens unless the model was trained on fewer."""


@frozen(kw_only=True)
class Sizes:
    """Bytes that a model takes with one backend and one KV type.

    `dense` as the backend keeps the dense weights, `experts` all blobs together, `kv_position` one
    position of one sequence, `workspace` the activation buffers of one window.
    """

    dense: int
    experts: int
    kv_position: int
    workspace: int


@frozen(kw_only=True)
class PlanRequest:
    """What the planner decides from.

    `ram` is what may be taken (the budget, or what is available), `ram_origin` says which;
    `reserve` is what `auto` leaves free of it. `source` and `context` are None where the user left
    the choice; `trained` is the trained context length.
    """

    sizes: Sizes
    ram: int
    ram_origin: str
    reserve: int
    trained: int
    source: str | None = None
    context: int | None = None


@frozen
class Item:
    """One line of a tier: what takes how many bytes."""

    what: str
    nbytes: int


@frozen
class Tier:
    """A kind of memory: what is needed there, and what there is to have."""

    name: str
    items: tuple[Item, ...]
    have: int

    @property
    def need(self) -> int:
        """Bytes needed in all."""
        return sum(item.nbytes for item in self.items)

    @property
    def short_by(self) -> int:
        """Bytes missing, 0 where it fits."""
        return max(0, self.need - self.have)


@frozen
class Option:
    """Something else that would fit: the flags to give, and what it then needs."""

    flags: str
    need: int


@frozen(kw_only=True)
class Plan:
    """The decisions, each with its reason, and the tiers they lead to.

    `options` are smaller ways that would fit; they are there only where the plan does not.
    """

    source: str
    source_because: str
    context: int
    context_because: str
    tiers: tuple[Tier, ...]
    ram_origin: str
    options: tuple[Option, ...] = field(default=())

    @property
    def fits(self) -> bool:
        """Whether every tier has what it needs."""
        return all(tier.short_by == 0 for tier in self.tiers)

    def as_json(self) -> dict[str, Any]:
        """The plan as a member of a `--json` document; sizes in bytes."""
        return {
            "fits": self.fits,
            "source": self.source,
            "source_because": self.source_because,
            "context": self.context,
            "context_because": self.context_because,
            "tiers": [
                {
                    "name": tier.name,
                    "need": tier.need,
                    "have": tier.have,
                    "short_by": tier.short_by,
                    "items": [asdict(item) for item in tier.items],
                }
                for tier in self.tiers
            ],
            "options": [asdict(option) for option in self.options],
        }


def make_plan(request: PlanRequest) -> Plan:
    """Decide source and context and lay out the tiers; never raises for lack of memory."""
    source, source_because = _choose_source(request)
    context, context_because = _choose_context(request, source)
    plan = Plan(
        source=source,
        source_because=source_because,
        context=context,
        context_because=context_because,
        tiers=(_ram(request, source, context), _file(request, source)),
        ram_origin=request.ram_origin,
    )
    return plan if plan.fits else evolve(plan, options=_options(request, source, context))


def keeps_experts_in_ram(source: str) -> bool:
    """Whether a source holds a copy of every expert in memory."""
    return source == "arena"


def _choose_source(request: PlanRequest) -> tuple[str, str]:
    if request.source is not None:
        return request.source, "named"
    context = request.context or min(request.trained, SMALLEST_CONTEXT)
    need = _ram(request, "arena", context).need
    room = request.ram - request.reserve
    if need <= room:
        return "arena", f"everything takes {gib(need)} of the {gib(room)} that may be used"
    return "mmap", (
        f"all experts in memory would take {gib(need)}, and only {gib(max(0, room))} may be used"
    )


def _choose_context(request: PlanRequest, source: str) -> tuple[int, str]:
    if request.context is not None:
        return request.context, "named"
    free = request.ram - _ram(request, source, 0).need
    fitting = free // max(1, request.sizes.kv_position)
    if fitting >= request.trained:
        return request.trained, "the trained length"
    context = max(min(request.trained, SMALLEST_CONTEXT), fitting)
    return context, f"what fits; the model was trained on {request.trained}"


def _ram(request: PlanRequest, source: str, context: int) -> Tier:
    sizes = request.sizes
    items = [
        Item("dense weights", sizes.dense),
        Item(f"keys and values of {context} tokens", sizes.kv_position * context),
        Item("activations", sizes.workspace),
        Item("program", BASE_BYTES),
    ]
    if keeps_experts_in_ram(source):
        items.insert(1, Item("experts", sizes.experts))
    return Tier("ram", tuple(items), request.ram)


def _file(request: PlanRequest, source: str) -> Tier:
    """Experts that stay in the model's files, which always have what they need."""
    nbytes = 0 if keeps_experts_in_ram(source) else request.sizes.experts
    return Tier("file", (Item("experts", nbytes),) if nbytes else (), nbytes)


def _options(request: PlanRequest, source: str, context: int) -> tuple[Option, ...]:
    """Smaller ways that fit, each a change of as little as possible."""
    found = []
    for other in dict.fromkeys((source, "mmap")):
        flags = [] if other == source else [f"--source {other}"]
        need = _ram(request, other, context).need
        if need <= request.ram:
            found.append(Option(" ".join(flags), need))
            continue
        room = request.ram - _ram(request, other, 0).need
        fewer = min(context, room // max(1, request.sizes.kv_position))
        if fewer >= 1:
            flags.append(f"--max-context {fewer}")
            found.append(Option(" ".join(flags), _ram(request, other, fewer).need))
    return tuple(found)


def gib(nbytes: int) -> str:
    """Bytes in words: GiB from 1 GiB up, else MiB."""
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.1f} MiB"
