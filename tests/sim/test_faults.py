"""Any call of any verb can be made to fail; the machine is then as it was, the error pending."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import pytest

from strata_core.errors import DeviceError, Refused, StrataError
from strata_core.testing.sim import VERBS, SimFaults, SimHardware, SimRuntime
from strata_core.testing.sim.sample import ADD, add, add_launch

PAGE = mmap.PAGESIZE
MIB = 1 << 20
LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)
HARDWARE = SimHardware(vram=(MIB, MIB), pin_budget=8 * MIB, context_pins=MIB)


@pytest.fixture
def page() -> Iterator[int]:
    mapping = mmap.mmap(-1, PAGE)
    yield ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mapping.close()


def whole_life(sim: SimRuntime, page: int) -> None:
    """Every verb, each twice or more."""
    for device in sim.devices():
        sim.open_context(device.index)
        sim.load(device.index, [ADD])
        place, host = sim.alloc(device.index, PAGE), sim.host_alloc(PAGE)
        sim.register(page, PAGE)
        assert sim.memory(device.index).free < MIB
        assert sim.alias(page, device.index) == page
        stream, event = sim.create_stream(device.index), sim.create_event(device.index)
        sim.fill(place, 0, PAGE, stream)
        sim.copy(host, place, PAGE, stream)
        sim.record(event, stream)
        sim.wait(stream, event)
        sim.finished(event)
        timed = sim.create_timed_event(device.index)
        sim.record(timed, stream)
        sim.synchronize(stream)
        assert sim.elapsed(timed, timed) == 0
        sim.destroy_event(timed)
        sim.begin_capture(stream)
        sim.launch(add_launch(place, place + 64, 8), stream)
        graph = sim.end_capture(stream)
        sim.launch_graph(graph, stream)
        LAUNCHER(sim.graph_launcher)(graph, stream)
        sim.synchronize(stream)
        assert sim.take_error() is None
        sim.destroy_graph(graph)
        sim.destroy_event(event)
        sim.destroy_stream(stream)
        sim.unregister(page)
        sim.host_free(host)
        sim.free(device.index, place)
    sim.close()


def test_a_clean_life_calls_every_verb(page) -> None:
    sim = SimRuntime(HARDWARE, host_kernels={"add": add})
    whole_life(sim, page)
    assert set(sim.calls()) == set(VERBS)
    counts = dict.fromkeys(VERBS, 2) | dict.fromkeys(("devices", "close"), 1)
    counts |= dict.fromkeys(("record", "synchronize", "destroy_event"), 4)
    assert sim.calls() == counts
    assert sim.leaks() == sim.breaches == []


@pytest.mark.parametrize("verb", VERBS)
def test_every_call_of_every_verb_can_fail(verb, page) -> None:
    for call in (1, 2) if verb not in ("devices", "close") else (1,):
        sim = SimRuntime(HARDWARE, host_kernels={"add": add}, faults=SimFaults({verb: call}))
        with pytest.raises(DeviceError) as caught:
            whole_life(sim, page)
        refusable = verb in ("open_context", "alloc", "host_alloc", "register")
        assert isinstance(caught.value, Refused) is refusable
        assert f"{verb} failed" in str(caught.value)
        assert sim.calls()[verb] == call
        assert not sim.breaches
        if verb != "close":
            assert sim.take_error()
        sim.close()
        sim.close()
        assert sim.report()["pinned"]["in_use"] == 0


def test_a_failed_call_can_be_made_again(page) -> None:
    """Whoever takes the error and tries again gets through, whatever fails."""
    for verb in set(VERBS) - {"close", "graph_launcher", "take_error"}:
        sim = SimRuntime(HARDWARE, host_kernels={"add": add}, faults=SimFaults({verb: 2}))

        class Again:
            def __init__(self, sim: SimRuntime) -> None:
                self.sim = sim

            def __getattr__(self, name: str):
                value = getattr(self.sim, name)
                if not callable(value):
                    return value

                def call(*args):
                    held = self.sim.leaks()
                    try:
                        return value(*args)
                    except StrataError:
                        assert self.sim.leaks() == held
                        assert self.sim.take_error()
                        return value(*args)

                return call

        whole_life(Again(sim), page)  # type: ignore[arg-type]
        assert sim.leaks() == sim.breaches == []


def test_several_calls_of_several_verbs(page) -> None:
    sim = SimRuntime(HARDWARE, faults=SimFaults({"alloc": (1, 3), "host_alloc": 1}))
    sim.open_context(0)
    granted = []
    for _ in range(4):
        try:
            granted.append(bool(sim.alloc(0, 8)))
        except Refused:
            granted.append(False)
            sim.take_error()
    assert granted == [False, True, False, True]
    with pytest.raises(Refused):
        sim.host_alloc(8)
    assert not sim.kernel_log
    sim.close()


def test_there_are_no_other_verbs() -> None:
    with pytest.raises(ValueError, match="no such verbs: malloc"):
        SimFaults({"malloc": 1})
