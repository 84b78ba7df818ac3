"""Runtimes that are broken in one way each, for `test_suites_find.py`; as `broken_parts.py`."""

from __future__ import annotations

from types import SimpleNamespace

from strata_core.errors import DeviceError
from strata_core.testing.conformance import RuntimeSuite
from strata_core.testing.sim import SimRuntime
from strata_core.testing.sim.sample import add, add_launch, add_pointers


class Broken(RuntimeSuite):
    """A sound simulator; a fake changes one verb of it."""

    class Runtime(SimRuntime):
        pass

    def make(self):
        return self.Runtime(host_kernels={"add": add}, pointers=add_pointers)

    def add(self, x, y, count):
        return add_launch(x, y, count)


class DoesNotWaitForEvents(Broken):
    FOUND_BY = "test_a_stream_waits_for_another_by_an_event"

    class Runtime(SimRuntime):
        def wait(self, stream, event):
            pass


class CopiesAByteLess(Broken):
    FOUND_BY = "test_copies_in_every_direction"

    class Runtime(SimRuntime):
        def copy(self, target, source, nbytes, stream):
            super().copy(target, source, max(nbytes - 1, 0), stream)


class KeepsWhatWasFreed(Broken):
    FOUND_BY = "test_free_memory_follows_allocations"

    class Runtime(SimRuntime):
        def free(self, device, address):
            pass


class AliasIsOfAnotherPlace(Broken):
    FOUND_BY = "test_aliases_follow_their_span"

    class Runtime(SimRuntime):
        def alias(self, address, device):
            found = super().alias(address, device)
            return None if found is None else found - address % 4096


class LeavesAnErrorBehind(Broken):
    FOUND_BY = "test_without_an_error_none_is_taken"

    class Runtime(SimRuntime):
        def take_error(self):
            return super().take_error() or "an error of long ago"


class HasOneErrorForAllThreads(Broken):
    FOUND_BY = "test_a_refusal_is_pending_for_its_own_thread_alone"

    class Runtime(SimRuntime):
        def __init__(self, **parts):
            super().__init__(**parts)
            self._thread = SimpleNamespace(pending=None)


class CapturesNothing(Broken):
    FOUND_BY = "test_a_graph_is_replayed"

    class Runtime(SimRuntime):
        def launch_graph(self, graph, stream):
            pass


class ClosesOnce(Broken):
    FOUND_BY = "test_close_may_be_called_again"

    class Runtime(SimRuntime):
        def close(self):
            if self.closed:
                raise DeviceError("close failed", "it is closed", "")
            super().close()


class LosesTheFill(Broken):
    FOUND_BY = "test_fill"

    class Runtime(SimRuntime):
        def fill(self, target, value, nbytes, stream):
            super().fill(target, 0, nbytes, stream)
