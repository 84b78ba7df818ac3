"""Machine x installed plugins x flags -> the selection or the exact message, in every load order.

The plugins here are stand-ins that could compute: `red` and `blue` need an adapter of their vendor,
`window` takes the place of red's allocator under WSL. They load through real modules and hooks.
"""

from __future__ import annotations

import itertools
import sys
from importlib import metadata
from types import ModuleType

import pytest

from strata_core.hookspecs import hookimpl
from strata_core.interfaces import (
    AllocatorRecord,
    BackendRecord,
    SourceRecord,
    Unusable,
    Usable,
)
from strata_core.machine import Adapter
from strata_core.plugins import load_plugins, probe_catalogue
from strata_core.selection import Selection, select_allocator, select_backend, select_source

RED, BLUE = Adapter("0x00ed", "0x0001"), Adapter("0xb10e", "0x0001")

MACHINES = {
    "bare": {},
    "lean": {"observed": {"module:llvmlite": False}},
    "red": {"adapters": (RED,)},
    "blue": {"adapters": (BLUE,)},
    "both": {"adapters": (RED, BLUE)},
    "wsl": {"adapters": (RED,), "wsl": 2},
}


def needs(adapter: Adapter, what: str):
    def probe(machine):
        if adapter in (machine.adapters or ()):
            return Usable(f"{what} adapter")
        return Unusable(f"no {what} adapter", f"plug one in for {what}")

    return probe


def needs_wsl(machine):
    return Usable() if machine.wsl else Unusable("not WSL")


def build(context):
    raise AssertionError("selection builds nothing")


def _backend(name, probe, **fields):
    return BackendRecord(name=name, summary=name, api=(1, 0), probe=probe, build=build, **fields)


def _allocator(name, probe, **fields):
    return AllocatorRecord(name=name, summary=name, api=(1, 0), probe=probe, build=build, **fields)


def _source(name, probe, **fields):
    return SourceRecord(name=name, summary=name, api=(1, 0), probe=probe, build=build, **fields)


def anywhere(machine):
    return Usable()


PLUGINS = {
    "red": {
        "strata_backends": [_backend("red", needs(RED, "red"))],
        "strata_allocators": [_allocator("red-pinned", needs(RED, "red"), serves=("red",))],
    },
    "blue": {
        "strata_backends": [_backend("blue", needs(BLUE, "blue"))],
        "strata_allocators": [_allocator("blue-pinned", needs(BLUE, "blue"), serves=("blue",))],
    },
    "window": {
        "strata_allocators": [
            _allocator("window", needs_wsl, serves=("red",), supersedes=("red-pinned",))
        ],
    },
    "ruby": {"strata_backends": [_backend("ruby", needs(RED, "red"), supersedes=("red",))]},
    "twin": {"strata_backends": [_backend("red", needs(RED, "red"))]},
    "old": {"strata_backends": [_backend("ancient", anywhere, fallback=True)]},
    "network": {
        "strata_expert_sources": [
            _source("network", anywhere, claims=lambda form: form == "stream"),
        ],
    },
    "cable": {
        "strata_expert_sources": [
            _source("cable", needs(RED, "red"), claims=lambda form: form in ("stream", "gguf")),
        ],
    },
    "torn": ImportError("a library is missing"),
}


class _Distribution(metadata.Distribution):
    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename):
        described = f"Metadata-Version: 2.1\nName: strata-{self._name}\nVersion: 2.0\n"
        return described if filename == "METADATA" else None

    def locate_file(self, path):
        raise AssertionError("nothing is located")


def _hook(records):
    return hookimpl(lambda: list(records))


def entry_point(name: str, monkeypatch) -> metadata.EntryPoint:
    """A real entry point to a module made here, which gives the plugin's records by its hooks."""
    offered = PLUGINS[name]
    path = f"strata_table_{name}"
    if not isinstance(offered, Exception):
        module = ModuleType(path)
        for hook, records in offered.items():
            module.__dict__[hook] = _hook(records)
        monkeypatch.setitem(sys.modules, path, module)
    point = metadata.EntryPoint(name, path, "strata")
    return point._for(_Distribution(name))


NO_TORN = "strata-torn 2.0 (torn): ModuleNotFoundError: No module named 'strata_table_torn'"
TWINS = "backend 'red' is offered by strata-red 2.0 (red) and by strata-twin 2.0 (twin)"
NEITHER = "the fallback: blue: no blue adapter; red: no red adapter"
NO_LLVM = "cpu: the package llvmlite, which compiles the kernels, is not installed"
NO_RED = "the fallback: red: no red adapter; ruby: no red adapter"
ONLY_BACKEND = "the only backend usable here that is no fallback"
ONLY_ALLOCATOR = "the only allocator usable here"
CLAIMS = "it claims models of the form 'stream'"
NOT_SIM = "sim-pinned: serves sim, not red"
LISTS = "a plugin that is not installed may offer it; `strata plugins` lists what there is"

BACKENDS = [
    # machine, plugins, --backend -> name and because, or what / why / remedy
    ("bare", "", "auto", ("cpu", "the fallback: only fallbacks are installed")),
    ("bare", "", "cpu", ("cpu", "named by --backend")),
    ("bare", "", "reference", ("reference", "named by --backend")),
    ("lean", "", "auto", ("reference", f"the fallback: {NO_LLVM}")),
    ("lean", "", "cpu", (
        "backend 'cpu' cannot be used",
        "the package llvmlite, which compiles the kernels, is not installed",
        "pip install llvmlite; usable here: reference",
    )),
    ("lean", "red", "auto", ("reference", f"the fallback: {NO_LLVM}; red: no red adapter")),
    ("lean", "torn", "auto", (
        "no backend was chosen, because a plugin that may offer one did not load",
        NO_TORN,
        "repair, remove or block that plugin; go on without with --backend reference",
    )),
    ("bare", "red blue", "auto", ("cpu", NEITHER)),
    ("red", "red", "auto", ("red", ONLY_BACKEND)),
    ("red", "red blue", "auto", ("red", ONLY_BACKEND)),
    ("red", "red blue", "reference", ("reference", "named by --backend")),
    ("blue", "red blue window", "auto", ("blue", ONLY_BACKEND)),
    ("both", "red blue", "blue", ("blue", "named by --backend")),
    ("red", "red ruby", "auto", ("ruby", "usable here, and it supersedes red")),
    ("red", "red ruby", "red", ("red", "named by --backend")),
    ("bare", "red ruby", "auto", ("cpu", NO_RED)),
    ("red", "red torn", "auto", ("red", ONLY_BACKEND)),
    ("bare", "torn", "reference", ("reference", "named by --backend")),
    ("both", "red blue", "auto", (
        "several backends can be used: blue, red",
        "nothing says which of them to prefer",
        "choose with --backend blue or --backend red",
    )),
    ("bare", "old", "auto", (
        "several backends can be used: ancient, cpu",
        "all of them are fallbacks",
        "choose with --backend ancient or --backend cpu",
    )),
    ("bare", "torn", "auto", (
        "no backend was chosen, because a plugin that may offer one did not load",
        NO_TORN,
        "repair, remove or block that plugin; go on without with --backend cpu",
    )),
    ("blue", "red torn", "auto", (
        "no backend was chosen, because a plugin that may offer one did not load",
        NO_TORN,
        "repair, remove or block that plugin; go on without with --backend cpu",
    )),
    ("blue", "red", "red", (
        "backend 'red' cannot be used",
        "no red adapter",
        "plug one in for red; usable here: cpu, reference",
    )),
    ("red", "red", "rde", (
        "there is no backend 'rde'",
        "there are cpu, red, reference, sim",
        f"did you mean --backend red? {LISTS}",
    )),
    ("red", "red torn", "zzz", (
        "there is no backend 'zzz'",
        f"there are cpu, red, reference, sim; plugins that did not load: {NO_TORN}",
        LISTS,
    )),
    ("bare", "", "aut", (
        "there is no backend 'aut'",
        "there are cpu, reference, sim",
        f"did you mean --backend auto? {LISTS}",
    )),
    ("red", "red twin", "red", (
        "backend 'red' cannot be used",
        TWINS,
        "remove, update or block one of the plugins named",
    )),
    ("red", "red twin", "auto", (
        "no backend was chosen, because a plugin that may offer one did not load",
        f"strata-red 2.0 (red): {TWINS}; strata-twin 2.0 (twin): {TWINS}",
        "repair, remove or block that plugin; go on without with --backend cpu",
    )),
    ("both", "red twin blue", "auto", ("blue", ONLY_BACKEND)),
]  # fmt: skip

ALLOCATORS = [
    # machine, plugins, backend chosen, --allocator -> as above
    ("bare", "red blue window", "cpu", "auto", ("host", ONLY_ALLOCATOR)),
    ("bare", "red blue window", "reference", "auto", ("host", ONLY_ALLOCATOR)),
    ("red", "red blue window", "red", "auto", ("red-pinned", ONLY_ALLOCATOR)),
    ("wsl", "red blue window", "red", "auto", (
        "window",
        "usable here, and it supersedes red-pinned",
    )),
    ("wsl", "red blue window", "red", "red-pinned", ("red-pinned", "named by --allocator")),
    ("wsl", "red blue window", "cpu", "auto", ("host", ONLY_ALLOCATOR)),
    ("wsl", "red blue window", "reference", "auto", ("host", ONLY_ALLOCATOR)),
    ("red", "red window", "red", "window", (
        "allocator 'window' cannot be used",
        "not WSL",
        "usable here: red-pinned",
    )),
    ("both", "red blue", "red", "host", (
        "allocator 'host' cannot be used",
        "it serves cpu, reference, not red",
        "use --allocator auto, or one of red-pinned",
    )),
    ("red", "ruby", "ruby", "auto", (
        "no allocator that serves ruby can be used on this machine",
        "host: serves cpu, reference, not ruby; sim-pinned: serves sim, not ruby",
        "install a plugin that offers one; `strata plugins` lists what there is",
    )),
    ("red", "ruby torn", "ruby", "auto", (
        "no allocator was chosen, because a plugin that may offer one did not load",
        NO_TORN,
        "repair, remove or block that plugin; then try again",
    )),
    ("bare", "red", "red", "auto", (
        "no allocator that serves red can be used on this machine",
        f"host: serves cpu, reference, not red; red-pinned: no red adapter; {NOT_SIM}",
        "red-pinned: plug one in for red",
    )),
]  # fmt: skip

SOURCES = [
    # machine, plugins, --source, the model's form, the planner's choice -> as above
    ("bare", "", "auto", "gguf", "arena", ("arena", "it fits")),
    ("bare", "", "mmap", "gguf", "arena", ("mmap", "named by --source")),
    ("bare", "network", "auto", "gguf", "mmap", ("mmap", "it fits")),
    ("bare", "network", "network", "gguf", "arena", ("network", "named by --source")),
    ("bare", "network", "auto", "stream", None, ("network", CLAIMS)),
    ("bare", "network cable", "auto", "stream", None, ("network", CLAIMS)),
    ("red", "cable", "auto", "gguf", "arena", ("cable", "it claims models of the form 'gguf'")),
    ("bare", "cable", "auto", "gguf", "arena", ("arena", "it fits")),
    ("red", "network cable", "auto", "stream", None, (
        "several sources can be used: cable, network",
        "each claims models of the form 'stream'",
        "choose with --source cable or --source network",
    )),
    ("bare", "cable", "auto", "stream", None, (
        "no source reads models of the form 'stream'",
        "cable: no red adapter",
        "cable: plug one in for red",
    )),
    ("bare", "torn", "auto", "stream", None, (
        "no source reads models of the form 'stream'",
        f"plugins that did not load: {NO_TORN}",
        "install the plugin that this form of model came from",
    )),
    ("bare", "", "torrent", "gguf", "arena", (
        "there is no source 'torrent'",
        "there are arena, mmap, sliced-pinned, tiered-file",
        LISTS,
    )),
]  # fmt: skip


def check(result, expected):
    if len(expected) == 2:
        assert isinstance(result, Selection), str(result)
        assert (result.name, result.because) == expected
    else:
        assert not isinstance(result, Selection), str(result)
        assert (result.what, result.why, result.remedy) == expected
        assert result.exit_code == 2


def in_every_order(plugins, monkeypatch, machine):
    points = [entry_point(name, monkeypatch) for name in plugins.split()]
    for order in itertools.permutations(points):
        catalogue = load_plugins(order)
        yield catalogue, probe_catalogue(catalogue, machine)


@pytest.mark.parametrize(("where", "plugins", "flag", "expected"), BACKENDS)
def test_backend(where, plugins, flag, expected, monkeypatch, make_machine):
    machine = make_machine(**MACHINES[where])
    for catalogue, probes in in_every_order(plugins, monkeypatch, machine):
        result = select_backend(catalogue.backends, catalogue.broken, probes["backend"], flag)
        check(result, expected)


@pytest.mark.parametrize(("where", "plugins", "backend", "flag", "expected"), ALLOCATORS)
def test_allocator(where, plugins, backend, flag, expected, monkeypatch, make_machine):
    machine = make_machine(**MACHINES[where])
    for catalogue, probes in in_every_order(plugins, monkeypatch, machine):
        answers = probes["allocator"]
        check(
            select_allocator(catalogue.allocators, catalogue.broken, answers, backend, flag),
            expected,
        )


@pytest.mark.parametrize(("where", "plugins", "flag", "form", "planned", "expected"), SOURCES)
def test_source(where, plugins, flag, form, planned, expected, monkeypatch, make_machine):
    machine = make_machine(**MACHINES[where])
    for catalogue, probes in in_every_order(plugins, monkeypatch, machine):
        answers = probes["source"]
        choice = select_source(catalogue.sources, catalogue.broken, answers, flag, form)
        check(choice.final(planned, "it fits"), expected)
