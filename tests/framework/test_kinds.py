"""The kinds of entry point of tests/dummy_plugin together, in every order that could matter."""

from __future__ import annotations

import itertools
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from strata_core.interfaces import Unusable, Usable
from strata_core.plugins import Catalogue, load_plugins, probe_catalogue
from strata_core.selection import select_backend

BUILT_IN = {
    "backend": {"cpu", "reference", "sim"},
    "allocator": {"host", "sim-pinned"},
    "source": {"arena", "mmap", "sliced-pinned", "tiered-file"},
}

OFFERS = {
    "good": {"backend": {"dummy"}, "allocator": {"dummy-memory"}, "source": {"dummy-source"}},
    "duplicate": {"backend": {"dummy", "own"}},
    "slow-probe": {"backend": {"slow"}},
    "prints": {"backend": {"talkative"}},
}
BROKEN = {
    "import-error": "import",
    "mistyped-hook": "hooks",
    "wrong-api": "api",
    "generator": "records",
    "exits": "import",
}
KINDS = sorted([*OFFERS, *BROKEN])
DUMMY = Path(__file__).parents[1] / "dummy_plugin"


def module(kind: str) -> str:
    return kind.replace("-", "_")


def names(catalogue: Catalogue) -> dict[str, set[str]]:
    return {role: {offer.name for offer in catalogue.offers(role)} for role in BUILT_IN}


def quarantined(catalogue: Catalogue) -> list[tuple[str, str, str]]:
    return [(item.entry_point, item.stage, item.error) for item in catalogue.broken]


def expected(kinds) -> tuple[dict[str, set[str]], set[tuple[str, str]]]:
    """(names by role, (entry point, stage)) by the rules, in words of sets."""
    offered = {role: set(own) for role, own in BUILT_IN.items()}
    for kind in set(kinds) & set(OFFERS):
        for role, own in OFFERS[kind].items():
            offered[role] |= own
    broken = {(kind, BROKEN[kind]) for kind in set(kinds) & set(BROKEN)}
    if {"good", "duplicate"} <= set(kinds):
        offered["backend"] -= {"dummy"}
        broken |= {("good", "duplicate"), ("duplicate", "duplicate")}
    return offered, broken


def check(catalogue: Catalogue, kinds) -> None:
    offered, broken = expected(kinds)
    assert names(catalogue) == offered
    assert {(item.entry_point, item.stage) for item in catalogue.broken} == broken
    assert len(catalogue.broken) == len(broken)


@pytest.fixture
def points(install) -> dict[str, metadata.EntryPoint]:
    return {kind: install(module(kind))[0] for kind in KINDS}


def test_the_distribution_declares_these_kinds():
    declared = tomllib.loads((DUMMY / "pyproject.toml").read_text("utf-8"))
    entries = declared["project"]["entry-points"]["strata"]
    assert entries == {kind: f"strata_dummy.{module(kind)}" for kind in KINDS}


@pytest.mark.parametrize("kind", KINDS)
def test_each_alone(points, kind):
    check(load_plugins([points[kind]]), [kind])


def test_every_two_in_both_orders(points):
    for pair in itertools.permutations(KINDS, 2):
        check(load_plugins([points[kind] for kind in pair]), pair)


def test_all_of_them_with_each_first_and_each_last(points):
    whole = load_plugins(points.values())
    check(whole, KINDS)
    for turn in range(len(KINDS)):
        order = KINDS[turn:] + KINDS[:turn]
        for kinds in (order, order[::-1]):
            catalogue = load_plugins([points[kind] for kind in kinds])
            assert names(catalogue) == names(whole)
            assert quarantined(catalogue) == quarantined(whole)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_some_of_them_in_any_order(points, data):
    kinds = data.draw(st.lists(st.sampled_from(KINDS), unique=True))
    catalogue = load_plugins([points[kind] for kind in kinds])
    check(catalogue, kinds)
    again = load_plugins([points[kind] for kind in data.draw(st.permutations(kinds))])
    assert quarantined(again) == quarantined(catalogue)
    assert [offer.name for offer in again.backends] == [offer.name for offer in catalogue.backends]


def test_all_of_them_are_probed_and_selected_from(points, make_machine, capfd):
    catalogue = load_plugins(points.values())
    from strata_dummy import slow_probe
    from strata_dummy.clock import over_when_only

    probes = probe_catalogue(catalogue, make_machine(), 0.3, over_when_only("slow"))
    slow_probe.GATE.set()
    assert capfd.readouterr().out == ""
    assert probes["backend"].keys() == {*BUILT_IN["backend"], "own", "slow", "talkative"}
    assert isinstance(probes["backend"]["slow"], Unusable)
    assert probes["backend"]["own"] == Usable("always")
    several = select_backend(catalogue.backends, catalogue.broken, probes["backend"])
    assert str(several) == (
        "several backends can be used: own, talkative\n"
        "nothing says which of them to prefer\n"
        "choose with --backend own or --backend talkative"
    )
    twice = select_backend(catalogue.backends, catalogue.broken, probes["backend"], "dummy")
    assert twice.why == (
        "backend 'dummy' is offered by strata-dummy-duplicate 1.2 (duplicate) "
        "and by strata-dummy-good 1.2 (good)"
    )


@pytest.mark.parametrize(("taken", "left"), [("cpu", "reference"), ("reference", "cpu")])
def test_a_plugin_that_takes_a_built_in_name_costs_both_until_it_is_blocked(
    install, make_machine, taken, left
):
    from strata_dummy import records

    entry_points = install("good")
    good = entry_points[0].load()
    good.records = _Renaming(records, taken)
    catalogue = load_plugins(entry_points)
    assert names(catalogue)["backend"] == {left, "sim"}
    assert [item.distribution for item in catalogue.broken] == ["strata-core", "strata-dummy-good"]
    probes = probe_catalogue(catalogue, make_machine())
    refused = select_backend(catalogue.backends, catalogue.broken, probes["backend"])
    assert "strata-dummy-good 1.2" in refused.why
    assert refused.remedy == (
        f"repair, remove or block that plugin; go on without with --backend {left}"
    )
    blocked = load_plugins(entry_points, blocked=["strata-dummy-good"])
    assert names(blocked) == BUILT_IN
    assert blocked.broken == ()


class _Renaming:
    """`strata_dummy.records`, but every backend gets one name."""

    def __init__(self, records, name):
        self.allocator, self.source = records.allocator, records.source
        self.backend = lambda _: records.backend(name)
