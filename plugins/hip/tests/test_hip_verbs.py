"""The plugin's verbs over a stub of the HIP library: the suite of verbs, and every way of failing.

Through the stand-in for hip-python here; where STRATA_HIP_TEST_BINDING is "real" and ROCM_PATH the
stub's folder, through the hip-python that is installed (tests/test_hip_binding.py starts that).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import stub

from strata_core.errors import DeviceError, Refused
from strata_core.interfaces import BackendContext
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.options import used_devices
from strata_core.kernels.device.table import make_launch
from strata_core.runtime import KernelKey, Launch, WaitClock
from strata_core.testing.conformance.runtime import RuntimeSuite
from strata_core.testing.conformance.runtime_base import PAGE, pages
from strata_hip import plugin
from strata_hip.binding import Binding, load_binding
from strata_hip.compiler import Compiler
from strata_hip.library import NEEDED
from strata_hip.probe import ask_devices
from strata_hip.runtime import HipRuntime, describe_all

GIB = 1 << 30
REAL = os.environ.get("STRATA_HIP_TEST_BINDING") == "real"
ADD = KernelKey("add")

pytestmark = pytest.mark.skipif(stub.compiler() is None, reason="there is no C compiler")


@pytest.fixture(scope="session")
def rocm(tmp_path_factory):
    """ROCM_PATH of the stub."""
    if REAL:
        return Path(os.environ["ROCM_PATH"])
    return stub.build(tmp_path_factory.mktemp("rocm"))


@pytest.fixture(scope="session")
def binding(rocm):
    return load_binding() if REAL else Binding(*stub.stand_in(rocm), "hip")


@pytest.fixture(scope="session")
def control(rocm, binding):
    return stub.Control(rocm)


@pytest.fixture(autouse=True)
def nothing_is_left(control):
    yield
    control.fail()
    assert control.alive() == {}


@pytest.fixture
def make(binding):
    return lambda: HipRuntime(binding, Compiler(binding, CodeCache(None, print)))


@pytest.fixture
def runtime(make, control, binding):
    made = make()
    made.bound = binding
    made.open_context(0)
    yield made
    control.fail()
    made.close()


class TestVerbs(RuntimeSuite):
    @pytest.fixture(autouse=True)
    def parts(self, make):
        self.make = make

    def add(self, x, y, count):
        return make_launch("add", x=x, y=y, rows=1, width=count)


def test_what_the_runtime_says_of_devices(binding):
    one, two = describe_all(binding)
    assert (one.label, one.name, one.architecture) == ("HIP0", "Stub", "gfx1030")
    assert (one.total, one.units, one.warp) == (GIB, 36, 32)
    assert (two.label, two.architecture) == ("HIP1", "gfx90a")


@pytest.fixture
def graphics_core_first(control):
    """The first device is one that there are no kernels for."""
    control.architecture(0, "gfx90c")
    yield
    control.architecture(0, "gfx1030")


@pytest.mark.usefixtures("graphics_core_first")
@pytest.mark.parametrize(("options", "used"), [({}, (1,)), ({"device": (1,)}, (1,))])
def test_a_device_without_kernels_is_passed_over(binding, monkeypatch, record, options, used):
    monkeypatch.setattr("strata_hip.binding.load_binding", lambda: binding)
    (made,) = plugin.strata_backends()
    machine = record({"hip:devices": ask_devices(), "module:llvmlite": True})
    assert used_devices(options, made.devices(machine, options))[0].index == used[0]
    given = {**options, "threads": 1}
    backend = made.build(BackendContext(machine=machine, options=given, degrade=pytest.fail))
    assert backend.devices == used
    backend.open_contexts()
    backend.runtime.load(used[0], [ADD])
    backend.close()


@pytest.mark.usefixtures("graphics_core_first")
def test_a_device_without_kernels_that_was_named_is_refused(runtime):
    with pytest.raises(DeviceError, match="kernels cannot be compiled for 'gfx90c'") as caught:
        runtime.load(0, [ADD])
    assert "are served" in caught.value.remedy


# --- one verb at a time ------------------------------------------------------------------------

CALLS = {
    "hipSetDevice": lambda r, s: r.memory(0),
    "hipMemGetInfo": lambda r, s: r.memory(0),
    "hipMalloc": lambda r, s: r.alloc(0, 100),
    "hipFree": lambda r, s: r.free(0, 0),
    "hipHostMalloc": lambda r, s: r.host_alloc(100),
    "hipHostFree": lambda r, s: r.host_free(1),
    "hipHostRegister": lambda r, s: r.register(PAGE, PAGE),
    "hipHostUnregister": lambda r, s: r.unregister(PAGE),
    "hipStreamCreateWithFlags": lambda r, s: r.create_stream(0),
    "hipStreamDestroy": lambda r, s: r.destroy_stream(s),
    "hipEventCreateWithFlags": lambda r, s: r.create_event(0),
    "hipEventRecord": lambda r, s: r.record(r.create_event(0), s),
    "hipEventQuery": lambda r, s: r.finished(r.create_event(0)),
    "hipEventElapsedTime": lambda r, s: elapsed(r),
    "hipStreamWaitEvent": lambda r, s: r.wait(s, r.create_event(0)),
    "hipStreamSynchronize": lambda r, s: r.synchronize(s),
    "hipMemcpyAsync": lambda r, s: r.copy(1, 2, 3, s),
    "hipMemsetAsync": lambda r, s: r.fill(1, 0, 3, s),
    "hipStreamBeginCapture": lambda r, s: r.begin_capture(s),
    "hipStreamEndCapture": lambda r, s: captured(r, s),
    "hipGraphInstantiateWithFlags": lambda r, s: captured(r, s),
    "hipGraphDestroy": lambda r, s: captured(r, s),
    "hipGraphExecDestroy": lambda r, s: r.destroy_graph(captured(r, s)),
    "hipGraphLaunch": lambda r, s: r.launch_graph(captured(r, s), s),
    "hipEventDestroy": lambda r, s: r.destroy_event(r.create_event(0)),
    "hipModuleLoadData": lambda r, s: r.load(0, [ADD]),
    "hipModuleGetFunction": lambda r, s: r.load(0, [ADD]),
    "hipModuleLaunchKernel": lambda r, s: launched(r, s),
    "hipGetDeviceCount": lambda r, s: describe_all(r.bound),
    "hipGetDevicePropertiesR0600": lambda r, s: describe_all(r.bound),
    "hipRuntimeGetVersion": lambda r, s: Compiler(r.bound).version(),
}

QUIET = {
    "hipGetLastError", "hipHostGetDevicePointer", "hipDeviceSynchronize", "hipModuleUnload",
    "hipDeviceGetAttribute",
}  # fmt: skip
"""Whose failure stops nothing: asking for an error, an alias, a clock; what `close` alone does."""


def test_the_kernels_clock(control, runtime, monkeypatch):
    assert runtime.wait_clock(0) == WaitClock(1e8)
    kinds = runtime.bound.hip.hipDeviceAttribute_t
    other = getattr(kinds, "hipDeviceAttributeMaxThreadsPerBlock", 3)
    kinds = SimpleNamespace(hipDeviceAttributeWallClockRate=other)  # an enum cannot be changed
    monkeypatch.setattr(runtime.bound.hip, "hipDeviceAttribute_t", kinds)
    unknown = runtime.wait_clock(0)
    assert unknown.ticks == 0
    assert "does not tell" in unknown.why_not
    assert runtime.take_error() is None
    monkeypatch.delattr(runtime.bound.hip, "hipDeviceAttribute_t")
    assert runtime.wait_clock(0) == unknown


def elapsed(runtime):
    return runtime.elapsed(*(runtime.create_timed_event(0) for _ in range(2)))


def captured(runtime, stream):
    runtime.begin_capture(stream)
    return runtime.end_capture(stream)


def launched(runtime, stream):
    place = runtime.alloc(0, 64)
    runtime.load(0, [ADD])
    runtime.launch(make_launch("add", x=place, y=place, rows=1, width=16), stream)


def test_every_function_is_made_to_fail():
    assert set(CALLS) | QUIET == set(NEEDED)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("status", "kind"), [(2, Refused), (700, DeviceError)])
def test_a_failure_is_typed_told_once_and_changes_nothing(control, runtime, name, status, kind):
    stream = runtime.create_stream(0)
    control.fail(1, status, name)
    with pytest.raises(DeviceError) as caught:
        CALLS[name](runtime, stream)
    word = {2: "hipErrorOutOfMemory", 700: "hipErrorIllegalAddress"}[status]
    assert control.failed == name
    assert type(caught.value) is kind
    called = name.removesuffix("R0600")  # the binding's name for it
    assert caught.value.why == f"{called} answers {word} ({status})"
    assert caught.value.remedy
    assert runtime.take_error() == f"{word} ({status})"
    assert runtime.take_error() is None
    control.fail()
    if name == "hipStreamEndCapture":  # the stream still records
        runtime.destroy_graph(runtime.end_capture(stream))
    runtime.synchronize(stream)
    if name == "hipGraphDestroy":  # it was not freed, and there is no handle to try again with
        runtime.close()
        assert control.alive() == {"graph": 1}
        control.library.stub_sweep()


@pytest.mark.parametrize("status", [304, 801])
def test_a_system_that_locks_no_pages_refuses(control, runtime, status):
    control.fail(1, status, "hipHostRegister")
    with pages(1) as host, pytest.raises(Refused, match="ulimit"):
        runtime.register(host, PAGE)


def test_memory_without_an_alias(control, runtime):
    control.fail(1, 1, "hipHostGetDevicePointer")
    address = runtime.host_alloc(100)
    assert runtime.alias(address, 0) is None
    assert runtime.take_error() is None


def test_an_event_that_waits(control, runtime):
    event = runtime.create_event(0)
    control.fail(1, 600, "hipEventQuery")
    assert not runtime.finished(event)
    assert runtime.take_error() is None
    assert runtime.finished(event)


def test_every_verb_works_on_the_device_that_it_concerns(control, runtime):
    runtime.open_context(1)
    streams = [runtime.create_stream(device) for device in (0, 1)]
    assert control.device == 1
    runtime.synchronize(streams[0])
    assert control.device == 0
    runtime.alloc(1, 10)
    assert control.device == 1
    runtime.host_alloc(10)
    assert control.device == 0
    assert runtime.memory(0).free > runtime.memory(1).free


def test_a_context_comes_first(make):
    runtime = make()
    for verb in (lambda: runtime.alloc(0, 100), lambda: runtime.host_alloc(100)):
        with pytest.raises(DeviceError, match="no context is open on HIP0"):
            verb()
    with pytest.raises(DeviceError, match="there are 2 devices"):
        runtime.open_context(2)


def test_handles_are_told_apart(runtime):
    stream, event = runtime.create_stream(0), runtime.create_event(0)
    for verb in (runtime.synchronize, runtime.destroy_stream):
        with pytest.raises(DeviceError, match="is no stream"):
            verb(event)
    with pytest.raises(DeviceError, match="is no event"):
        runtime.finished(stream)
    with pytest.raises(DeviceError, match="is no graph"):
        runtime.launch_graph(stream, stream)


def test_launching(runtime):
    stream = runtime.create_stream(0)
    place = runtime.alloc(0, 64)
    launch = make_launch("add", x=place, y=place, rows=1, width=16)
    with pytest.raises(DeviceError, match="was not loaded"):
        runtime.launch(launch, stream)
    runtime.load(0, [ADD, ADD])
    runtime.launch(launch, stream)
    wrong = Launch(ADD, (1, 1, 1), (2048, 1, 1), 0, launch.args)
    with pytest.raises(DeviceError, match=r"hipErrorInvalidValue \(1\)"):
        runtime.launch(wrong, stream)


def test_kernels_are_loaded_once(control, runtime):
    for _ in range(3):
        runtime.load(0, [ADD, ADD])
    assert control.alive() == {"module": 1}


# --- every call of a whole life ----------------------------------------------------------------


def live(runtime) -> None:
    """Something of everything, given back at the end but for a little that `close` frees."""
    runtime.open_context(0)
    runtime.open_context(1)
    runtime.load(0, [ADD])
    stream, event = runtime.create_stream(0), runtime.create_event(0)
    kept, block, host = runtime.alloc(1, 300), runtime.alloc(0, 4096), runtime.host_alloc(8192)
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
            runtime.destroy_graph(graph)
            assert runtime.memory(0).free < GIB
            runtime.free(0, block)
            runtime.host_free(host)
            runtime.destroy_event(event)
            runtime.destroy_stream(stream)
        finally:
            runtime.close()


def count_calls(control, make) -> int:
    control.fail()
    live(make())
    return control.calls


FREEING = {
    "hipStreamDestroy", "hipEventDestroy", "hipGraphDestroy", "hipGraphExecDestroy", "hipFree",
    "hipHostFree", "hipHostUnregister", "hipModuleUnload", "hiprtcDestroyProgram",
}  # fmt: skip


@pytest.mark.parametrize("status", [2, 700])
def test_each_call_may_fail_and_nothing_is_lost(control, make, status):
    """The n-th call of a life fails, for each n: typed, cleaned up, and the next life is whole.

    Lost is at most the one thing that the library itself refused to free.
    """
    total = count_calls(control, make)
    assert total > 60
    failed, told = set(), []
    for nth in range(1, total + 1):
        runtime = make()
        control.fail(nth, status)
        try:
            live(runtime)
        except DeviceError as error:
            told.append(error)
        failed.add(control.failed)
        control.fail()
        runtime.close()
        lost = control.alive()
        assert sum(lost.values()) <= (control.failed in FREEING), (nth, control.failed, lost)
        control.library.stub_sweep()
    assert len(told) > total / 2
    assert all(str(status) in e.why or e.why == "no such arm" for e in told)
    assert {type(e) for e in told} == ({Refused, DeviceError} if status == 2 else {DeviceError})
    assert failed >= CALLS.keys() - {"hipHostFree"}
    live(make())


def test_close_frees_everything_whatever_fails(control, make):
    runtime = make()
    for device in (0, 1):
        runtime.open_context(device)
        stream = runtime.create_stream(device)
        runtime.create_event(device)
        runtime.alloc(device, 100)
        runtime.begin_capture(stream)
        runtime.end_capture(stream)
    runtime.load(1, [ADD])
    runtime.host_alloc(100)
    with pages(1) as host:
        runtime.register(host, PAGE)
        control.fail(1, 700, "hipDeviceSynchronize")
        runtime.close()
    assert control.alive() == {}
    runtime.close()


# --- compiling ---------------------------------------------------------------------------------


def test_code_is_compiled_once_and_then_read(control, binding, tmp_path):
    cache = CodeCache(tmp_path, print)
    for calls in (8, 1):
        control.fail()
        made = Compiler(binding, cache).obtain(ADD, "gfx1030")
        assert (made.code, made.entry) == (b"code\0", "add_rows")
        assert control.calls <= calls


def test_a_source_that_is_rejected(control, binding):
    control.fail(1, 5, "hiprtcCompileProgram")
    with pytest.raises(DeviceError) as caught:
        Compiler(binding, CodeCache(None, print)).obtain(ADD, "gfx1030")
    assert caught.value.what == "compile strata_add.cu for gfx1030 failed"
    assert caught.value.why == "no such arm"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gfx9999", "none of the architectures"),
        ("gfx1030 -x", "none of the architectures"),
        ("sm_90", "none of the architectures"),
        ("gfx950", ""),
    ],
)
def test_an_unknown_architecture_never_reaches_the_compiler(control, binding, name, why):
    """The real one of HIP 5.2 ends the process."""
    control.fail()
    compiler = Compiler(binding, CodeCache(None, print))
    if not why:
        assert compiler.obtain(ADD, name).code
        return
    with pytest.raises(DeviceError, match=why):
        compiler.obtain(ADD, name)
    assert control.calls <= 1
