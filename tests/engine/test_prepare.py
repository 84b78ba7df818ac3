"""What is decided before anything is allocated, and what it is said to make worse."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from attrs import evolve

from strata_core import demo
from strata_core.api import make_plan
from strata_core.builtin import REFERENCE
from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.config import resolve_arguments
from strata_core.engine import prepare as module
from strata_core.engine.assemble import start
from strata_core.engine.prepare import Prepared, prepare
from strata_core.errors import Degradations, SelectionError, StrataError, UsageError
from strata_core.interfaces import BlobLayout, Probe, SourceRecord, Unusable, Usable
from strata_core.plugins import Broken, Catalogue, Offer, load_plugins

GIB = 1 << 30
FALLBACK = "the backend reference is a fallback"


@pytest.fixture
def checkpoint() -> Iterator[Checkpoint]:
    opened = open_checkpoint(demo.PATH)
    yield opened
    opened.close()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Catalogue], None]:
    """installed(catalogue): as if exactly this had been found."""
    return lambda found: monkeypatch.setattr(module, "load_plugins", lambda blocked=(): found)


@pytest.fixture
def decide(checkpoint: Checkpoint, make_machine) -> Callable[..., Prepared]:
    """decide(gib_available, **options): prepare the built-in model for such a machine."""

    def call(available: float = 60, **options: object) -> Prepared:
        machine = make_machine(ram_available=int(available * GIB))
        return prepare(checkpoint, resolve_arguments(options, {}), machine)

    return call


def own() -> Catalogue:
    """What core offers, with the oracle as its only backend and without anybody's plugins."""
    found = load_plugins([])
    return evolve(found, backends=(found.backend("reference"),))


def dummy(
    name: str, claims: Callable[[str], bool] | None = None, probe: Probe | None = None
) -> Offer[SourceRecord]:
    def build(_context: object) -> None:
        raise AssertionError("nothing is built while preparing")

    record = SourceRecord(
        name=name,
        summary=name,
        api=(1, 0),
        probe=lambda machine: probe or Usable(),
        build=build,
        claims=claims,
    )
    return Offer(record, f"dist-{name}", "1.0")


def whats(prepared: Prepared) -> list[str]:
    return [item.what for item in prepared.degradations]


# --- the source --------------------------------------------------------------------------------


@pytest.mark.parametrize("available", [60, 6.2, 0.1])
@pytest.mark.parametrize(
    ("claims", "asked", "name", "because"),
    [
        (lambda form: form == "gguf", "auto", "theirs", "it claims models of the form 'gguf'"),
        (lambda form: form == "hub", "auto", None, None),
        (lambda form: 1 / 0, "auto", None, None),
        (None, "auto", None, None),
        (None, "theirs", "theirs", "named by --source"),
        (lambda form: True, "mmap", "mmap", "named by --source"),
    ],
)
def test_the_plan_is_made_for_the_source_that_is_taken(
    available, claims, asked, name, because, decide, installed
) -> None:
    found = own()
    installed(evolve(found, sources=(*found.sources, dummy("theirs", claims))))
    prepared = decide(available, source=asked)
    assert prepared.plan.source == prepared.source.name
    assert prepared.plan.source_because == prepared.source.because
    if name is None:
        assert prepared.source.name == ("arena" if available == 60 else "mmap")
    else:
        assert (prepared.source.name, prepared.source.because) == (name, because)
    in_file = any(item.nbytes for t in prepared.plan.tiers if t.name == "file" for item in t.items)
    assert in_file == (prepared.source.name != "arena")


def test_sources_that_claim_the_same_form_stop_before_the_plan(decide, installed) -> None:
    found = own()
    both = (dummy("one", lambda form: True), dummy("two", lambda form: True))
    installed(evolve(found, sources=(*found.sources, *both)))
    with pytest.raises(SelectionError, match="several sources can be used: one, two"):
        decide()


def test_a_planned_source_that_is_missing_was_named_by_nobody(decide, installed) -> None:
    found = own()
    without = tuple(offer for offer in found.sources if offer.name != "arena")
    twice = Broken(
        "dist-x", "1.0", "x", "duplicate", "source 'arena' is offered by both", "",
        (("source", "arena"),),
    )  # fmt: skip
    for broken, why in (((), "no plugin that loaded offers it"), ((twice,), "offered by both")):
        installed(evolve(found, sources=without, broken=broken))
        with pytest.raises(SelectionError) as caught:
            decide()
        assert caught.value.what == "source 'arena' cannot be used"
        assert why in caught.value.why
        assert "the planner chose it" in caught.value.why
        assert "choose another: --source mmap" in caught.value.remedy
        assert "named by" not in str(caught.value)


def test_a_planned_source_that_is_not_usable_says_why(decide, installed) -> None:
    found = own()
    arena = dummy("arena", probe=Unusable("no room", "make some"))
    rest = tuple(offer for offer in found.sources if offer.name != "arena")
    installed(evolve(found, sources=(arena, *rest)))
    with pytest.raises(SelectionError) as caught:
        decide()
    assert caught.value.why.startswith("no room; the planner chose it: everything takes")
    assert caught.value.remedy == (
        "make some; choose another: --source mmap or --source sliced-pinned or --source tiered-file"
    )


@pytest.mark.parametrize("expert_bytes", [None, lambda layout: layout.nbytes * 1000])
def test_the_largest_expert_being_computed_is_counted(
    expert_bytes, decide, installed, checkpoint
) -> None:
    found = own()
    (offer,) = found.backends
    layouts = checkpoint.experts.layouts.values()

    def working(count: Callable[[BlobLayout], int] | None) -> int:
        record = evolve(offer.record, capabilities=evolve(REFERENCE, expert_bytes=count))
        installed(evolve(found, backends=(evolve(offer, record=record),)))
        items = decide().plan.tiers[0].items
        return next(item.nbytes for item in items if item.what == "working memory")

    largest = max(4 * sum(p.rows * p.columns for p in layout.parts) for layout in layouts)
    other = 1000 * max(layout.nbytes for layout in layouts) if expert_bytes else 0
    assert working(REFERENCE.expert_bytes) - working(expert_bytes) == largest - other


# --- memory ------------------------------------------------------------------------------------


def test_a_budget_beyond_what_is_available_is_cut_and_reported(decide, installed) -> None:
    installed(own())
    prepared = decide(3, ram_budget=90)
    (ram, _) = prepared.plan.tiers
    assert ram.have == 3 * GIB
    assert prepared.plan.ram_origin == "available; --ram-budget is 90.00 GiB"
    what = "of the 90.00 GiB of --ram-budget only 3.00 GiB is used"
    assert whats(prepared) == [FALLBACK, what]
    assert "at most 3.0" in prepared.degradations[1].remedy


@pytest.mark.parametrize("budget", [3, 2.5])
def test_a_budget_that_is_there_is_taken_whole(budget, decide, installed) -> None:
    installed(own())
    prepared = decide(3, ram_budget=budget)
    assert prepared.plan.tiers[0].have == budget * GIB
    assert prepared.plan.ram_origin == "--ram-budget"
    assert prepared.plan.reserve == 0
    assert whats(prepared) == [FALLBACK]


def test_a_budget_that_is_cut_can_be_too_little(decide, installed) -> None:
    installed(own())
    prepared = decide(0.1, ram_budget=90)
    assert not prepared.plan.fits
    with pytest.raises(StrataError, match="does not fit"):
        start(prepared, None, Degradations(), None)


# --- degradations ------------------------------------------------------------------------------


def test_nothing_is_worse_where_all_is_named_and_fits(decide, installed) -> None:
    installed(own())
    assert decide(backend="reference").degradations == ()


def test_what_want_of_memory_chose_is_reported(decide, installed) -> None:
    installed(own())
    mapped, context = decide(6.265, backend="reference").degradations
    assert mapped.what == "the experts are not kept in memory but read from the mapped file"
    assert mapped.why.startswith("all experts in memory would take ")
    assert context.what == "the context is cut to 512 tokens"
    assert "trained on 2048" in context.why
    assert "STRATA_RAM_RESERVE_GIB" in mapped.remedy
    named = {"source": "mmap", "max_context": 600}
    assert decide(6.265, backend="reference", **named).degradations == ()


def test_an_unknown_variable_is_reported_with_a_guess(decide, installed, monkeypatch) -> None:
    installed(own())
    monkeypatch.setenv("STRATA_RAM_BUGDET", "4")
    (unknown,) = decide(backend="reference").degradations
    assert "STRATA_RAM_BUGDET" in unknown.what
    assert unknown.remedy == "did you mean 'STRATA_RAM_BUDGET'?"


def test_a_started_model_reports_what_its_plan_made_worse(installed) -> None:
    installed(own())
    import strata_core

    options = {"ram_budget": 0.268, "source": "mmap"}
    planned = make_plan("demo", **options)
    fallback, context = planned.degradations
    assert fallback.what == FALLBACK
    assert context.what == f"the context is cut to {planned.plan.context} tokens"
    with strata_core.load("demo", **options) as model:
        assert tuple(model.degradations) == planned.degradations
        assert model.selections == planned.selections
        assert model.plan == planned.plan


def test_a_kv_type_that_the_backend_lacks_is_refused(decide) -> None:
    with pytest.raises(UsageError, match="--kv int8 cannot be used with backend reference"):
        decide(kv="int8", backend="reference")
