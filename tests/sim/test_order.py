"""Work is done at the last moment that its order allows; whoever counts on more is found out."""

from __future__ import annotations

import numpy as np
import pytest

from strata_core.errors import DeviceError
from strata_core.memory.address import bytes_at
from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim.sample import ADD, add_launch

MIB = 1 << 20


@pytest.fixture
def host(sim):
    address = sim.host_alloc(64)
    bytes_at(address, 64)[:] = 1
    return address


@pytest.fixture
def place(sim, stream):
    address = sim.alloc(0, 64)
    sim.fill(address, 0, 64, stream)
    sim.synchronize(stream)
    return address


def at(address: int) -> int:
    return int(bytes_at(address, 1)[0])


def test_a_copy_waits_for_synchronize(sim, stream, host, place) -> None:
    sim.copy(place, host, 64, stream)
    assert at(place) == 0
    sim.synchronize(stream)
    assert at(place) == 1


def test_a_buffer_used_again_too_early_holds_the_wrong_bytes(sim, stream, host, place) -> None:
    sim.copy(place, host, 64, stream)
    with pytest.raises(DeviceError, match=r"the host: .* in use by a copy of 64 bytes"):
        sim.check_idle(host, 64)
    sim.check_idle(host, 64, write=False)
    with pytest.raises(DeviceError, match="in use"):
        sim.check_idle(place + 63, 1, write=False)
    sim.check_idle(place + 64, 1)
    assert len(sim.breaches) == 2
    bytes_at(host, 64)[:] = 2
    sim.synchronize(stream)
    assert at(place) == 2
    sim.check_idle(host, 64)


def test_a_copy_waits_for_a_launch_on_its_stream(sim, stream, host, place) -> None:
    other = sim.create_stream(0)
    sim.load(0, [ADD])
    x, y = sim.alloc(0, 4), sim.alloc(0, 4)
    for address in (x, y):
        bytes_at(address, 4)[:] = 0
    sim.copy(place, host, 64, stream)
    sim.launch(add_launch(x, y, 1), other)
    assert at(place) == 0
    sim.launch(add_launch(x, y, 1), stream)
    assert at(place) == 1


def test_an_event_is_finished_at_the_second_asking(sim, stream, host, place) -> None:
    event = sim.create_event(0)
    assert sim.finished(event)
    sim.record(event, stream)
    assert sim.finished(event), "there is nothing before it"
    sim.copy(place, host, 64, stream)
    sim.record(event, stream)
    sim.copy(place, host, 64, stream)
    assert not sim.finished(event)
    assert at(place) == 0
    assert sim.finished(event)
    assert at(place) == 1
    sim.record(event, stream)
    assert not sim.finished(event), "a new record is asked for anew"


def test_a_launch_waits_for_the_streams_that_its_stream_waits_for(sim, stream, host, place) -> None:
    sim.load(0, [ADD])
    second, third = sim.create_stream(0), sim.create_stream(0)
    events = [sim.create_event(0) for _ in range(2)]
    sim.copy(place, host, 32, stream)
    sim.record(events[0], stream)
    sim.copy(place + 32, host, 32, stream)
    sim.wait(second, events[0])
    sim.record(events[1], second)
    sim.wait(third, events[1])
    x = sim.alloc(0, 8)
    bytes_at(x, 8)[:] = 0
    sim.launch(add_launch(x, x + 4, 1), third)
    assert at(place) == 1
    assert at(place + 32) == 0, "what comes behind the event is not waited for"
    sim.destroy_stream(third)
    sim.destroy_stream(second)


def test_long_chains_between_streams(sim, stream, host, place) -> None:
    streams = [stream, sim.create_stream(0)]
    for turn in range(3000):
        event = sim.create_event(0)
        sim.copy(place, host, 8, streams[turn % 2])
        sim.record(event, streams[turn % 2])
        sim.wait(streams[1 - turn % 2], event)
        sim.destroy_event(event)
    sim.synchronize(streams[0])
    sim.synchronize(streams[1])
    assert at(place) == 1


def test_a_later_record_is_not_what_was_waited_for(sim, stream, host, place) -> None:
    other, event = sim.create_stream(0), sim.create_event(0)
    sim.copy(place, host, 8, stream)
    sim.record(event, stream)
    sim.wait(other, event)
    sim.copy(place + 8, host, 8, stream)
    sim.record(event, stream)
    sim.synchronize(other)
    assert (at(place), at(place + 8)) == (1, 0)


# --- collisions --------------------------------------------------------------------------------


def test_streams_do_not_share_memory_without_an_event(sim, stream, host, place) -> None:
    other, event = sim.create_stream(0), sim.create_event(0)
    elsewhere = sim.alloc(0, 64)
    sim.copy(place, host, 64, stream)
    sim.copy(elsewhere, host, 64, other)  # two may read
    for act in (
        lambda: sim.fill(place + 63, 0, 1, other),
        lambda: sim.copy(host, elsewhere, 1, other),
        lambda: sim.copy(elsewhere, place, 1, other),
    ):
        with pytest.raises(DeviceError, match=r"in use by a copy of 64 bytes on stream SIM0\.1"):
            act()
        sim.take_error()
    sim.record(event, stream)
    sim.wait(other, event)
    sim.fill(place + 63, 0, 1, other)
    sim.copy(host, elsewhere, 1, other)
    sim.synchronize(other)
    assert len(sim.breaches) == 3


def test_an_event_orders_what_comes_before_it_only(sim, stream, host, place) -> None:
    other, event = sim.create_stream(0), sim.create_event(0)
    sim.record(event, stream)
    sim.copy(place, host, 64, stream)
    sim.wait(other, event)
    with pytest.raises(DeviceError, match="in use"):
        sim.fill(place, 0, 1, other)


def test_order_passes_through_streams(sim, stream, host, place) -> None:
    middle, last = sim.create_stream(0), sim.create_stream(0)
    first_event, second_event = sim.create_event(0), sim.create_event(0)
    elsewhere = sim.alloc(0, 64)
    sim.copy(place, host, 64, stream)
    sim.record(first_event, stream)
    sim.fill(elsewhere, 0, 1, middle)
    sim.wait(middle, first_event)
    sim.record(second_event, middle)
    sim.wait(last, second_event)
    sim.fill(place, 5, 64, last)
    sim.synchronize(last)
    assert at(place) == 5


@pytest.mark.parametrize("kind", ["alloc", "host_alloc"])
def test_memory_in_use_is_not_given_back(sim, stream, host, place, kind) -> None:
    sim.copy(place, host, 64, stream)
    give_back = {"alloc": lambda: sim.free(0, place), "host_alloc": lambda: sim.host_free(host)}
    with pytest.raises(DeviceError, match="in use by a copy"):
        give_back[kind]()
    sim.take_error()
    sim.synchronize(stream)
    give_back[kind]()


def test_kernels_meet_what_is_queued_elsewhere(sim, stream, host, place) -> None:
    sim.load(0, [ADD])
    other = sim.create_stream(0)
    sim.copy(place, host, 64, stream)
    with pytest.raises(DeviceError, match=r"a kernel: .* in use by a copy"):
        sim.launch(add_launch(place, place + 32, 8), other)
    sim.take_error()
    sim.launch(add_launch(place, place + 32, 8), stream)


# --- handles -----------------------------------------------------------------------------------


def test_handles_are_used_between_creation_and_end(sim, stream) -> None:
    event = sim.create_event(0)
    sim.begin_capture(stream)
    graph = sim.end_capture(stream)
    sim.destroy_event(event)
    sim.destroy_graph(graph)
    sim.destroy_stream(stream)
    for words, act in {
        "no event": lambda: sim.finished(event),
        "no stream": lambda: sim.synchronize(stream),
        "no graph": lambda: sim.launch_graph(graph, stream),
        "destroy_stream: there is no stream": lambda: sim.destroy_stream(stream),
        "destroy_event: there is no event": lambda: sim.destroy_event(event),
        "destroy_graph: there is no graph": lambda: sim.destroy_graph(graph),
        "copy: there is no stream": lambda: sim.copy(1, 2, 0, stream),
        "wait: there is no stream": lambda: sim.wait(event, event),
    }.items():
        with pytest.raises(DeviceError, match=words):
            act()
        sim.take_error()


def test_a_stream_with_work_is_not_destroyed(sim, stream, host, place) -> None:
    event = sim.create_event(0)
    sim.copy(place, host, 64, stream)
    sim.record(event, stream)
    with pytest.raises(DeviceError, match="still has a copy of 64 bytes to do"):
        sim.destroy_stream(stream)
    sim.take_error()
    while not sim.finished(event):
        pass
    sim.destroy_stream(stream)


def test_events_and_graphs_stay_on_their_device(make) -> None:
    sim = make(vram=(MIB, MIB), opened=2)
    stream, event = sim.create_stream(0), sim.create_event(1)
    with pytest.raises(DeviceError, match="an event of device 1 on a stream of device 0"):
        sim.record(event, stream)
    sim.take_error()
    other = sim.create_stream(1)
    sim.record(event, other)
    sim.wait(stream, event)
    sim.begin_capture(other)
    graph = sim.end_capture(other)
    with pytest.raises(DeviceError, match="a graph of device 1 on a stream of device 0"):
        sim.launch_graph(graph, stream)


def test_the_same_calls_give_the_same_bytes_and_accounts(make) -> None:
    def run() -> tuple[bytes, dict]:
        sim = make(vram=(MIB,))
        sim.load(0, [ADD, KernelKey("add", ("F32", 128))])
        streams = [sim.create_stream(0) for _ in range(2)]
        host, place = sim.host_alloc(4096), sim.alloc(0, 4096)
        event = sim.create_event(0)
        for turn in range(20):
            bytes_at(host, 4096)[:] = (
                turn  # too early on purpose: the bytes are wrong, but the same
            )
            sim.copy(place, host, 2048, streams[turn % 2])
            sim.record(event, streams[turn % 2])
            sim.wait(streams[1 - turn % 2], event)
            if turn % 7 == 0:
                sim.launch(add_launch(place, place + 2048, 3), streams[turn % 2])
            if turn % 5 == 0:
                sim.finished(event)
        for stream in streams:
            sim.synchronize(stream)
        return bytes_at(place, 4096).tobytes(), sim.report()

    first, second = run(), run()
    assert first == second
    assert np.frombuffer(first[0], np.uint8)[0] == 19


def test_another_kernel_key_is_another_kernel(sim, stream) -> None:
    sim.load(0, [KernelKey("add", ("F32",))])
    launch = add_launch(0, 0, 0)
    with pytest.raises(DeviceError, match=r"add \(\) is not loaded"):
        sim.launch(launch, stream)
    sim.take_error()
    keyed = Launch(KernelKey("add", ("F32",)), launch.grid, launch.block, 0, launch.args)
    with pytest.raises(DeviceError, match="no device addresses"):
        sim.launch(keyed, stream)  # loaded, and address 0 is nowhere
