"""The suite for a runtime: what every accelerator's verbs have to do, on one device and on two.

    from strata_core.testing.conformance.runtime import RuntimeSuite

    class TestMine(RuntimeSuite):
        def make(self):
            return MyRuntime()

        def add(self, x, y, count):
            return Launch(...)

Device memory is never read by the CPU here, and host memory that work uses is kept until that work
is done: a runtime that keeps the protocol passes, however late or early it does things.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable

import numpy as np
import pytest

from strata_core.memory.address import bytes_at
from strata_core.runtime import Launch, Runtime, TimesEvents
from strata_core.testing.conformance.runtime_base import (
    MIB,
    PAGE,
    Bench,
    RuntimeBase,
    pages,
    pattern,
)
from strata_core.testing.conformance.runtime_memory import MemorySuite


class OrderSuite(RuntimeBase):
    """Streams, events, kernels, graphs."""

    def test_an_event_that_was_never_recorded_has_happened(self, bench: Bench) -> None:
        """And nothing waits for it."""
        event = bench.runtime.create_event(0)
        assert bench.runtime.finished(event)
        bench.runtime.wait(bench.stream, event)
        bench.runtime.synchronize(bench.stream)
        bench.runtime.destroy_event(event)

    def test_a_stream_waits_for_another_by_an_event(self, bench: Bench) -> None:
        """A chain over three streams passes the bytes on, however often."""
        runtime, data = bench.runtime, pattern(4 * MIB)
        host = runtime.host_alloc(data.size)
        back = runtime.host_alloc(data.size)
        bytes_at(host, data.size)[:] = data
        streams = [runtime.create_stream(0) for _ in range(3)]
        events = [runtime.create_event(0) for _ in range(3)]
        places = [runtime.alloc(0, data.size) for _ in range(3)]
        for turn in range(3):
            runtime.copy(places[0], host, data.size, streams[0])
            runtime.record(events[0], streams[0])
            for i in (1, 2):
                runtime.wait(streams[i], events[i - 1])
                runtime.copy(places[i], places[i - 1], data.size, streams[i])
                runtime.record(events[i], streams[i])
            runtime.copy(back, places[2], data.size, streams[2])
            runtime.synchronize(streams[2])
            assert (bytes_at(back, data.size) == data).all()
            assert all(runtime.finished(event) for event in events)
            bytes_at(host, data.size)[:] = data = pattern(data.size, turn + 2)
        for stream in streams:
            runtime.synchronize(stream)
            runtime.destroy_stream(stream)

    def test_timed_events_tell_what_lay_between_them(self, bench: Bench) -> None:
        """Where a runtime has them; never less than nothing, as far as its clock tells."""
        runtime = bench.runtime
        if not isinstance(runtime, TimesEvents):
            pytest.skip("its events tell no time")
        events = [runtime.create_timed_event(0) for _ in range(3)]
        host, place = runtime.host_alloc(MIB), runtime.alloc(0, MIB)
        for event in events:
            runtime.record(event, bench.stream)
            runtime.copy(place, host, MIB, bench.stream)
        runtime.synchronize(bench.stream)
        assert all(runtime.finished(event) for event in events)
        first, second, third = events
        assert runtime.elapsed(first, first) == pytest.approx(0, abs=1e-6)
        parts = runtime.elapsed(first, second) + runtime.elapsed(second, third)
        assert 0 <= parts == pytest.approx(runtime.elapsed(first, third), rel=0.01, abs=1e-5)
        for event in events:
            runtime.destroy_event(event)

    def test_a_buffer_is_used_again_after_its_event(self, bench: Bench) -> None:
        """Two staging buffers carry eight pieces, with polling."""
        runtime, piece = bench.runtime, MIB
        data = pattern(8 * piece)
        target = runtime.alloc(0, data.size)
        ring = [(runtime.host_alloc(piece), runtime.create_event(0)) for _ in range(2)]
        for i in range(8):
            buffer, event = ring[i % 2]
            while not runtime.finished(event):
                pass
            bytes_at(buffer, piece)[:] = data[i * piece : (i + 1) * piece]
            runtime.copy(target + i * piece, buffer, piece, bench.stream)
            runtime.record(event, bench.stream)
        assert (bench.get(target, data.size) == data).all()

    def test_a_kernel_sees_what_came_before_it(
        self, bench: Bench, launch: Callable[[int, int, int], Launch]
    ) -> None:
        """And what comes behind it sees the kernel."""
        runtime, count = bench.runtime, 1000
        x, y = np.arange(count, dtype=np.float32), np.full(count, 0.5, np.float32)
        host = runtime.host_alloc(8 * count)
        bytes_at(host, 8 * count).view(np.float32)[:] = np.concatenate([x, y])
        both = runtime.alloc(0, 8 * count)
        work = launch(both, both + 4 * count, count)
        runtime.copy(both, host, 8 * count, bench.stream)
        for _ in range(3):
            runtime.launch(work, bench.stream)
        assert (bench.floats(both, count) == x + np.float32(1.5)).all()

    def test_a_kernel_reads_and_writes_by_aliases(
        self, bench: Bench, launch: Callable[[int, int, int], Launch]
    ) -> None:
        """Of pinned memory, and of two registrations side by side."""
        runtime, count = bench.runtime, PAGE // 4
        pinned = runtime.host_alloc(PAGE)
        if runtime.alias(pinned, 0) is None:
            pytest.skip("devices do not address host memory here")
        with pages(2) as host:
            bytes_at(host, 2 * PAGE).view(np.float32)[:] = np.repeat(
                np.array([1.0, 2.0], np.float32), count
            )
            runtime.register(host, PAGE)
            runtime.register(host + PAGE, PAGE)
            bytes_at(pinned, PAGE).view(np.float32)[:] = 4
            aliases = [runtime.alias(address, 0) for address in (pinned, host, host + PAGE)]
            assert None not in aliases
            target, first, second = (alias or 0 for alias in aliases)
            runtime.launch(launch(target, first, count), bench.stream)
            runtime.launch(launch(target, second, count), bench.stream)
            runtime.synchronize(bench.stream)
            assert (bytes_at(pinned, PAGE).view(np.float32) == 7).all()
            runtime.unregister(host)
            runtime.unregister(host + PAGE)

    @pytest.mark.parametrize("way", ["launch_graph", "graph_launcher"])
    def test_a_graph_is_replayed(
        self, bench: Bench, launch: Callable[[int, int, int], Launch], way: str
    ) -> None:
        """A capture does nothing; each replay does all of it, with what the memory holds then."""
        runtime, count = bench.runtime, 512
        host = runtime.host_alloc(4 * count)
        source = bytes_at(host, 4 * count).view(np.float32)
        source[:] = 1
        x, y = bench.put(np.zeros(count, np.float32)), bench.put(np.zeros(count, np.float32))
        work = launch(x, y, count)
        runtime.begin_capture(bench.stream)
        runtime.copy(y, host, 4 * count, bench.stream)
        runtime.launch(work, bench.stream)
        graph = runtime.end_capture(bench.stream)
        assert not bench.floats(x, count).any()
        for value in (1.0, 2.0, 4.0):
            runtime.synchronize(bench.stream)
            source[:] = value
            self._replay(runtime, way, graph, bench.stream)
        assert (bench.floats(x, count) == 7).all()
        runtime.destroy_graph(graph)

    def test_a_graph_may_be_launched_on_another_thread(
        self, bench: Bench, launch: Callable[[int, int, int], Launch]
    ) -> None:
        """By compiled code, without the interpreter's lock; so may everything else."""
        runtime, count = bench.runtime, 64
        x, y = bench.put(np.zeros(count, np.float32)), bench.put(np.ones(count, np.float32))
        work = launch(x, y, count)
        runtime.begin_capture(bench.stream)
        runtime.launch(work, bench.stream)
        graph = runtime.end_capture(bench.stream)
        failures: list[BaseException] = []

        def run() -> None:
            try:
                for _ in range(10):
                    self._replay(runtime, "graph_launcher", graph, bench.stream)
                own = Bench(runtime)
                place = own.put(pattern(100))
                assert (own.get(place, 100) == pattern(100)).all()
                runtime.free(0, place)
            except BaseException as error:  # noqa: BLE001  shown by the test's own thread
                failures.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join(60)
        assert not thread.is_alive()
        assert not failures
        assert (bench.floats(x, count) == 10).all()
        runtime.destroy_graph(graph)

    def test_close_may_be_called_again(self) -> None:
        """It frees what is left, and then there is nothing to do."""
        runtime = self.make()
        runtime.open_context(0)
        runtime.alloc(0, 1000)
        runtime.host_alloc(1000)
        Bench(runtime)
        runtime.close()
        runtime.close()

    @staticmethod
    def _replay(runtime: Runtime, way: str, graph: int, stream: int) -> None:
        if way == "launch_graph":
            runtime.launch_graph(graph, stream)
            return
        kind = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
        assert kind(runtime.graph_launcher)(graph, stream) == 0


class RuntimeSuite(MemorySuite, OrderSuite):
    """All of it: subclass this one."""
