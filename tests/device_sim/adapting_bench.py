"""A model on simulated devices whose cache follows the text, with a source of any kind."""

import numpy as np

from strata_core.interfaces import AllocatorContext, SourceContext
from strata_core.memory import pinned
from strata_core.model.build import build_program
from strata_core.sources import arena, sliced_pinned
from strata_core.sources.mmap import MappedFile
from strata_core.testing.machines import recorded_pc

SOURCES = {
    "mmap": (None, {}),
    "arena": (arena, {}),
    "resident": (sliced_pinned, {"complement_pin_gib": "all"}),
    "resident, a part page-locked": (sliced_pinned, {"complement_pin_gib": 0.0006}),
    "resident, pageable": (sliced_pinned, {"complement_pin_gib": 0}),
    "resident, a part of them": (sliced_pinned, {"resident_budget_gib": 0.0008}),
}
TEXT = np.array([7, 9, 7, 11] * 5 + [200, 201, 200, 203] * 5, np.int32)
"""Two parts that ask for few experts each, and not for the same ones."""


class Bound:
    """A model on simulated devices with a source of its own kind; `close` looks for leaks."""

    def __init__(self, lab, tools, checkpoint, kind="mmap", runtime=None, **options):
        module, more = SOURCES[kind]
        options = {"adapt_every": 1, "adapt_swaps": 96, "tier_verify": True, **more, **options}
        self.lab, self.checkpoint = lab, checkpoint
        self.backend = lab.backend(runtime, **options)
        self.source, self.allocator = MappedFile(checkpoint.experts), None
        self.backend.open_contexts()
        placement = self.backend.prepare(
            build_program(checkpoint.hyper),
            checkpoint,
            checkpoint.experts,
            tools.limits,
            tools.quiet(),
        )
        try:
            placement.take_small_pins()
            placement.make_cache()
            placement.make_helpers()
            if module is not None:
                self.allocator = self._allocator(options)
                self.source = module.build(self._context(placement, options, tools))
            self.executor = lab.bind(self.backend, checkpoint, self.source)
        except BaseException:
            placement.close()
            self._close_source()
            raise

    def _allocator(self, options):
        machine = recorded_pc({"module:llvmlite": True})
        return pinned.build(
            AllocatorContext(
                machine=machine,
                options=options,
                degrade=self.lab.degradations.append,
                backend=self.backend,
            )
        )

    def _context(self, placement, options, tools):
        return SourceContext(
            machine=recorded_pc({"module:llvmlite": True}),
            options=options,
            degrade=self.lab.degradations.append,
            experts=self.checkpoint.experts,
            allocator=self.allocator,
            progress=tools.quiet(),
            excluded=placement.resident,
        )

    def logits(self, ids=TEXT, size=1):
        return self.lab.logits(self.executor, ids, size)

    def _close_source(self):
        self.source.close()
        if self.allocator is not None:
            self.allocator.close()

    def close(self):
        self.executor.close()
        self._close_source()
        self.lab.check_closed(self.backend)
