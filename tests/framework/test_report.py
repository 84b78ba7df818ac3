"""What `strata plugins` shows: every member, for choices and for errors."""

from __future__ import annotations

import json

from strata_core import __version__
from strata_core.interfaces import API, Unusable
from strata_core.plugin_report import report_plugins
from strata_core.plugins import load_plugins, probe_catalogue
from strata_core.selection import select_allocator, select_backend, select_source


def report(catalogue, machine, backend="auto"):
    probes = probe_catalogue(catalogue, machine)
    probes["backend"]["dummy"] = Unusable("no card", "buy one")
    selections = {
        "backend": select_backend(catalogue.backends, catalogue.broken, probes["backend"], backend),
        "allocator": select_allocator(
            catalogue.allocators, catalogue.broken, probes["allocator"], "cpu"
        ),
        "source": select_source(
            catalogue.sources, catalogue.broken, probes["source"], "auto", "gguf"
        ).final("mmap", "it fits"),
    }
    return report_plugins(catalogue, selections, probes)


def test_offers_selections_and_blocked_names(install, make_machine):
    entry_points = [*install("good"), *install("exits")]
    shown = report(load_plugins(entry_points, blocked=["exits"]), make_machine())
    assert json.loads(json.dumps(shown)) == shown
    assert shown["api"] == list(API)
    assert shown["backends"][1] == {
        "name": "dummy",
        "summary": "A dummy",
        "distribution": "strata-dummy-good",
        "version": "1.2",
        "api": [1, 0],
        "supersedes": [],
        "fallback": False,
        "automatic": True,
        "usable": False,
        "reason": "no card",
        "hint": "buy one",
        "selected": False,
    }
    host = next(item for item in shown["allocators"] if item["name"] == "host")
    assert (host["serves"], host["usable"], host["detail"]) == (
        ["cpu", "reference"],
        True,
        "linux x86_64",
    )
    assert [item["name"] for item in shown["sources"] if item["selected"]] == ["mmap"]
    assert shown["selections"]["backend"] == {
        "role": "backend",
        "name": "cpu",
        "distribution": "strata-core",
        "version": __version__,
        "because": "the fallback: dummy: no card",
        "runners_up": [
            {"name": "dummy", "reason": "no card"},
            {"name": "reference", "reason": "superseded by cpu"},
            {"name": "sim", "reason": "used only where --backend names it"},
        ],
        "notice": "backend cpu, the fallback: dummy: no card",
    }
    assert shown["blocked"] == [{"name": "exits", "entry_points": ["strata-dummy-exits: exits"]}]
    assert shown["broken"] == []


def test_an_error_takes_the_place_of_its_selection(install, make_machine):
    catalogue = load_plugins([*install("good"), *install("wrong_api")])
    shown = report(catalogue, make_machine(), "from-the-future")
    error = shown["selections"]["backend"]["error"]
    assert error["type"] == "SelectionError"
    assert error["what"] == "backend 'from-the-future' cannot be used"
    assert "written for interface version 2.0" in error["why"]
    assert not any(item["selected"] for item in shown["backends"])
    (broken,) = shown["broken"]
    assert broken["offered"] == [{"role": "backend", "name": "from-the-future"}]
    assert (broken["stage"], broken["trace"]) == ("api", "")


def test_a_probe_that_fails_and_a_plugin_that_does_not_load(install, make_machine):
    entry_points = [*install("bad_probes"), *install("import_error")]
    shown = report(load_plugins(entry_points, blocked=["nobody"]), make_machine(), "reference")
    by_name = {item["name"]: item for item in shown["backends"]}
    assert list(by_name) == sorted(by_name)
    assert by_name["raising"]["reason"] == "its probe raised ValueError: no such fact"
    assert by_name["raising"]["hint"] == "tell the authors of strata-dummy-bad-probes 1.2"
    (broken,) = shown["broken"]
    assert (broken["stage"], broken["offered"]) == ("import", [])
    assert broken["trace"].startswith("Traceback")
    assert shown["blocked"] == [{"name": "nobody", "entry_points": []}]


def test_auto_stops_where_a_plugin_did_not_load(install, make_machine):
    shown = report(load_plugins(install("import_error")), make_machine())
    error = shown["selections"]["backend"]["error"]
    assert error["what"].startswith("no backend was chosen, because a plugin")
    assert error["remedy"].endswith("--backend cpu")
    assert not any(item["selected"] for item in shown["backends"])
