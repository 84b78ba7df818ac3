"""A recorded machine gives every plugin the answers it had, so that the same record is chosen."""

from __future__ import annotations

import importlib
import json
import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType

import pytest

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import AllocatorRecord, BackendRecord, Unusable, Usable
from strata_core.machine import Machine, read_machine
from strata_core.plugins import load_plugins, probe_catalogue
from strata_core.selection import select_allocator, select_backend

PLUGINS = Path(__file__).parents[2] / "plugins"
VENDORS = ("cuda", "hip", "wsl")

pytestmark = pytest.mark.skipif(
    not PLUGINS.is_dir(), reason="a source distribution of core has no plugins folder"
)


class Card:
    """A backend and its allocator, usable where the stand-in driver counts devices."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.asked = 0

    def ask(self):
        self.asked += 1
        return {"devices": self.devices, "versions": (12, 8)}

    def probe(self, machine):
        answer = machine.observe("card:driver", self.ask)
        if answer is None:
            return Unusable("not recorded")
        if not answer["devices"]:
            return Unusable("no device")
        return Usable(f"{answer['devices']} devices, {answer['versions']}")

    def plugin(self) -> ModuleType:
        module = ModuleType("strata_card")
        common = {"summary": "A card", "api": (1, 0), "probe": self.probe, "build": self.ask}
        records = {
            "strata_backends": [BackendRecord(name="card", **common)],
            "strata_allocators": [AllocatorRecord(name="card-memory", serves=("card",), **common)],
        }
        for hook, offered in records.items():
            module.__dict__[hook] = hookimpl(lambda offered=offered: list(offered))
        return module


@pytest.fixture
def entry_points(monkeypatch):
    """entry_points(card): those of the card and of the three vendor plugins of the repository."""

    def make(card: Card) -> list[metadata.EntryPoint]:
        monkeypatch.setitem(sys.modules, "strata_card", card.plugin())
        for name in VENDORS:
            monkeypatch.syspath_prepend(str(PLUGINS / name))
        names = {"card": "strata_card", **{name: f"strata_{name}.plugin" for name in VENDORS}}
        return [metadata.EntryPoint(name, path, "strata") for name, path in names.items()]

    return make


def survey(catalogue, machine):
    probes = probe_catalogue(catalogue, machine)
    backend = select_backend(catalogue.backends, catalogue.broken, probes["backend"])
    allocator = select_allocator(
        catalogue.allocators, catalogue.broken, probes["allocator"], backend.name
    )
    return probes, backend, allocator


@pytest.mark.parametrize(("devices", "chosen"), [(2, "card"), (0, "cpu")])
def test_the_recorded_machine_gives_the_same_answers_and_choice(entry_points, devices, chosen):
    card = Card(devices)
    catalogue = load_plugins(entry_points(card))
    assert catalogue.broken == ()
    here = read_machine()
    live = survey(catalogue, here)
    assert live[1].name == chosen
    asked = card.asked
    assert asked >= 1

    replayed = Machine.from_json(json.loads(json.dumps(here.to_json())))
    card.devices = 7
    assert survey(catalogue, replayed) == live
    assert card.asked == asked


def test_what_was_not_recorded_is_a_no_and_not_a_look_at_this_computer(entry_points, make_machine):
    card = Card(2)
    probes, backend, _ = survey(load_plugins(entry_points(card)), make_machine())
    assert card.asked == 0
    assert probes["backend"]["card"] == Unusable("not recorded")
    assert backend.name == "cpu"


@pytest.mark.parametrize("name", VENDORS)
def test_the_vendor_plugins_leave_only_json_in_a_machine(entry_points, name):
    entry_points(Card(0))
    plugin = importlib.import_module(f"strata_{name}.plugin")
    here = read_machine()
    hooks = [getattr(plugin, hook, list) for hook in ("strata_backends", "strata_allocators")]
    answers = [record.probe(here) for hook in hooks for record in hook()]
    assert answers
    assert all(isinstance(answer, Unusable) and answer.reason for answer in answers)
    assert json.loads(json.dumps(here.to_json(), allow_nan=False)) == here.to_json()
