"""Models on a device against the CPU backend: the bits of all logits, for every lane, and times.

Each model runs with its experts on the CPU, half in slots, all in slots (one graph a round), and
with misses over the link from pinned memory; in windows, and in chunks of prompts. Prints a line
for each and leaves with 1 if one differs. Where the device has an order of its own for prompts,
chunks are compared with the first ones. The times are of decode rounds of one token, for
orientation.

Run: python tests/device/check_models.py MODEL... [--on sim] [--tokens N] [--cache FOLDER]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda")]

from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402
from strata_core.interfaces import (  # noqa: E402
    AllocatorContext,
    BackendContext,
    Limits,
    Window,
)
from strata_core.kernels.cpu.backend import build as build_cpu  # noqa: E402
from strata_core.kernels.device.backend import DeviceBackend  # noqa: E402
from strata_core.machine import read_machine  # noqa: E402
from strata_core.memory.pinned import build as build_pinned  # noqa: E402
from strata_core.model.build import build_program  # noqa: E402
from strata_core.sources.arena import Arena  # noqa: E402
from strata_core.sources.mmap import MappedFile  # noqa: E402

LIMITS = Limits(tokens=64, logits=64, context=1024, kv_type="fp16")


class Quiet:
    """Progress that nobody watches."""

    def start(self, label, nbytes):
        pass

    def advance(self, nbytes):
        pass

    def done(self):
        pass


def window(ids, start, slot, kind="window"):
    """The window of some ids, all logits wanted."""
    ids = np.asarray(ids, np.int32)
    count = len(ids)
    positions = np.arange(start, start + count, dtype=np.int32)
    rows = np.arange(count, dtype=np.int32)
    return Window(
        ids=ids,
        positions=positions,
        slots=np.full(count, slot, np.int32),
        logits_rows=rows,
        kernel_class=kind,
    )


def run(executor, ids, size, rounds, kind="window"):
    """(logits of all positions, median milliseconds of a round of one token)."""
    slot = executor.open_sequence()
    rows = [
        executor.run(window(ids[i : i + size], i, slot, kind)).copy()
        for i in range(0, len(ids), size)
    ]
    times = []
    for i in range(rounds):
        start = time.perf_counter()
        executor.run(window(ids[i : i + 1], len(ids) + i, slot))
        times.append(time.perf_counter() - start)
    executor.close_sequence(slot)
    return np.concatenate(rows), float(np.median(times)) * 1e3 if times else 0.0


def device_backend(context, on):
    """The backend on this machine's CUDA device, or on the simulated one."""
    if on == "sim":
        from strata_core.testing.sim_backend import build

        return build(context)
    from strata_cuda.build import runtime_of

    return DeviceBackend(runtime_of(context), context)


def variants(checkpoint):
    """(what, options, whether the experts lie in a pinned arena)."""
    experts = checkpoint.experts
    total = experts.count * len(experts.layouts)
    yield "all on the CPU", {"expert_cache": 0}, False
    yield "half in slots", {"expert_cache": total // 2}, False
    yield "all in slots", {"expert_cache": total}, False
    yield "all over the link", {"expert_cache": 0, "pcie_frac": 1.0}, True
    yield "half, then the link", {"expert_cache": total // 2, "pcie_frac": 1.0}, True
    yield "a quarter, link and CPU", {"expert_cache": total // 4, "pcie_frac": 0.5}, True


class Check:
    """One model: what the CPU gives, and what each variant gives."""

    def __init__(self, path, asked):
        self.checkpoint, self.asked = open_checkpoint(path), asked
        self.program = build_program(self.checkpoint.hyper)
        rng = np.random.default_rng(1)
        self.ids = rng.integers(3, self.checkpoint.hyper.vocabulary, asked.tokens).astype(np.int32)

    def context(self, **options):
        """What a backend is built from."""
        options = {"cache_dir": str(self.asked.cache), **options}
        options.setdefault("threads", max(1, (os.cpu_count() or 2) - 2))
        return BackendContext(
            machine=read_machine(),
            options=options,
            degrade=lambda d: print(f"    {d}"),
        )

    def bound(self, backend, source):
        """An executor for the model."""
        experts = self.checkpoint.experts
        return backend.bind(self.program, self.checkpoint, experts, source, LIMITS, Quiet())

    def cpu(self):
        """Logits of the CPU backend."""
        backend = build_cpu(self.context())
        executor = self.bound(backend, MappedFile(self.checkpoint.experts))
        try:
            return run(executor, self.ids, 8, self.asked.rounds)
        finally:
            executor.close()
            backend.close()

    def device(self, options, pinned, size, kind):
        """Logits of a variant, in windows of `size`, of the kernels' class `kind`.

        With its times, and whether the order of such windows is the backend's own.
        """
        context = self.context(**options)
        backend = device_backend(context, self.asked.on)
        executor = source = allocator = None
        try:
            backend.open_contexts()
            if pinned:
                more = {"options": context.options, "degrade": context.degrade}
                allocator = build_pinned(
                    AllocatorContext(machine=context.machine, backend=backend, **more)
                )
                source = Arena(self.checkpoint.experts, allocator, Quiet())
            else:
                source = MappedFile(self.checkpoint.experts)
            executor = self.bound(backend, source)
            own = kind == "prompt" and backend.capabilities.own_order
            return *run(executor, self.ids, size, self.asked.rounds, kind), own
        finally:
            for thing in (executor, source, allocator, backend):
                if thing is not None:
                    thing.close()


def check(path, asked) -> int:
    """Run a model's variants; how many differ from the CPU, or the first of their own order."""
    mine, wrong = Check(path, asked), 0
    cpu, ms = mine.cpu()
    first = None
    print(f"{path}: CPU {digest(cpu)}, {ms:.2f} ms a round", flush=True)
    for what, options, pinned in variants(mine.checkpoint):
        for size, kind in (*((n, "window") for n in (1, 5, 8)), (7, "prompt"), (64, "prompt")):
            label = f"  {what}, {kind}s of {size}"
            try:
                got, ms, own = mine.device(options, pinned, size, kind)
            except StrataError as error:
                wrong += 1
                print(f"{label}: {' | '.join(str(error).splitlines())}", flush=True)
                continue
            if own and first is None:
                first = got
            wanted = first if own else cpu
            equal = got.tobytes() == wanted.tobytes()
            wrong += not equal
            say = "equal" if equal else f"DIFFERS from row {first_row(got, wanted)}: {digest(got)}"
            say += ", in an order of its own" if own else ""
            print(f"{label}: {say}, {ms:.2f} ms a round", flush=True)
    return wrong


def digest(logits):
    """The first bytes of the hash of all logits."""
    return hashlib.sha256(logits.astype("<f4").tobytes()).hexdigest()[:12]


def first_row(got, wanted):
    """The first position whose logits differ."""
    return int(np.flatnonzero((got.view(np.uint32) != wanted.view(np.uint32)).any(1))[0])


def main() -> int:
    """Parse and run."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("models", nargs="+", type=Path)
    options.add_argument("--on", choices=("cuda", "sim"), default="cuda")
    options.add_argument("--tokens", type=int, default=40)
    options.add_argument("--rounds", type=int, default=64)
    options.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "strata-check")
    asked = options.parse_args()
    wrong = sum(check(path, asked) for path in asked.models)
    print(f"{wrong} runs differ or failed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
