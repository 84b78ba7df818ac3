"""The plugin's verbs over a stand-in for CUDA: the suite of verbs, and every way of failing."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from attrs import evolve

sys.path.insert(0, str(Path(__file__).parent))

from fake_cuda import GIB, FakeCuda

from strata_core.errors import DeviceError, Refused
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.table import make_launch
from strata_core.runtime import KernelKey, Launch, WaitClock
from strata_core.testing.conformance.runtime import RuntimeSuite
from strata_core.testing.conformance.runtime_base import PAGE, pages
from strata_cuda import binding as cuda_binding
from strata_cuda import runtime as cuda_runtime
from strata_cuda.compiler import OPTIONS, Compiler, target_of
from strata_cuda.runtime import PLAIN_SHARED, CudaRuntime


class TestVerbs(RuntimeSuite):
    def make(self):
        self.cuda = FakeCuda()
        return CudaRuntime(self.cuda.binding())

    def add(self, x, y, count):
        return make_launch("add", x=x, y=y, rows=1, width=count)


@pytest.fixture
def cuda():
    return FakeCuda()


@pytest.fixture
def runtime(cuda):
    made = CudaRuntime(cuda.binding())
    made.bound = cuda.binding()
    made.open_context(0)
    yield made
    made.close()


CALLS = {
    "setDevice": lambda r, s: r.memory(0),
    "memGetInfo": lambda r, s: r.memory(0),
    "malloc": lambda r, s: r.alloc(0, 100),
    "free": lambda r, s: r.free(0, 0),
    "hostAlloc": lambda r, s: r.host_alloc(100),
    "freeHost": lambda r, s: r.host_free(1),
    "hostRegister": lambda r, s: r.register(PAGE, PAGE),
    "hostUnregister": lambda r, s: r.unregister(PAGE),
    "streamCreateWithFlags": lambda r, s: r.create_stream(0),
    "streamDestroy": lambda r, s: r.destroy_stream(s),
    "eventCreateWithFlags": lambda r, s: r.create_event(0),
    "eventRecord": lambda r, s: r.record(r.create_event(0), s),
    "eventElapsedTime": lambda r, s: elapsed(r),
    "streamWaitEvent": lambda r, s: r.wait(s, r.create_event(0)),
    "streamSynchronize": lambda r, s: r.synchronize(s),
    "memcpyAsync": lambda r, s: r.copy(1, 2, 3, s),
    "memsetAsync": lambda r, s: r.fill(1, 0, 3, s),
    "streamBeginCapture": lambda r, s: r.begin_capture(s),
    "streamEndCapture": lambda r, s: captured(r, s),
    "graphInstantiate": lambda r, s: captured(r, s),
    "graphDestroy": lambda r, s: captured(r, s),
    "graphExecDestroy": lambda r, s: r.destroy_graph(captured(r, s)),
    "graphLaunch": lambda r, s: r.launch_graph(captured(r, s), s),
    "eventDestroy": lambda r, s: r.destroy_event(r.create_event(0)),
    "getSupportedArchs": lambda r, s: r.load(0, [KernelKey("add")]),
    "moduleLoadData": lambda r, s: r.load(0, [KernelKey("add")]),
    "moduleGetFunction": lambda r, s: r.load(0, [KernelKey("add")]),
    "funcSetAttribute": lambda r, s: launched(r, s, shared=PLAIN_SHARED + 1),
    "getDeviceCount": lambda r, s: CudaRuntime(r.bound).devices(),
    "getDeviceProperties": lambda r, s: CudaRuntime(r.bound).devices(),
}

ELSEWHERE = {"eventQuery", "check_status", "cuLaunchKernel", "pointerGetAttributes",
             "deviceSynchronize", "moduleUnload"}  # fmt: skip
"""What tests of their own make fail: answers of another form, and what stops nothing."""


def test_kernels_count_nanoseconds(runtime):
    assert runtime.wait_clock(0) == WaitClock(1e9)
    with pytest.raises(DeviceError, match="no context"):
        runtime.wait_clock(1)


def elapsed(runtime):
    return runtime.elapsed(*(runtime.create_timed_event(0) for _ in range(2)))


def captured(runtime, stream):
    runtime.begin_capture(stream)
    return runtime.end_capture(stream)


def launched(runtime, stream, shared):
    made = make_launch("add", x=0, y=0, rows=0, width=0)
    runtime.load(0, [made.kernel])
    runtime.launch(Launch(made.kernel, (1, 1, 1), (1, 1, 1), shared, made.args), stream)


def test_every_function_of_the_table_is_made_to_fail():
    source = Path(cuda_runtime.__file__).read_text()
    by_name = set(re.findall(r'''call\("(\w+)"''', source))
    own = set(re.findall(r"(?:self\._cuda|\bmodules)\.([a-z]\w+)", source))
    assert by_name | own | {"getSupportedArchs", "cuLaunchKernel"} == set(CALLS) | ELSEWHERE


def test_memory_without_an_alias(cuda, runtime):
    cuda.fail = {"pointerGetAttributes": 1}
    address = runtime.host_alloc(100)
    assert runtime.alias(address, 0) is None
    assert runtime.take_error() is None


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("status", "kind"), [(2, Refused), (700, DeviceError)])
def test_a_failure_is_mapped_told_once_and_changes_nothing(cuda, runtime, name, status, kind):
    stream = runtime.create_stream(0)
    cuda.fail = {name: status}
    with pytest.raises(DeviceError) as caught:
        CALLS[name](runtime, stream)
    if name != "getSupportedArchs":
        assert type(caught.value) is kind
        assert f"{name} answers cudaError{status}: a text ({status})" in caught.value.why
    assert caught.value.remedy
    cuda.fail = {}
    runtime.take_error()
    assert runtime.take_error() is None
    runtime.synchronize(stream)


def test_the_pending_error_is_the_threads_last(cuda, runtime):
    assert runtime.take_error() is None
    with pytest.raises(Refused):
        runtime.alloc(0, 2 * GIB)
    assert runtime.take_error() == "malloc answers cudaError2: a text (2)"
    assert runtime.take_error() is None


@pytest.mark.parametrize("status", [304, 801])
def test_a_system_that_locks_no_pages_refuses(cuda, runtime, status):
    cuda.fail = {"hostRegister": status}
    with pages(1) as host, pytest.raises(Refused):
        runtime.register(host, PAGE)


def test_every_verb_works_on_the_device_that_it_concerns(cuda, runtime):
    runtime.open_context(1)
    streams = [runtime.create_stream(device) for device in (0, 1)]
    assert cuda.device == 1
    runtime.synchronize(streams[0])
    assert cuda.device == 0
    runtime.alloc(1, 10)
    assert cuda.device == 1
    assert runtime.memory(0).free > runtime.memory(1).free


def test_a_context_comes_first(cuda):
    runtime = CudaRuntime(cuda.binding())
    assert [d.label for d in runtime.devices()] == ["CUDA0", "CUDA1"]
    assert cuda.device is None
    with pytest.raises(DeviceError, match="no context is open on CUDA0"):
        runtime.alloc(0, 100)
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


def test_an_event_that_waits_and_one_that_failed(cuda, runtime):
    event = runtime.create_event(0)
    cuda.fail = {"event": 600}
    assert not runtime.finished(event)
    cuda.fail = {"event": 719}
    with pytest.raises(DeviceError, match="719"):
        runtime.finished(event)


def test_launching(cuda, runtime):
    stream = runtime.create_stream(0)
    launch = make_launch("add", x=0, y=0, rows=0, width=0)
    with pytest.raises(DeviceError, match="was not loaded"):
        runtime.launch(launch, stream)
    runtime.load(0, [launch.kernel, launch.kernel])
    runtime.load(0, [launch.kernel])
    assert cuda.calls["moduleLoadData"] == 1
    large = Launch(launch.kernel, (1, 1, 1), (1, 1, 1), 100 << 10, launch.args)
    for _ in range(2):
        runtime.launch(large, stream)
    assert cuda.calls["funcSetAttribute"] == 1
    cuda.fail = {"cuLaunchKernel": 2}
    with pytest.raises(Refused, match=r"cuLaunchKernel answers CUDA_ERROR_2 \(2\)"):
        runtime.launch(launch, stream)


@pytest.mark.parametrize(("major", "early"), [(8, 0), (9, 1), (12, 1)])
def test_early_launches_where_the_device_can(cuda, major, early):
    cuda.major = major
    runtime = CudaRuntime(cuda.binding())
    runtime.open_context(0)
    stream = runtime.create_stream(0)
    launch = make_launch("add", x=0, y=0, rows=0, width=0)
    runtime.load(0, [launch.kernel])
    runtime.launch(launch, stream)
    runtime.launch(evolve(launch, early=True), stream)
    assert cuda.early == early
    assert runtime.devices()[0].shared == 227 << 10
    runtime.close()


@pytest.mark.parametrize(("major", "matrix"), [(6, False), (7, True), (9, True), (12, True)])
def test_matrix_units_where_the_device_has_them(cuda, major, matrix):
    cuda.major, cuda.minor = major, 5
    runtime = CudaRuntime(cuda.binding())
    assert runtime.devices()[0].matrix is matrix
    runtime.close()


def test_close_frees_everything_whatever_fails(cuda):
    runtime = CudaRuntime(cuda.binding())
    for device in (0, 1):
        runtime.open_context(device)
        stream = runtime.create_stream(device)
        runtime.create_event(device)
        runtime.alloc(device, 100)
        runtime.begin_capture(stream)
        runtime.end_capture(stream)
    runtime.load(1, [KernelKey("add")])
    runtime.host_alloc(100)
    with pages(1) as host:
        runtime.register(host, PAGE)
        cuda.fail = {"deviceSynchronize": 700}
        runtime.close()
    assert not cuda.blocks
    assert not cuda.host
    assert not cuda.registered
    assert {kind.split()[0] for kind in cuda.handles.values()} <= {"function"}
    runtime.close()


def test_code_is_compiled_once_and_then_read(cuda, tmp_path):
    cache = CodeCache(tmp_path, print)
    for compiled in (1, 0):
        compiler = Compiler(cuda.binding(), cache)
        made = compiler.obtain(KernelKey("add"), "sm_90")
        assert (made.code, made.entry, compiler.compiled) == (b"cubin", "add_rows", compiled)
    assert cuda.options == [("--gpu-architecture=sm_90", *OPTIONS)]
    assert Compiler(cuda.binding(), cache).obtain(KernelKey("add"), "sm_120").code == b"ptx"
    assert "program" not in cuda.handles.values()


def test_targets():
    assert target_of("sm_90", (75, 90)) == "sm_90"
    assert target_of("sm_120", (75, 90)) == "compute_90"
    with pytest.raises(DeviceError, match="CUDA 12"):
        target_of("sm_70", (75, 90))


def test_a_source_that_is_rejected(cuda):
    cuda.fail = {"compileProgram": 6}
    with pytest.raises(DeviceError) as caught:
        Compiler(cuda.binding()).obtain(KernelKey("signal"), "sm_90")
    assert "does not compile for sm_90" in caught.value.what
    assert caught.value.why == "x.cu(7): error: no such thing"
    assert "program" not in cuda.handles.values()


def test_no_compiler(cuda):
    cuda.fail = {"getSupportedArchs": 1}
    with pytest.raises(DeviceError, match="no NVRTC"):
        Compiler(cuda.binding()).obtain(KernelKey("signal"), "sm_90")


def test_what_is_missing_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(DeviceError, match="CuPy is not installed"):
        cuda_binding.load_binding()
    with pytest.raises(DeviceError, match="driver's library cannot be opened"):
        cuda_binding.open_driver(("libno-such-driver.so",))
