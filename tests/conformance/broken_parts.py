"""Parts that are broken in one way each, for `test_suites_find.py`; no test runs them by itself.

Each class says in `FOUND_BY` which test of its suite must fail.
"""

from __future__ import annotations

import time

import numpy as np
from attrs import evolve

from strata_core.errors import StrataError
from strata_core.interfaces import Capabilities, Expert, Region, Span, View
from strata_core.kernels.exact_kernels import EXACT_KERNELS, matrices
from strata_core.kernels.interpreter import Interpreter
from strata_core.memory.address import bytes_at
from strata_core.memory.host import HostAllocator
from strata_core.sources import sliced_pinned
from strata_core.sources.arena import Arena
from strata_core.testing.conformance import AllocatorSuite, BackendSuite, SourceSuite

# --- sources -----------------------------------------------------------------------------------


class Wrapped:
    """A sound arena, so that a fake breaks one thing only."""

    def __init__(self, context):
        self.experts = context.experts
        self.arena = Arena(context.experts, context.allocator, context.progress)

    def begin_layer(self, layer, experts):
        self.arena.begin_layer(layer, experts)

    def view(self, expert):
        return self.arena.view(expert)

    def read_into(self, expert, buffer):
        return self.arena.read_into(expert, buffer)

    def release(self, expert):
        self.arena.release(expert)

    def close(self):
        self.arena.close()

    def size(self, expert):
        return self.experts.layouts[expert.layer].nbytes


class WrongBytesInOneExpert(SourceSuite):
    FOUND_BY = "test_a_view_has_the_files_bytes"

    class Source(Wrapped):
        def __init__(self, context):
            super().__init__(context)
            bytes_at(self.arena.view(Expert(1, 3)).parts[1], 1)[0] ^= 1

    def make(self, context):
        return self.Source(context)


class PointerReusedBeforeRelease(SourceSuite):
    FOUND_BY = "test_experts_of_a_layer_hold_their_bytes_together"

    class Source(Wrapped):
        def __init__(self, context):
            super().__init__(context)
            self.buffer = bytearray(max(map(self.size, [Expert(n, 0) for n in range(3)])))

        def view(self, expert):
            layout = self.experts.layouts[expert.layer]
            self.arena.view(expert)
            self.arena.read_into(expert, memoryview(self.buffer))
            start = np.frombuffer(self.buffer, np.uint8).ctypes.data
            return View(tuple(start + p.offset for p in layout.parts), in_ram=True)

    def make(self, context):
        return self.Source(context)


class BufferFreedAtTheFirstOfTwoReleases(SourceSuite):
    FOUND_BY = "test_acquiring_twice_needs_two_releases"

    class Source(Wrapped):
        def __init__(self, context):
            super().__init__(context)
            self.held = {}

        def view(self, expert):
            self.arena.view(expert)
            if expert not in self.held:
                self.held[expert] = np.zeros(self.size(expert), np.uint8)
                self.arena.read_into(expert, self.held[expert].data)
            start = self.held[expert].ctypes.data
            parts = self.experts.layouts[expert.layer].parts
            return View(tuple(start + p.offset for p in parts), in_ram=True)

        def release(self, expert):
            self.held.pop(expert)[:] = 0xDD

    def make(self, context):
        return self.Source(context)


class AliasAcrossTwoSpans(SourceSuite):
    FOUND_BY = "test_an_alias_lies_in_one_span"

    class Source(Wrapped):
        def __init__(self, context):
            super().__init__(context)
            self.first = context.allocator.given[0].spans[0]

        def view(self, expert):
            view = self.arena.view(expert)
            if self.first.alias is None:
                return view
            distance = self.first.alias - self.first.address
            return evolve(view, alias=view.parts[0] + distance, dma=True)

    def make(self, context):
        return self.Source(context)


class CutBetweenParts:
    """An allocator whose pieces of memory end between the gate and the up of a blob."""

    def __init__(self, allocator, gate):
        self.allocator, self.gate, self.release = allocator, gate, allocator.release

    def reserve(self, nbytes, cuts, purpose):
        return self.allocator.reserve(nbytes, [cut + self.gate for cut in cuts], purpose)


class CopyAcrossTwoSpans(SourceSuite):
    FOUND_BY = "test_an_alias_lies_in_one_span"

    class Source(Wrapped):
        def __init__(self, context):
            gate = context.experts.layouts[0].parts[0].nbytes
            allocator = CutBetweenParts(context.allocator, gate)
            super().__init__(evolve(context, allocator=allocator))

        def view(self, expert):
            return evolve(self.arena.view(expert), dma=True)

    def make(self, context):
        return self.Source(context)


class CopyIsNotThreadSafe(SourceSuite):
    FOUND_BY = "test_copies_from_many_threads_are_right"

    class Source(Wrapped):
        def read_into(self, expert, buffer):
            self.scratch = bytearray(self.size(expert))
            self.arena.read_into(expert, memoryview(self.scratch))
            time.sleep(0.001)
            buffer[: len(self.scratch)] = self.scratch[: len(buffer)]
            return 0

    def make(self, context):
        return self.Source(context)


class PadIsForgotten(SourceSuite):
    FOUND_BY = "test_a_copy_has_the_files_bytes_behind_its_pad"

    class Source(Wrapped):
        def read_into(self, expert, buffer):
            pad = 512
            self.arena.read_into(expert, buffer[pad:])
            return 0

    def make(self, context):
        return self.Source(context)


class LeaksOnRefusal(SourceSuite):
    FOUND_BY = "test_nothing_leaks_where_memory_is_refused"

    class Source(Wrapped):
        def __init__(self, context):
            self.extra = context.allocator.reserve(4096, [], "a first buffer")
            super().__init__(context)
            self.allocator = context.allocator

        def close(self):
            super().close()
            if self.extra is not None:
                self.allocator.release(self.extra)
            self.extra = None

    def make(self, context):
        return self.Source(context)


class KeepsMemoryAfterClose(SourceSuite):
    FOUND_BY = "test_everything_is_given_back"

    class Source(Wrapped):
        def close(self):
            pass

    def make(self, context):
        return self.Source(context)


class StableAddressesMove(SourceSuite):
    FOUND_BY = "test_addresses_hold_until_close"

    class Source(Wrapped):
        copies = ()

        def addresses(self, layer):
            table = self.arena.addresses(layer)
            for index in range(self.experts.count):
                copy = np.zeros(self.size(Expert(layer, index)), np.uint8)
                self.arena.read_into(Expert(layer, index), copy.data)
                self.copies = (*self.copies, copy)
                parts = self.experts.layouts[layer].parts
                table[index] = [copy.ctypes.data + p.offset for p in parts]
            return table

    def make(self, context):
        return self.Source(context)


class Moving:
    """The resident experts, so that a fake breaks one rule of moves only."""

    def __init__(self, context):
        self.experts = context.experts
        self.real = sliced_pinned.build(context)
        for name in ("begin_layer", "view", "addresses", "read_into", "release", "close"):
            setattr(self, name, getattr(self.real, name))

    def begin_demote(self, expert):
        return self.real.begin_demote(expert)

    def begin_promote(self, expert):
        return self.real.begin_promote(expert)

    def commit(self, move):
        self.real.commit(move)

    def abort(self, move):
        self.real.abort(move)


class ShownBeforeTheCopyLanded(SourceSuite):
    FOUND_BY = "test_nothing_of_a_move_is_seen_before_its_commit"

    class Source(Moving):
        def begin_demote(self, expert):
            move = super().begin_demote(expert)
            if move is not None:
                self.real.commit(move)
            return move

        def commit(self, move):
            if move.kind == "promote":
                self.real.commit(move)

    def make(self, context):
        return self.Source(context)


class AbortedMovesKeepTheirRoom(SourceSuite):
    FOUND_BY = "test_an_aborted_move_changes_nothing"

    class Source(Moving):
        def abort(self, move):
            pass

    def make(self, context):
        return self.Source(context)


# --- allocators --------------------------------------------------------------------------------


class Host(HostAllocator):
    """Sound; a fake changes the region it hands out."""

    def __init__(self):
        super().__init__()
        self.made = {}

    def change(self, region):
        return region

    def reserve(self, nbytes, cuts, purpose):
        region = super().reserve(nbytes + 64, cuts, purpose)
        changed = self.change(evolve(region, nbytes=nbytes, spans=(Span(region.address, nbytes),)))
        self.made[changed.address] = region
        return changed

    def release(self, region):
        super().release(self.made.pop(region.address))


class IgnoresAlignment(AllocatorSuite):
    FOUND_BY = "test_a_region_is_whole_and_can_be_written"

    class Allocator(Host):
        def change(self, region):
            at = region.address + 8
            return evolve(region, address=at, spans=(Span(at, region.nbytes),))

    def make(self, context):
        return self.Allocator()


class CutsWhereItLikes(AllocatorSuite):
    FOUND_BY = "test_spans_end_nowhere_without_cuts"

    class Allocator(Host):
        def change(self, region):
            half = region.nbytes // 2
            if not half:
                return region
            spans = (Span(region.address, half), Span(region.address + half, region.nbytes - half))
            return evolve(region, spans=spans)

    def make(self, context):
        return self.Allocator()


class HandsOutTheSameMemoryTwice(AllocatorSuite):
    FOUND_BY = "test_regions_do_not_overlap"

    class Allocator(HostAllocator):
        kept = None

        def reserve(self, nbytes, cuts, purpose):
            if nbytes > 1 << 40:
                raise StrataError(f"no memory for {purpose}")
            if self.kept is None:
                self.kept = super().reserve(8 << 20, cuts, purpose)
            at = self.kept.address
            return Region(at, nbytes, (Span(at, nbytes),), "pageable", "", purpose)

        def release(self, region):
            pass

    def make(self, context):
        return self.Allocator()


class RefusesWithoutAPurpose(AllocatorSuite):
    FOUND_BY = "test_what_cannot_be_had_is_refused_with_its_purpose"

    class Allocator(HostAllocator):
        def reserve(self, nbytes, cuts, purpose):
            if nbytes > 1 << 40:
                raise StrataError("out of memory")
            return super().reserve(nbytes, cuts, purpose)

    def make(self, context):
        return self.Allocator()


# --- backends ----------------------------------------------------------------------------------


class Exact:
    """A sound backend, slow and exact; a fake exchanges one kernel."""

    capabilities = Capabilities(kv_types=("fp32",), exact=True)

    def __init__(self, **kernels):
        self.kernels = {**EXACT_KERNELS, **kernels}

    def bind(self, program, weights, experts, source, limits, progress):
        dense = matrices(program, weights)
        return Interpreter(program, self.kernels, dense, experts, source, limits)

    def close(self):
        pass


def _reversed_order(frame, x, rows, weights, top_k):
    by_token = rows.reshape(len(x), top_k, -1)[:, ::-1].reshape(rows.shape)
    turned = weights.reshape(len(x), top_k)[:, ::-1].reshape(weights.shape)
    EXACT_KERNELS["combine"](frame, x, np.ascontiguousarray(by_token), turned, top_k)


def _windows_matter(frame, x, y):
    EXACT_KERNELS["add"](frame, x, y)
    if len(x) > 1:
        x[:] = np.nextafter(x, np.float32(np.inf))


class WrongRouterOrder(BackendSuite):
    FOUND_BY = "test_rows_are_added_in_router_order"

    def make(self, context):
        return Exact(combine=_reversed_order)


class WindowsChangeBits(BackendSuite):
    FOUND_BY = "test_a_token_does_not_depend_on_its_window"

    def make(self, context):
        return Exact(add=_windows_matter)


class CountsNothing(BackendSuite):
    FOUND_BY = "test_experts_are_counted"

    class Backend(Exact):
        def bind(self, *args):
            executor = super().bind(*args)
            executor.counters = dict
            return executor

    def make(self, context):
        return self.Backend()
