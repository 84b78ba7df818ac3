"""The verbs over a driver's functions: the suite, every call failing, and any order of verbs."""

from __future__ import annotations

import sys
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parent))

from host_driver import FREEING, REFUSING, HostDriver

from strata_core.errors import DeviceError, Refused
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.driver import DriverCalls, obtain_code
from strata_core.kernels.device.driver_runtime import DriverRuntime
from strata_core.kernels.device.sources import source_of
from strata_core.kernels.device.table import make_launch
from strata_core.runtime import KernelKey, WaitClock
from strata_core.testing.conformance.runtime import RuntimeSuite
from strata_core.testing.conformance.runtime_base import PAGE, pages

ADD = KernelKey("add")


def over(driver: HostDriver, compilers: int = 1) -> DriverRuntime:
    return DriverRuntime("HOST", driver.table(), driver.obtain, compilers=compilers)


@pytest.fixture
def driver():
    return HostDriver()


class TestVerbs(RuntimeSuite):
    def make(self):
        return over(HostDriver())

    def add(self, x, y, count):
        return make_launch("add", x=x, y=y, rows=1, width=count)


# --- every call of a life ----------------------------------------------------------------------


QUIET = {"alias", "wait_for_device", "set_device", *FREEING}
"""Calls whose failure need not stop anything: what `close` does, and asking for an alias."""


def live(runtime: DriverRuntime) -> None:
    """Something of everything; much is left for `close`."""
    for device in (0, 1):
        runtime.open_context(device)
        runtime.load(device, [ADD, KernelKey("signal"), ADD])
        assert runtime.wait_clock(device) == WaitClock(1e8 * (device + 1))
    stream, event = runtime.create_stream(0), runtime.create_event(1)
    kept, block, host = runtime.alloc(1, 300), runtime.alloc(0, PAGE), runtime.host_alloc(PAGE)
    assert kept
    with pages(1) as plain:
        runtime.register(plain, PAGE)
        try:
            runtime.copy(block, plain, PAGE, stream)
            runtime.fill(block, 0, PAGE, stream)
            runtime.record(event, stream)
            runtime.wait(stream, event)
            assert runtime.finished(event)
            timed = runtime.create_timed_event(0)
            runtime.record(timed, stream)
            assert runtime.elapsed(timed, timed) == 0
            runtime.begin_capture(stream)
            runtime.launch(make_launch("add", x=block, y=block, rows=1, width=8), stream)
            graph = runtime.end_capture(stream)
            runtime.launch_graph(graph, stream)
            runtime.synchronize(stream)
            assert runtime.alias(host + 5, 1) in (host + 5, None)
            assert runtime.memory(0).free < runtime.memory(0).total
            runtime.destroy_graph(graph)
            runtime.destroy_stream(stream)
            runtime.destroy_event(event)
            runtime.unregister(plain)
            runtime.host_free(host)
            runtime.free(0, block)
        finally:
            runtime.close()


def test_each_call_may_fail_and_nothing_is_lost(driver):
    """Lost is at most the one thing that the driver itself did not free."""
    live(over(driver))
    total = sum(driver.calls.values())
    assert driver.left() == {}
    untried = {f.name for f in attrs.fields(DriverCalls)} - {"take_error", "graph_launcher"}
    for nth in range(1, total + 1):
        broken, told = HostDriver(), None
        broken.failing = nth
        runtime = over(broken)
        try:
            live(runtime)
        except DeviceError as error:
            told = error
        runtime.close()
        quiet = told is None
        assert quiet or type(told) is (Refused if broken.failed in REFUSING else DeviceError)
        assert quiet or broken.failed in told.why
        assert not quiet or broken.failed in QUIET
        assert sum(broken.left().values()) <= (broken.failed in FREEING), broken.failed
        untried.discard(broken.failed)
    assert untried == set()


OPERATIONS = ("alloc", "host", "stream", "event", "graph", "load", "undo")


@given(
    st.lists(st.tuples(st.sampled_from(OPERATIONS), st.integers(0, 1), st.integers(0, 9))),
    st.integers(0, 60),
)
def test_any_order_of_verbs_with_a_failure_leaves_nothing(steps, failing):
    """After each verb the driver has what succeeded and no more; after `close` it has nothing."""
    driver = HostDriver()
    runtime = over(driver)
    for device in (0, 1):
        runtime.open_context(device)
    driver.failing = sum(driver.calls.values()) + failing if failing else 0
    made = []

    def graph(device):
        stream = runtime.create_stream(device)
        made.append(("stream", lambda: runtime.destroy_stream(stream)))
        runtime.begin_capture(stream)
        return runtime.end_capture(stream)

    doing = {
        "alloc": (runtime.alloc, "block", lambda d, x: runtime.free(d, x)),
        "host": (lambda d, n: runtime.host_alloc(n), "pinned", lambda d, x: runtime.host_free(x)),
        "stream": (
            lambda d, n: runtime.create_stream(d),
            "stream",
            lambda d, x: runtime.destroy_stream(x),
        ),
        "event": (
            lambda d, n: runtime.create_event(d),
            "event",
            lambda d, x: runtime.destroy_event(x),
        ),
        "graph": (lambda d, n: graph(d), "graph", lambda d, x: runtime.destroy_graph(x)),
    }
    for name, device, number in steps:
        try:
            if name == "load":
                runtime.load(device, [ADD])
            elif name == "undo" and made:
                made[number % len(made)][1]()
                del made[number % len(made)]
            elif name != "undo":
                make, kind, undo = doing[name]
                got = make(device, number + 1)
                made.append((kind, lambda d=device, x=got, u=undo: u(d, x)))
        except DeviceError:
            assert driver.failed
        if driver.failed in FREEING or driver.failed in ("instantiate", "end_capture"):
            break  # the driver has one thing more than it told
        left = {k: n for k, n in driver.left().items() if k != "module"}
        assert left == {k: n for k, n in _counts(made).items() if n}
    runtime.close()
    assert sum(driver.left().values()) <= (driver.failed in FREEING)


def _counts(made):
    return {kind: sum(k == kind for k, _ in made) for kind, _ in made}


# --- one thing at a time -----------------------------------------------------------------------


def test_devices_are_asked_for_once(driver):
    runtime = over(driver)
    assert [d.label for d in runtime.devices()] == ["HOST0", "HOST1"]
    assert runtime.devices() is runtime.devices()
    assert driver.calls == {"describe": 1}
    assert runtime.label == "HOST"


def test_what_is_no_open_device_or_handle_is_told(driver):
    runtime = over(driver)
    with pytest.raises(DeviceError, match="there are 2 devices"):
        runtime.open_context(2)
    with pytest.raises(DeviceError, match="no context is open on HOST0"):
        runtime.host_alloc(1)
    runtime.open_context(0)
    with pytest.raises(DeviceError, match="no context is open on HOST1"):
        runtime.alloc(1, 1)
    stream, event = runtime.create_stream(0), runtime.create_event(0)
    with pytest.raises(DeviceError, match="is no stream of HOST's"):
        runtime.synchronize(event)
    with pytest.raises(DeviceError, match="is no graph of HOST's"):
        runtime.launch_graph(stream, stream)
    with pytest.raises(DeviceError, match="was not loaded on HOST0"):
        runtime.launch(make_launch("add", x=0, y=0, rows=1, width=1), stream)
    runtime.close()


def test_no_byte_is_page_locked_twice(driver):
    runtime = over(driver)
    runtime.open_context(0)
    with pages(3) as host:
        runtime.register(host + PAGE, PAGE)
        for address, nbytes in ((host, 2 * PAGE), (host + PAGE, PAGE)):
            with pytest.raises(DeviceError, match="page-locked already"):
                runtime.register(address, nbytes)
        runtime.register(host, PAGE)
        runtime.close()
    assert driver.left() == {}


def test_memory_that_the_driver_says_no_alias_of(driver):
    runtime = over(driver)
    runtime.open_context(0)
    driver.failing = sum(driver.calls.values()) + 3  # set_device, host_alloc, alias
    address = runtime.host_alloc(100)
    assert (driver.failed, runtime.alias(address, 0), runtime.take_error()) == ("alias", None, None)
    runtime.host_free(address)


def test_kernels_are_compiled_once_for_a_device_and_on_several_threads(driver):
    runtime = over(driver, compilers=4)
    keys = [ADD, *(KernelKey("embed", (t,)) for t in ("F32", "F16", "Q8_0")), ADD]
    for device in (0, 1, 0):
        runtime.open_context(device)
        runtime.load(device, keys)
    assert sorted(a for _, a, _ in driver.compiled) == ["host0"] * 4 + ["host1"] * 4
    assert driver.left() == {"module": 8}
    runtime.close()
    assert driver.left() == {}


def test_code_is_kept_under_all_that_decides_it(tmp_path):
    source, made = source_of(ADD), []

    def compile_(given):
        made.append(given.name)
        return b"code"

    cache = CodeCache(tmp_path, print)
    for facts in (("a", "1"), ("a", "1"), ("a", "2")):
        found = obtain_code(cache, source, facts, compile_)
        assert (found.code, found.entry) == (b"code", source.entry)
    assert len(made) == 2
    obtain_code(cache, source_of(KernelKey("signal")), ("a", "1"), compile_)
    obtain_code(None, source, ("a", "1"), compile_)
    assert len(made) == 4
