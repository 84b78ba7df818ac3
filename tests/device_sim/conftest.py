"""Models bound to the simulated accelerator and, beside it, to the CPU."""

import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from strata_core.checkpoint.open import open_checkpoint
from strata_core.interfaces import BackendContext, Limits, Window
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.target import host_target
from strata_core.kernels.device.backend import DeviceBackend
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile
from strata_core.testing.machines import recorded_pc
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers
from strata_core.testing.sim.host_kernels import HostKernels

sys.path.insert(0, str(Path(__file__).resolve().parent))  # the bench of prompts stands there

LIMITS = Limits(tokens=40, logits=40, context=600, kv_type="fp16")
IDS = (np.arange(24) * 37 % 290 + 3).astype(np.int32)


class Quiet:
    """Progress that nobody watches, remembered."""

    def __init__(self):
        self.labels = []

    def start(self, label, nbytes):
        self.labels.append(label)

    def advance(self, nbytes):
        pass

    def done(self):
        pass


def make_window(ids, start=0, slot=0, rows=None):
    ids = np.asarray(ids, np.int32)
    rows = np.arange(len(ids)) if rows is None else rows
    return Window(
        ids=ids,
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        slots=np.full(len(ids), slot, np.int32),
        logits_rows=np.asarray(rows, np.int32),
        kernel_class="window",
    )


class Lab:
    """Binds checkpoints; everything it makes is closed and looked through for leaks."""

    def __init__(self, library):
        self.library = library
        self.degradations = []

    def runtime(self, **hardware):
        hardware.setdefault("vram", (1 << 30,) * 3)
        faults = hardware.pop("faults", None)
        return SimRuntime(
            SimHardware(**hardware),
            host_kernels=HostKernels(self.library).mapping(),
            faults=faults,
            pointers=pointers,
        )

    quiet = Quiet

    def backend(self, runtime=None, *, patience=120.0, most_tokens=8, bound=60.0, **options):
        options.setdefault("threads", 1)
        options.setdefault("expert_cache", 0)
        context = BackendContext(
            machine=recorded_pc({"module:llvmlite": True}),
            options=options,
            degrade=self.degradations.append,
        )
        return DeviceBackend(
            runtime or self.runtime(),
            context,
            library=self.library,
            patience=patience,
            most_tokens=most_tokens,
            bound=bound,
        )

    def bind(self, backend, checkpoint, source=None, limits=LIMITS, hyper=None):
        return backend.bind(
            build_program(hyper or checkpoint.hyper),
            checkpoint,
            checkpoint.experts,
            source or MappedFile(checkpoint.experts),
            limits,
            Quiet(),
        )

    def cpu(self, checkpoint, limits=LIMITS, ids=IDS, hyper=None):
        """The CPU's logits of all positions."""
        program = build_program(hyper or checkpoint.hyper)
        source = MappedFile(checkpoint.experts)
        pool = Pool(self.library.compiler, 1)
        try:
            executor = CpuExecutor(
                program, checkpoint, checkpoint.experts, source, limits, self.library, pool
            )
            return self.logits(executor, ids)
        finally:
            pool.close()

    def logits(self, executor, ids=IDS, size=None):
        """Logits of all positions, in windows of `size`."""
        slot = executor.open_sequence()
        size = size or len(ids)
        rows = [
            executor.run(make_window(ids[i : i + size], start=i, slot=slot)).copy()
            for i in range(0, len(ids), size)
        ]
        executor.close_sequence(slot)
        return np.concatenate(rows)

    def check_closed(self, backend, executor=None):
        """Close, and find nothing left, nothing misused."""
        if executor is not None:
            executor.close()
        assert backend.ledger.outstanding() == ()
        assert list(backend.runtime.leaks()) == []
        backend.close()
        assert backend.runtime.breaches == []


@pytest.fixture(scope="session")
def library(compiled_kernels):
    return Library(Compiler(host_target(), compiled_kernels, print))


@pytest.fixture
def lab(library):
    return Lab(library)


@pytest.fixture(scope="session")
def tools():
    class Tools:
        window = staticmethod(make_window)
        limits, ids, quiet = LIMITS, IDS, Quiet

    return Tools


@pytest.fixture(scope="session")
def tiny_file(tmp_path_factory):
    """tiny_file(**changes): a checkpoint with those, written once, open until the end."""
    from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

    folder = tmp_path_factory.mktemp("tiny")
    made = {}

    def make(hyper=None, **changes):
        key = repr((hyper, sorted(changes.items())))
        if key not in made:
            path = folder / f"{len(made)}.gguf"
            write_tiny_gguf(path, hyper=tiny_hyper(**(hyper or {})), **changes)
            made[key] = open_checkpoint(path)
        return made[key]

    yield make
    for checkpoint in made.values():
        with closing(checkpoint):
            pass


@pytest.fixture(scope="module")
def expected(library, tiny_file):
    """What the CPU answers to the bench's prompt, once."""
    from prompt_bench import cpu_answer

    return cpu_answer(library, tiny_file())
