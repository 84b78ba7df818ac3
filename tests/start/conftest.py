"""Starts of the built-in model on simulated devices, through the public interface."""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from attrs import evolve, frozen

from strata_core import api
from strata_core.engine import prepare as preparing
from strata_core.errors import StrataError
from strata_core.interfaces import AllocatorRecord, StartPolicy, Usable
from strata_core.machine.kernel_log import KEY
from strata_core.memory import pinned
from strata_core.plugins import Offer, load_plugins
from strata_core.testing import sim_backend

REPOSITORY = Path(__file__).parents[2]
MIB = 1 << 20
PROMPT = (5, 9, 3, 77, 12)
LINE = "misc dxgk: create_existing_sysmem: establish_gpadl failed: -122"

if importlib.util.find_spec("strata_wsl") is None and (REPOSITORY / "plugins/wsl").is_dir():
    sys.path.insert(0, str(REPOSITORY / "plugins/wsl"))


@frozen(eq=False)
class Outcome:
    """How a start ended: tokens and counters of a run, or its error; and what it ran on."""

    tokens: tuple[int, ...]
    error: StrataError | None
    degradations: tuple[str, ...]
    counters: dict[str, dict[str, int]]
    backends: list[object]
    threads: list[str]
    paths: tuple[str, ...] = ()

    @property
    def runtime(self):
        return self.backends[0].runtime

    def left(self) -> list[str]:
        """Everything that should be gone and is not."""
        found = list(self.threads)
        for backend in self.backends:
            runtime = backend.runtime
            found += [str(claim) for claim in backend.ledger.outstanding()]
            found += [] if runtime.closed else ["the runtime is open"]
            found += runtime.leaks()
            found += [f"breach: {item}" for item in runtime.breaches]
        return found


@pytest.fixture(scope="session")
def kernels(tmp_path_factory) -> Path:
    """The folder of compiled kernels, shared by all starts of a session."""
    return tmp_path_factory.mktemp("kernels")


def wsl_record(step: int) -> AllocatorRecord:
    """strata-wsl's record, made to serve the simulated devices, which it takes for others."""
    from strata_wsl.allocator import WslAllocator
    from strata_wsl.plugin import strata_allocators

    (record,) = strata_allocators()
    return evolve(
        record,
        serves=("sim",),
        supersedes=("sim-pinned",),
        build=lambda context: WslAllocator(context, context.backend.runtime, step),
    )


def policy_record(policy: StartPolicy) -> AllocatorRecord:
    """The usual allocator with another policy."""
    return AllocatorRecord(
        name="ordered",
        summary="The usual one with another policy",
        api=(1, 0),
        serves=("sim",),
        supersedes=("sim-pinned",),
        probe=lambda machine: Usable(),
        build=lambda context: pinned.build(context, policy),
    )


@pytest.fixture
def run(monkeypatch, kernels, make_machine, tmp_path) -> Iterator[object]:
    """run(allocator=None, hardware={}, facts={}, model="demo", during=None, **options): an Outcome.

    `during(model, backend)` is called before the tokens are asked for.
    """
    folder = tmp_path / "cache"
    folder.mkdir()
    (kernels / "kernels").mkdir(exist_ok=True)
    (folder / "kernels").symlink_to(kernels / "kernels")

    def call(
        allocator=None, hardware=None, facts=None, model="demo", tokens=12, during=None, **options
    ):
        backends: list[object] = []

        def build(context):
            backends.append(sim_backend.build(context, **(hardware or {})))
            return backends[-1]

        found = load_plugins([])
        sim = found.backend("sim")
        others = tuple(offer for offer in found.backends if offer.name != "sim")
        sim = evolve(sim, record=evolve(sim.record, build=build))
        # no real driver tells beforehand what it pins
        usual = found.allocator("sim-pinned")
        usual = evolve(usual, record=evolve(usual.record, pins=None))
        extra = (usual, Offer(allocator, "strata-test", "1.0")) if allocator else (usual,)
        found = evolve(found, backends=(*others, sim), allocators=(found.allocator("host"), *extra))
        monkeypatch.setattr(preparing, "load_plugins", lambda blocked=(): found)
        observed = {"module:llvmlite": True, "path:/dev/dxg": True, KEY: {"readable": False}}
        machine = make_machine(observed={**observed}, physical_cores=2, **(facts or {}))
        monkeypatch.setattr(api, "read_machine", lambda: machine)
        before = set(threading.enumerate())
        given = {"backend": "sim", "threads": 1, "cache_dir": folder, "ram_reserve_gib": 0.0}
        ids, error, degradations, counters, paths = (), None, (), {}, ()
        try:
            with api.load(model, **{**given, **options}) as loaded:
                if during is not None:
                    during(loaded, backends[0])
                events = list(loaded.generate(PROMPT, max_tokens=tokens, ignore_eos=True))
                ids = events[-1].token_ids
                degradations = tuple(item.what for item in loaded.degradations)
                paths = loaded.beside.actual.paths
                counters = {lane: dict(count) for lane, count in loaded.counters.items()}
        except StrataError as failure:
            error = failure
        left = [t.name for t in set(threading.enumerate()) - before if t.is_alive()]
        return Outcome(ids, error, degradations, counters, backends, left, paths)

    return call


@pytest.fixture
def wsl():
    """wsl(step): strata-wsl's record for the simulated devices, probing in such steps."""
    pytest.importorskip("strata_wsl", reason="strata-wsl is not here")
    return wsl_record


@pytest.fixture
def ordered():
    """ordered(policy): the usual allocator with another policy."""
    return policy_record


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """tiny(tied): a small checkpoint whose embedding is the output matrix too, or is not."""
    from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

    folder = tmp_path_factory.mktemp("tiny")

    def make(tied: bool) -> Path:
        path = folder / f"{tied}.gguf"
        if not path.exists():
            write_tiny_gguf(path, hyper=tiny_hyper(tied=tied))
        return path

    return make
