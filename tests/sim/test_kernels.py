"""Kernels, graphs and the launcher that compiled code calls."""

from __future__ import annotations

import ctypes
import threading
from functools import partial

import numpy as np
import pytest
from llvmlite import ir

from strata_core.errors import DeviceError
from strata_core.kernels.cpu.emit import I32, I64
from strata_core.kernels.cpu.jit import Compiler
from strata_core.kernels.cpu.pool import Phase, Pool, Schedule, StepCall
from strata_core.kernels.cpu.steps import step
from strata_core.kernels.cpu.target import host_target
from strata_core.memory.address import address_of, bytes_at
from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim.sample import ADD, add_launch

MIB = 1 << 20
LAUNCHER = ctypes.CFUNCTYPE(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p)


def floats(sim, count: int, value: float) -> int:
    address = sim.alloc(0, 4 * count)
    bytes_at(address, 4 * count).view(np.float32)[:] = value
    return address


def at(address: int) -> float:
    return float(bytes_at(address, 4).view(np.float32)[0])


@pytest.fixture
def graph(sim, stream):
    """A graph that adds 1 to its `x`."""
    sim.load(0, [ADD])
    x, one = floats(sim, 1, 0), floats(sim, 1, 1)
    sim.begin_capture(stream)
    sim.launch(add_launch(x, one, 1), stream)
    return sim.end_capture(stream), x


def refuses(sim, words: str, act) -> None:
    with pytest.raises(DeviceError, match=words):
        act()
    assert sim.take_error()


# --- kernels -----------------------------------------------------------------------------------


def test_only_kernels_with_a_host_function_are_loaded(sim) -> None:
    keys = [ADD, KernelKey("route"), KernelKey("embed", ("F16",))]
    refuses(sim, "no kernel embed, route", partial(sim.load, 0, keys))
    stream = sim.create_stream(0)
    refuses(sim, r"add .* is not loaded", lambda: sim.launch(add_launch(1, 1, 1), stream))


def test_a_kernel_is_loaded_for_one_device(make) -> None:
    sim = make(vram=(MIB, MIB), opened=2)
    sim.load(0, [ADD])
    stream = sim.create_stream(1)
    refuses(sim, "not loaded on device 1", lambda: sim.launch(add_launch(1, 1, 1), stream))


@pytest.mark.parametrize(
    ("grid", "block", "shared", "args"),
    [
        ((0, 1, 1), (1, 1, 1), 0, 0),
        ((1, 65536, 1), (1, 1, 1), 0, 0),
        ((1, 1, 1), (32, 33, 1), 0, 0),
        ((1, 1, 1), (32, 0, 1), 0, 0),
        ((1, 1, 1), (32, 1, 1), 1 << 20, 0),
        ((1, 1, 1), (32, 1, 1), -1, 0),
        ((1, 1, 1), (32, 1, 1), 0, 4097),
    ],
)
def test_a_launch_has_a_possible_shape(sim, stream, grid, block, shared, args) -> None:
    key = KernelKey("explode")
    sim.load(0, [key])
    launch = Launch(key, grid, block, shared, bytes(args))
    refuses(sim, "launch: explode", lambda: sim.launch(launch, stream))
    assert sim.report()["kernels"] == {}


def test_stale_and_foreign_pointers_are_found_before_a_kernel_runs(make) -> None:
    sim = make(vram=(MIB, MIB), opened=2)
    sim.load(0, [ADD])
    stream = sim.create_stream(0)
    x, y = floats(sim, 4, 1), floats(sim, 4, 2)
    foreign, pageable = sim.alloc(1, 16), np.zeros(4, np.float32)
    for words, bad in {
        "is memory of device 1": foreign,
        "no device addresses": address_of(pageable.view(np.uint8)),
    }.items():
        refuses(sim, words, partial(sim.launch, add_launch(x, bad, 4), stream))
    sim.free(0, y)
    refuses(sim, "was freed", lambda: sim.launch(add_launch(x, y, 4), stream))
    assert sim.report()["kernels"] == {}
    assert at(x) == 1


def test_a_kernel_that_reaches_too_far(sim, stream) -> None:
    sim.load(0, [ADD])
    x = floats(sim, 4, 1)
    refuses(sim, "goes beyond its allocation", lambda: sim.launch(add_launch(x, x, 5), stream))
    assert len(sim.breaches) == 1


def test_kernels_find_host_memory_at_its_alias_alone(make) -> None:
    sim = make(aliases="apart")
    sim.load(0, [ADD])
    stream = sim.create_stream(0)
    x, host = floats(sim, 4, 1), sim.host_alloc(16)
    bytes_at(host, 16).view(np.float32)[:] = 5
    refuses(sim, "at its alias", lambda: sim.launch(add_launch(x, host, 4), stream))
    alias = sim.alias(host, 0)
    sim.launch(add_launch(x, alias, 4), stream)
    sim.launch(add_launch(alias, x, 4), stream)
    assert (at(x), at(host)) == (6, 11)
    refuses(sim, "no device addresses", lambda: sim.launch(add_launch(x, alias + 20, 1), stream))
    sim.copy(x, alias, 16, stream)
    sim.synchronize(stream)
    assert at(x) == 11
    hidden = make(aliases="none")
    place = hidden.host_alloc(16)
    assert hidden.alias(place, 0) is None
    with pytest.raises(DeviceError, match="no device addresses"):
        hidden.reach(0, place, 16)


def test_a_kernel_that_fails_fails_the_launch(sim, stream) -> None:
    key = KernelKey("explode")
    sim.load(0, [key])
    launch = Launch(key, (1, 1, 1), (1, 1, 1), 0, b"")
    with pytest.raises(DeviceError, match="kernel explode failed on SIM0") as caught:
        sim.launch(launch, stream)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert sim.take_error() == "unspecified launch failure (error 719)"
    sim.synchronize(stream)


# --- graphs ------------------------------------------------------------------------------------


def test_a_capture_is_of_one_stream_and_of_work_alone(sim, stream) -> None:
    other, event = sim.create_stream(0), sim.create_event(0)
    refuses(sim, "is not in a capture", lambda: sim.end_capture(stream))
    x = floats(sim, 1, 1)
    sim.begin_capture(stream)
    for act in (
        lambda: sim.begin_capture(stream),
        lambda: sim.record(event, stream),
        lambda: sim.wait(stream, event),
        lambda: sim.synchronize(stream),
        lambda: sim.destroy_stream(stream),
    ):
        refuses(sim, "is in a capture", act)
    pageable = np.zeros(4, np.uint8)
    refuses(sim, "pageable memory", lambda: sim.copy(x, address_of(pageable), 4, stream))
    sim.fill(x, 0, 4, other)
    sim.synchronize(other)
    assert at(x) == 0
    graph = sim.end_capture(stream)
    sim.begin_capture(stream)
    refuses(sim, "is in a capture", lambda: sim.launch_graph(graph, stream))
    sim.destroy_graph(sim.end_capture(stream))


def test_a_graph_replays_its_work_with_what_memory_holds_then(sim, stream, graph) -> None:
    number, x = graph
    assert at(x) == 0
    sim.launch_graph(number, stream)
    other = sim.create_stream(0)
    sim.launch_graph(number, other)
    assert at(x) == 2
    report = sim.report()
    assert report["kernels"] == {"add": 2}
    assert report["graph_launches"] == 2
    assert report["streams"]["SIM0.1"]["launches"] == 1


def test_copies_behind_the_last_kernel_of_a_graph_wait(sim, stream) -> None:
    sim.load(0, [ADD])
    x, one, host = floats(sim, 1, 0), floats(sim, 1, 9), sim.host_alloc(8)
    bytes_at(host, 8).view(np.float32)[:] = (1, 0)
    sim.begin_capture(stream)
    sim.copy(one, host, 4, stream)
    sim.launch(add_launch(x, one, 1), stream)
    sim.copy(host + 4, x, 4, stream)
    graph = sim.end_capture(stream)
    sim.launch_graph(graph, stream)
    assert (at(x), at(host + 4)) == (1, 0)
    refuses(sim, "destroy_graph: its copy of 4 bytes", lambda: sim.destroy_graph(graph))
    sim.synchronize(stream)
    assert at(host + 4) == 1
    sim.destroy_graph(graph)


@pytest.mark.parametrize("replays", [0, 2])
def test_a_graph_that_uses_freed_memory_is_not_run(sim, stream, replays) -> None:
    sim.load(0, [ADD])
    x, y = floats(sim, 1, 0), floats(sim, 1, 1)
    sim.begin_capture(stream)
    sim.launch(add_launch(x, y, 1), stream)
    graph = sim.end_capture(stream)
    for _ in range(replays):  # a launch that was sound is looked at again
        sim.launch_graph(graph, stream)
    sim.free(0, y)
    refuses(sim, "was freed", lambda: sim.launch_graph(graph, stream))


@pytest.mark.parametrize("kind", ["host_alloc", "registered"])
def test_a_graph_that_uses_unpinned_memory_is_not_run(make, kind) -> None:
    sim = make(aliases="apart")
    stream = sim.create_stream(0)
    sim.load(0, [ADD])
    x, block = floats(sim, 1, 0), np.ones(2 * 4096, np.uint8)
    host = sim.host_alloc(4096) if kind == "host_alloc" else -(-block.ctypes.data // 4096) * 4096
    if kind == "registered":
        sim.register(host, 4096)
    sim.begin_capture(stream)
    sim.launch(add_launch(x, sim.alias(host, 0), 1), stream)
    graph = sim.end_capture(stream)
    sim.launch_graph(graph, stream)
    sim.synchronize(stream)
    (sim.host_free if kind == "host_alloc" else sim.unregister)(host)
    refuses(sim, "no device addresses", lambda: sim.launch_graph(graph, stream))


# --- the launcher ------------------------------------------------------------------------------


def test_the_launcher_is_called_from_many_threads(sim, graph) -> None:
    number, x = graph
    launch = LAUNCHER(sim.graph_launcher)
    streams = [sim.create_stream(0) for _ in range(4)]
    codes: list[int] = []

    def work(stream: int) -> None:
        codes.extend(launch(number, stream) for _ in range(100))

    threads = [threading.Thread(target=work, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert codes == [0] * 400
    assert at(x) == 400
    assert sim.report()["launcher_calls"] == 400
    assert not sim.breaches


def test_compiled_code_calls_the_launcher_without_the_interpreters_lock(
    sim, stream, graph, tmp_path
) -> None:
    number, x = graph
    compiler = Compiler(host_target(), tmp_path, print)
    module = compiler.module("launch_test")
    kind = ir.FunctionType(I32, [I64, I64])
    with (
        step(module, "launch", ("function", "graph", "stream", "out")) as (e, a, begin, end),
        e.loop(begin, end) as u,
    ):
        e.store(e.call_address(a.function, kind, a.graph, a.stream), a.out + u * 4)
    code = compiler.compile(module)
    out = np.full(50, 7, np.int32)
    block = np.array([sim.graph_launcher, number, stream, out.ctypes.data], np.int64)
    units = np.array([50], np.int64)
    call = StepCall(code.address("launch"), block.ctypes.data, units.ctypes.data)
    pool = Pool(compiler, 3)
    try:
        pool.run(Schedule.of([Phase((call,), False)]))
    finally:
        pool.close()
    assert (out == 0).all()
    assert at(x) == 50


@pytest.mark.parametrize("handles", ["none", "wrong"])
def test_what_fails_in_the_launcher_is_raised_by_the_next_verb(sim, stream, graph, handles) -> None:
    launch = LAUNCHER(sim.graph_launcher)
    assert launch(None if handles == "none" else 5, stream) != 0
    assert len(sim.breaches) == 1
    assert launch(graph[0], stream) != 0, "the error is pending"
    with pytest.raises(DeviceError, match="graph_launcher: there is no graph"):
        sim.synchronize(stream)
    with pytest.raises(DeviceError, match="was pending"):
        sim.synchronize(stream)
    assert sim.take_error() == "invalid resource handle (error 400)"
    assert launch(graph[0], stream) == 0


@pytest.mark.parametrize("kernel", ["explode", "interrupt"])
def test_a_kernel_that_fails_in_the_launcher(sim, stream, kernel) -> None:
    key = KernelKey(kernel)
    sim.load(0, [key])
    sim.begin_capture(stream)
    sim.launch(Launch(key, (1, 1, 1), (1, 1, 1), 0, b""), stream)
    graph = sim.end_capture(stream)
    assert LAUNCHER(sim.graph_launcher)(graph, stream) != 0
    with pytest.raises(KeyboardInterrupt if kernel == "interrupt" else DeviceError):
        sim.memory(0)
    assert sim.take_error()
    sim.memory(0)
    assert LAUNCHER(sim.graph_launcher)(graph, stream) != 0
    if kernel == "interrupt":
        with pytest.raises(KeyboardInterrupt):
            sim.take_error()
        assert sim.take_error() is None
    else:
        assert sim.take_error()


def test_a_closed_runtime_launches_nothing(sim, stream, graph) -> None:
    launch = LAUNCHER(sim.graph_launcher)
    sim.close()
    assert launch(graph[0], stream) != 0
