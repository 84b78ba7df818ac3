"""What the simulator counts, and the machine that options describe."""

from __future__ import annotations

import json
from math import prod

import numpy as np
import pytest

from strata_core.errors import DeviceError, UsageError
from strata_core.memory.address import address_of, bytes_at
from strata_core.runtime import Device
from strata_core.testing.sim import SimHardware, SimRuntime, sim_hardware, sim_runtime
from strata_core.testing.sim.sample import ADD, add_launch

MIB = 1 << 20


def test_bytes_are_counted_by_direction_stream_and_link(make) -> None:
    sim = make(vram=(MIB, MIB), opened=2)
    first, second = sim.create_stream(0), sim.create_stream(1)
    here, there, host = sim.alloc(0, 4096), sim.alloc(1, 4096), sim.host_alloc(4096)
    pageable = np.zeros(100, np.uint8)
    sim.fill(here, 1, 4096, first)
    sim.copy(host, here, 1000, first)
    sim.copy(here, address_of(pageable), 100, first)
    sim.copy(here + 200, here, 10, first)
    assert sim.report()["copied"] == {}, "nothing was moved yet"
    sim.synchronize(first)
    sim.copy(there, here, 500, second)
    sim.copy(host, host + 2000, 7, second)
    sim.synchronize(second)
    sim.note_link(1, read=30, written=4)
    report = sim.report()
    assert report["copied"] == {
        "device_to_host": 1000,
        "host_to_device": 100,
        "device_to_device": 10,
        "peer_to_peer": 500,
        "host_to_host": 7,
    }
    assert report["links"] == {
        "SIM0": {"to_device": 100, "from_device": 1500},
        "SIM1": {"to_device": 530, "from_device": 4},
    }
    assert report["streams"]["SIM0.1"] == {
        "copied": {"device_to_host": 1000, "host_to_device": 100, "device_to_device": 10},
        "filled": 4096,
        "launches": 0,
        "graph_launches": 0,
        "synchronizes": 1,
        "event_waits": 0,
    }
    assert report["streams"]["SIM1.1"]["copied"] == {"peer_to_peer": 500, "host_to_host": 7}
    json.dumps(report)


def test_waits_and_launches_are_counted(sim, stream) -> None:
    sim.load(0, [ADD])
    x, event = sim.alloc(0, 8), sim.create_event(0)
    bytes_at(x, 8)[:] = 0
    for _ in range(3):
        sim.launch(add_launch(x, x + 4, 1), stream)
        sim.record(event, stream)
        sim.wait(stream, event)
    sim.finished(event)
    sim.synchronize(stream)
    report = sim.report()
    assert report["kernels"] == {"add": 3}
    assert report["polls"] == 1
    counted = report["streams"]["SIM0.1"]
    assert (counted["launches"], counted["event_waits"], counted["synchronizes"]) == (3, 3, 1)
    sim.destroy_stream(stream)
    assert sim.report()["streams"]["SIM0.1"] == counted


def test_peaks_outlive_what_made_them(sim) -> None:
    places = [sim.alloc(0, 1000) for _ in range(2)]
    hosts = [sim.host_alloc(5000) for _ in range(2)]
    for place, host in zip(places, hosts, strict=True):
        sim.free(0, place)
        sim.host_free(host)
    sim.alloc(0, 1)
    report = sim.report()
    assert report["vram"]["SIM0"] == {"in_use": 256, "peak": 2048}
    assert report["pinned"] == {"in_use": MIB, "peak": MIB + 4 * 4096, "by": {"contexts": MIB}}


def test_options_describe_the_machine() -> None:
    plain = sim_runtime({"sim_vram": None, "sim_pin_budget": None, "backend": "sim"})
    assert plain.hardware == SimHardware(vram=(8 << 30,), pin_budget=None)
    small = sim_runtime(
        {"sim_vram": 0.25, "sim_pin_budget": 0.5, "sim_devices": 3}, context_pins=5 * MIB
    )
    assert small.hardware == SimHardware(
        vram=(256 * MIB,) * 3, pin_budget=512 * MIB, context_pins=5 * MIB
    )
    assert small.devices()[2] == Device(
        index=2,
        label="SIM2",
        name="simulated accelerator",
        architecture="sim",
        total=256 * MIB,
        units=4,
        warp=32,
    )
    assert sim_hardware({"sim_pin_budget": 0}).pin_budget == 0


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        ({"sim_vram": 0}, "--sim-vram"),
        ({"sim_vram": -1.5}, "--sim-vram"),
        ({"sim_devices": 0}, "--sim-devices"),
        ({"sim_pin_budget": -0.1}, "--sim-pin-budget"),
    ],
)
def test_a_machine_that_cannot_be(options, flag) -> None:
    with pytest.raises(UsageError, match=flag):
        sim_runtime(options)
    with pytest.raises(ValueError, match="each with memory"):
        SimRuntime(SimHardware(vram=(MIB, 0)))


def test_timed_events_tell_the_accounting_clock(make) -> None:
    """Streams run beside each other; what waits for an event begins when that has happened."""
    sim = make(vram=(4 * MIB,), link=1e6, launch_s=0.25, block_s=0.5, opened=1)
    copies, kernels = sim.create_stream(0), sim.create_stream(0)
    place, host = sim.alloc(0, MIB), sim.host_alloc(MIB)
    start, copied, early, late = (sim.create_timed_event(0) for _ in range(4))
    sim.load(0, [ADD])
    sim.record(start, copies)
    sim.copy(place, host, 500_000, copies)
    sim.record(copied, copies)
    with pytest.raises(DeviceError, match="tells no time"):
        sim.elapsed(start, copied)
    sim.take_error()
    sim.launch(add_launch(place + 600_000, place + 700_000, 8), kernels)
    sim.record(early, kernels)
    sim.wait(kernels, copied)
    sim.launch(add_launch(place, place + 700_000, 8), kernels)
    sim.record(late, kernels)
    sim.synchronize(kernels)
    took = 0.25 + 0.5 * prod(add_launch(place, place, 8).grid)
    assert sim.elapsed(start, copied) == pytest.approx(0.5)
    assert sim.elapsed(start, early) == pytest.approx(took)
    assert sim.elapsed(start, late) == pytest.approx(max(took, 0.5) + took)
    with pytest.raises(DeviceError, match="tells no time"):
        sim.elapsed(start, sim.create_event(0))
    sim.take_error()
    # the host has waited: what it puts now begins afterwards
    sim.record(start, copies)
    sim.synchronize(copies)
    assert sim.elapsed(late, start) == pytest.approx(0)
