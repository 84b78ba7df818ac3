"""Selection's rules on random offers, against the rules written as sets; and what it reports."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.errors import SelectionError
from strata_core.interfaces import BackendRecord, SourceRecord, Unusable, Usable
from strata_core.plugins import Broken, Offer
from strata_core.selection import Selection, chosen, select_backend, select_source

NAMES = ("a", "b", "c", "d", "e")


def nothing(argument):
    raise AssertionError("selection asks and builds nothing")


def backend(name, supersedes=(), fallback=False, automatic=True):
    record = BackendRecord(
        name=name,
        summary=name,
        api=(1, 0),
        probe=nothing,
        build=nothing,
        supersedes=tuple(supersedes),
        fallback=fallback,
        automatic=automatic,
    )
    return Offer(record, f"dist-{name}", "1.0")


def source(name, claims):
    record = SourceRecord(
        name=name, summary=name, api=(1, 0), probe=nothing, build=nothing, claims=claims
    )
    return Offer(record, f"dist-{name}", "1.0")


offers = st.lists(
    st.builds(
        backend,
        st.sampled_from(NAMES),
        st.lists(st.sampled_from(NAMES), max_size=2),
        st.booleans(),
        st.sampled_from([True, True, False]),
    ).filter(lambda offer: offer.name not in offer.record.supersedes),
    max_size=5,
    unique_by=lambda offer: offer.name,
)
broken = st.lists(
    st.sampled_from(
        [
            Broken("dist-x", "1.0", "x", "import", "ImportError: x"),
            Broken("dist-y", "1.0", "y", "api", "too new", offered=(("backend", "y"),)),
            Broken("dist-z", "1.0", "z", "api", "too new", offered=(("source", "z"),)),
        ]
    ),
    max_size=2,
    unique=True,
)


def expected_name(offers, usable, broken):
    """The rules of the design, on sets: the one name, or None for an error."""
    live = {o.name: o.record for o in offers if o.name in usable and o.record.automatic}
    above = {name: {up for up, r in live.items() if name in r.supersedes} for name in live}
    free = {name for name in live if not above[name]}
    beaten: set[str] = set()
    while True:
        more = {name for name in live if above[name] & (free | beaten)} - beaten
        if not more:
            break
        beaten |= more
    left = set(live) - beaten
    real = {name for name in left if not live[name].fallback}
    if real:
        return real.pop() if len(real) == 1 else None
    if any(not item.offered or item.offered[0][0] == "backend" for item in broken):
        return None
    return left.pop() if len(left) == 1 else None


@given(offers, st.sets(st.sampled_from(NAMES)), broken, st.randoms(use_true_random=False))
def test_auto_follows_the_rules_in_every_order(offers, usable, broken, random):
    probes = {
        offer.name: Usable() if offer.name in usable else Unusable("no", f"fix {offer.name}")
        for offer in offers
    }
    result = select_backend(offers, broken, probes)
    name = result.name if isinstance(result, Selection) else None
    assert name == expected_name(offers, usable, broken)
    if isinstance(result, Selection):
        others = {offer.name for offer in offers} - {name}
        assert {runner_up for runner_up, _ in result.runners_up} == others
        assert all(reason for _, reason in result.runners_up)
        assert bool(result.notice) == next(o.record.fallback for o in offers if o.name == name)
    else:
        assert result.what
        assert result.why
        assert result.remedy
    shuffled, moved = list(offers), list(broken)
    random.shuffle(shuffled)
    random.shuffle(moved)
    again = select_backend(shuffled, moved, probes)
    assert (again == result) if isinstance(result, Selection) else (str(again) == str(result))


@given(offers, st.sets(st.sampled_from(NAMES)), broken, st.sampled_from((*NAMES, "f", "y")))
def test_a_named_record_is_that_one_or_an_error(offers, usable, broken, request):
    probes = {
        offer.name: Usable() if offer.name in usable else Unusable("no", "") for offer in offers
    }
    result = select_backend(offers, broken, probes, request)
    if request in usable and request in {offer.name for offer in offers}:
        assert isinstance(result, Selection)
        assert (result.name, result.distribution) == (request, f"dist-{request}")
        assert result.notice == ""
    else:
        assert isinstance(result, SelectionError)
        assert request in result.what


def test_runners_up_say_why_each_was_not_taken():
    offers = [
        backend("a"),
        backend("b", supersedes=("a",)),
        backend("c"),
        backend("d", fallback=True),
    ]
    probes = {"a": Usable(), "b": Usable("v2"), "c": Unusable("no card"), "d": Usable()}
    result = chosen(select_backend(offers, (), probes))
    assert result == Selection(
        "backend",
        "b",
        "dist-b",
        "1.0",
        "usable here, and it supersedes a",
        (
            ("a", "superseded by b"),
            ("c", "no card"),
            ("d", "a fallback, taken only when nothing else is"),
        ),
    )
    assert result.as_json()["runners_up"][1] == {"name": "c", "reason": "no card"}
    assert str(result) == "backend b (dist-b 1.0): usable here, and it supersedes a"


def test_an_unusable_record_supersedes_nothing():
    probes = {"a": Usable(), "b": Unusable("not here")}
    result = select_backend([backend("a"), backend("b", supersedes=("a",))], (), probes)
    assert chosen(result).name == "a"


def test_a_record_used_by_name_alone_is_none_of_autos():
    offers = [backend("a", supersedes=("b",), automatic=False), backend("b"), backend("c")]
    probes = {"a": Usable(), "b": Usable(), "c": Unusable("no card", "")}
    result = chosen(select_backend(offers, (), probes))
    assert (result.name, result.because) == ("b", "the only backend usable here")
    assert result.runners_up == (("a", "used only where --backend names it"), ("c", "no card"))
    assert chosen(select_backend(offers, (), probes, "a")).name == "a"


def test_one_used_by_name_alone_is_no_reason_for_a_fallback():
    offers = [backend("a", automatic=False), backend("d", fallback=True)]
    result = chosen(select_backend(offers, (), {"a": Usable(), "d": Usable()}))
    assert result.notice == "backend d, the fallback: only fallbacks are installed"
    assert result.runners_up == (("a", "used only where --backend names it"),)
    error = select_backend(offers[:1], (), {"a": Usable()})
    assert isinstance(error, SelectionError)
    assert error.why == "a: used only where --backend names it"


def test_the_fallback_comes_with_one_visible_line():
    probes = {"a": Unusable("no card"), "d": Usable()}
    result = chosen(select_backend([backend("a"), backend("d", fallback=True)], (), probes))
    assert result.notice == "backend d, the fallback: a: no card"
    assert "\n" not in result.notice


def test_a_fallback_that_gave_way_is_no_reason_for_the_one_that_is_taken():
    offers = [backend("c", supersedes=("d",), fallback=True), backend("d", fallback=True)]
    probes = {"c": Usable(), "d": Usable()}
    result = chosen(select_backend(offers, (), probes))
    assert result.notice == "backend c, the fallback: only fallbacks are installed"
    assert result.runners_up == (("d", "superseded by c"),)
    broken_compiler = {"c": Unusable("no compiler"), "d": Usable()}
    assert chosen(select_backend(offers, (), broken_compiler)).notice == (
        "backend d, the fallback: c: no compiler"
    )


def test_chosen_raises_the_error():
    with pytest.raises(SelectionError, match="no backend is installed"):
        chosen(select_backend([], (), {}))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        (
            lambda form: 1 / 0,
            "asked whether it claims the form 'gguf', it raised ZeroDivisionError",
        ),
        (lambda form: "yes", "asked whether it claims the form 'gguf', it returned str"),
        (lambda form: False, "the planner chose another"),
        (None, "the planner chose another"),
    ],
)
def test_a_source_that_cannot_say_what_it_claims_claims_nothing(claims, reason):
    offers = [source("arena", None), source("odd", claims)]
    probes = {"arena": Usable(), "odd": Usable()}
    choice = select_source(offers, (), probes, "auto", "gguf")
    assert choice.settled is None
    result = chosen(choice.final("arena", "it fits"))
    assert (result.name, result.because) == ("arena", "it fits")
    assert result.runners_up == (("odd", reason),)


def test_a_planned_source_that_is_not_usable_is_an_error_not_a_substitution():
    offers = [source("arena", None), source("mmap", None)]
    probes = {"arena": Unusable("no memory"), "mmap": Usable()}
    result = select_source(offers, (), probes, "auto", "gguf").final("arena", "it fits")
    assert isinstance(result, SelectionError)
    assert result.what == "source 'arena' cannot be used"
    assert result.why == "no memory; the planner chose it: it fits"
    assert result.remedy == "choose another: --source mmap"
