"""Sources in memory, and a model bound for prompts whose copies and slots can be looked at."""

import hashlib

import numpy as np

from strata_core.interfaces import Expert, Limits, View, Window
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.pool import Pool
from strata_core.memory.address import address_of, bytes_at
from strata_core.model.build import build_program
from strata_core.sources.mmap import MappedFile

IDS = (np.arange(70) * 37 % 290 + 3).astype(np.int32)
EXPERTS, LAYERS = 8, 2


class Copied:
    """Every expert in memory of its own: page-locked or not, with addresses that hold or not."""

    def __init__(self, experts, runtime=None, *, apart=False):
        self.experts, self.runtime = experts, runtime
        self.mapped, self.held, self.begun, self.places = MappedFile(experts), [], [], {}
        self.read_into = self.mapped.read_into
        for layer, layout in experts.layouts.items():
            for index in range(experts.count):
                expert, places = Expert(layer, index), []
                gap = 512 if apart else 0
                base = self._take(layout.nbytes + 3 * gap)
                for n, part in enumerate(layout.parts):
                    data = experts.mapped(expert)[n]
                    places.append(base + part.offset + n * gap)
                    bytes_at(places[-1], part.nbytes)[:] = data
                self.places[expert] = tuple(places)

    def _take(self, nbytes):
        if self.runtime is not None:
            return self.runtime.host_alloc(nbytes)
        self.kept = [*getattr(self, "kept", []), np.zeros(nbytes, np.uint8)]
        return address_of(self.kept[-1])

    def begin_layer(self, layer, experts):
        self.begun.append((layer, tuple(experts)))

    def view(self, expert):
        self.held.append(expert)
        return View(self.places[expert], in_ram=True, dma=self.runtime is not None)

    def release(self, expert):
        self.held.remove(expert)

    def close(self):
        if self.runtime is not None:
            for places in self.places.values():
                self.runtime.host_free(places[0])


class Stable(Copied):
    """The same, and its addresses hold."""

    def addresses(self, layer):
        count = self.experts.count
        return np.array([self.places[Expert(layer, i)] for i in range(count)], np.uint64)


SOURCES = {
    "mapped": lambda experts, runtime: MappedFile(experts),
    "pageable": lambda experts, runtime: Stable(experts),
    "page-locked": Stable,
    "in three pieces": lambda experts, runtime: Stable(experts, runtime, apart=True),
    "held for a layer": Copied,
}


def chunk(ids, start=0, slot=0, rows=(), kind="prompt"):
    return Window(
        ids=np.asarray(ids, np.int32),
        positions=np.arange(start, start + len(ids), dtype=np.int32),
        slots=np.full(len(ids), slot, np.int32),
        logits_rows=np.asarray(rows, np.int32),
        kernel_class=kind,
    )


def answer(executor, size, ids=IDS, more=5):
    """Logits behind a prompt in chunks of `size`, and of greedy tokens after it."""
    slot = executor.open_sequence()
    for start in range(0, len(ids), size):
        piece = ids[start : start + size]
        rows = [len(piece) - 1] if start + size >= len(ids) else []
        logits = executor.run(chunk(piece, start, slot, rows))
    found = [logits[0].copy()]
    for number in range(more):
        token = int(found[-1].argmax())
        window = chunk([token], len(ids) + number, slot, [0], "window")
        found.append(executor.run(window)[0].copy())
    executor.close_sequence(slot)
    return hashlib.sha256(np.stack(found).astype("<f4").tobytes()).hexdigest()


class Bound:
    """A model on a simulated device for prompts, and what was copied on the prompts' stream."""

    def __init__(self, lab, checkpoint, size, source="page-locked", **options):
        self.lab = lab
        self.runtime = lab.runtime()
        self.runtime.open_context(0)
        self.source = SOURCES[source](checkpoint.experts, self.runtime)
        self.backend = lab.backend(self.runtime, **options)
        limits = Limits(tokens=size, logits=16, context=600, kv_type="fp16")
        self.executor = lab.bind(self.backend, checkpoint, self.source, limits)
        self.nbytes = max(x.nbytes for x in checkpoint.experts.layouts.values())
        self.stream = self.executor._prompts.bringing.stager.stream

    def copied(self):
        """Bytes on the prompts' stream so far, in blobs."""
        self.runtime.synchronize(self.stream)
        name = self.runtime.queues.streams[self.stream].name
        nbytes = self.runtime.account.streams[name].copied["host_to_device"]
        assert nbytes % self.nbytes == 0
        return nbytes // self.nbytes

    def slots(self):
        """Each slot's bytes against the file's."""
        pool = self.backend._placements[0].pool
        self.runtime.synchronize(self.stream)
        for expert, address in pool.places.items():
            for part, data in zip(
                self.executor._model.layouts[expert.layer].parts,
                self.executor._files.mapped(expert),
                strict=True,
            ):
                yield expert, (bytes_at(address + part.offset, part.nbytes) == data).all()

    def close(self):
        self.executor.close()
        self.source.close()
        self.lab.check_closed(self.backend)


def cpu_answer(library, checkpoint):
    """What the CPU answers."""
    program, experts = build_program(checkpoint.hyper), checkpoint.experts
    pool = Pool(library.compiler, 1)
    try:
        limits = Limits(tokens=512, logits=8, context=600, kv_type="fp16")
        source = MappedFile(experts)
        executor = CpuExecutor(program, checkpoint, experts, source, limits, library, pool)
        return answer(executor, 512)
    finally:
        pool.close()
