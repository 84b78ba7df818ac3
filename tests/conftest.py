"""Fixtures for every area of the tests."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Before numpy is loaded, here and in what tests start: threads of its matrix products that wait for
# each other on cores which other tests use take ten times as long as one thread does.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

from strata_core.config import cache_folder
from strata_core.machine import Machine
from strata_core.testing.machines import recorded_pc

REPOSITORY = Path(__file__).resolve().parent.parent

CACHE_VARIABLE = "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME"
SESSION = pytest.StashKey[Path]()
BYTECODE = pytest.StashKey[Path]()

# How long an example takes says how busy the machine is, not whether the property holds.
settings.register_profile("strata", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("strata")


def pytest_configure(config: pytest.Config) -> None:
    """Give the run a cache folder of its own, in which only compiled kernels are the user's.

    What a start learns (profiles, rates, limits) would otherwise reach later tests, and the user's
    own starts. On macOS the folder has no variable and stays the user's.
    """
    _keep_bytecode(config)
    users = cache_folder()
    own = Path(tempfile.mkdtemp(prefix="strata-tests-"))
    config.stash[SESSION] = own
    os.environ[CACHE_VARIABLE] = str(own)
    (own / "strata").mkdir()
    if users is not None and os.name != "nt":
        with suppress(OSError):  # a home that cannot be written to: kernels are compiled again
            (users / "kernels").mkdir(parents=True, exist_ok=True)
            (own / "strata" / "kernels").symlink_to(users / "kernels")


def _keep_bytecode(config: pytest.Config) -> None:
    """Where no bytecode may be written beside the sources, keep it in a folder of the run.

    Hundreds of processes that tests start would otherwise compile all that they import, each anew.
    The folder is for these alone, and the same for all workers of a run, whose parent removes it.
    """
    if not os.environ.get("PYTHONDONTWRITEBYTECODE"):
        return
    worker = hasattr(config, "workerinput")
    run = os.getppid() if worker else os.getpid()
    folder = Path(tempfile.gettempdir()) / f"strata-bytecode-{run}"
    if not worker:
        shutil.rmtree(folder, ignore_errors=True)  # of a run that was killed
        config.stash[BYTECODE] = folder
    if worker or not config.getoption("numprocesses", None):
        os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
        del os.environ["PYTHONDONTWRITEBYTECODE"]


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove the run's folders; the link in the one of the cache is not followed."""
    shutil.rmtree(config.stash[SESSION], ignore_errors=True)
    if BYTECODE in config.stash:
        shutil.rmtree(config.stash[BYTECODE], ignore_errors=True)


@pytest.fixture(autouse=True)
def _nothing_learned(request: pytest.FixtureRequest) -> None:
    """No test finds what another one's starts have learned."""
    for item in (request.config.stash[SESSION] / "strata").iterdir():
        if item.name != "kernels":
            shutil.rmtree(item, ignore_errors=True)


@pytest.fixture(scope="session")
def models() -> Path:
    """The folder with the reference models (kjv-moe/, tiny/); skips with the reason without it."""
    named = os.environ.get("STRATA_TEST_MODELS")
    folder = Path(named) if named else REPOSITORY.parent / "shared" / "models"
    if not folder.is_dir():
        pytest.skip(f"no reference models: {folder} is not there (set STRATA_TEST_MODELS)")
    return folder


@pytest.fixture(scope="session")
def compiled_kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of kernels that starts use, so that each is compiled once and not by each area.

    Their names are hashes of all that makes them. What is about compiling has a folder of its own.
    """
    folder = cache_folder() or tmp_path_factory.mktemp("compiled")
    return folder / "kernels"


@pytest.fixture
def make_machine():
    """make_machine(**facts): a replayed Linux PC without an adapter, but for the facts given.

    All that core depends on is installed there.
    """

    def make(observed: dict[str, object] | None = None, **facts: object) -> Machine:
        return recorded_pc({"module:llvmlite": True} if observed is None else observed, **facts)

    return make


@pytest.fixture
def units(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], float]], None]:
    """Matrix units for simulated devices, whose attention is the CPU's times what a call gives."""
    import numpy as np

    from strata_core.memory.address import bytes_at
    from strata_core.testing.sim import hardware, prompt_kernels

    init = hardware.SimHardware.__init__

    def with_units(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **{**given, "matrix": True})

    def have(shift: Callable[[], float]) -> None:
        def kernel(kernels: Any, a: Any, kv: str, head_dim: int) -> Callable[[], None]:
            plain = prompt_kernels.PROMPT_KERNELS["prompt_attention"](kernels, a, kv, head_dim)

            def ready() -> None:
                plain()
                nbytes = 4 * a.tokens * a.kv_heads * a.group * head_dim
                bytes_at(a.out, nbytes).view(np.float32)[:] *= np.float32(shift())

            return ready

        monkeypatch.setattr(hardware.SimHardware, "__init__", with_units)
        monkeypatch.setitem(prompt_kernels.PROMPT_KERNELS, "matrix_attention", kernel)

    return have


def pytest_terminal_summary(terminalreporter) -> None:
    """How many device kernels were compiled for whom, or why none were."""
    told = [
        value
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
        for name, value in getattr(report, "user_properties", ())
        if name == "compiled"
    ]
    for line in dict.fromkeys(told):
        terminalreporter.write_line(f"device kernels, {line}")
