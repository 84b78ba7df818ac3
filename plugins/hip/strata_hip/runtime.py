"""The verbs of `strata_core.runtime` on the HIP runtime, through hip-python."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from threading import Lock
from typing import Any

from attrs import frozen

from strata_core.errors import DeviceError
from strata_core.memory.page_locked import Locked, PageLocked
from strata_core.runtime import Device, DeviceMemory, KernelKey, Launch
from strata_hip.binding import (
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    REPORT,
    Binding,
    answer_of,
    first_of,
    judged,
    opened_library,
)
from strata_hip.compiler import Compiler

PORTABLE_AND_MAPPED = 3
"""hipHostMallocPortable | hipHostMallocMapped, and the same of hipHostRegister."""

NON_BLOCKING, NO_TIMING = 1, 2
MEMCPY_DEFAULT = 4
CAPTURE_THREAD_LOCAL = 1
NOT_READY = 600
"""hipErrorNotReady: the answer of a query, no failure."""

BUFFER_POINTER, BUFFER_SIZE, BUFFER_END = 1, 2, 3
"""The marks in `extra` of hipModuleLaunchKernel."""


@frozen
class _Handle:
    """A stream, event or graph: its device, which of these it is, and the binding's object."""

    device: int
    kind: str
    made: Any


class HipRuntime:
    """One HIP runtime for all devices of the process. Thread-safe as `Runtime` asks."""

    label = "HIP"

    def __init__(self, binding: Binding, compiler: Compiler) -> None:
        """Nothing is opened yet."""
        self._binding = binding
        self._hip = self._binding.hip
        self._compiler = compiler
        self._lock = Lock()
        self._devices: tuple[Device, ...] | None = None
        self._opened: set[int] = set()
        self._homes: dict[int, _Handle] = {}
        self._memory: dict[int, int] = {}
        self._locked = PageLocked()
        self._functions: dict[tuple[int, KernelKey], Any] = {}
        self._modules: list[tuple[int, Any]] = []
        self._library: ctypes.CDLL | None = None

    def _call(
        self,
        verb: str,
        function: Any,
        *args: Any,
        refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
    ) -> Any:
        return self._binding.call(verb, function, *args, refusals=refusals)

    # devices

    def devices(self) -> Sequence[Device]:
        """All devices that the runtime lists."""
        if self._devices is None:
            self._devices = describe_all(self._binding)
        return self._devices

    def open_context(self, device: int) -> None:
        """Make the device current and allocate nothing, which opens its primary context."""
        if device in self._opened:
            return
        if not 0 <= device < len(self.devices()):
            raise DeviceError(
                f"open a context on HIP{device} failed",
                f"there are {len(self.devices())} devices",
                "name a device that `strata doctor` lists",
            )
        verb = f"open a context on HIP{device}"
        self._call(verb, self._hip.hipSetDevice, device)
        self._call(verb, self._hip.hipFree, None)
        with self._lock:
            self._opened.add(device)

    def _enter(self, device: int, verb: str) -> None:
        """Make a device this thread's current one."""
        if device not in self._opened:
            raise DeviceError(f"{verb} failed", f"no context is open on HIP{device}", REPORT)
        self._call(verb, self._hip.hipSetDevice, device)

    def memory(self, device: int) -> DeviceMemory:
        """What hipMemGetInfo says."""
        verb = f"ask for the memory of HIP{device}"
        self._enter(device, verb)
        free, total = self._call(verb, self._hip.hipMemGetInfo)
        return DeviceMemory(int(free), int(total))

    def take_error(self) -> str | None:
        """The last error of this thread, which asking clears; an event that waits is none."""
        status = first_of(answer_of("ask for the last error", self._hip.hipGetLastError))
        if int(status) in (0, NOT_READY):
            return None
        return f"{getattr(status, 'name', status)} ({int(status)})"

    # device memory

    def alloc(self, device: int, nbytes: int) -> int:
        """hipMalloc, whose addresses are aligned to 256 bytes and more."""
        verb = f"allocate {nbytes} bytes on HIP{device}"
        self._enter(device, verb)
        address = int(self._call(verb, self._hip.hipMalloc, nbytes))
        with self._lock:
            self._memory[address] = device
        return address

    def free(self, device: int, address: int) -> None:
        """hipFree."""
        verb = f"free memory on HIP{device}"
        self._enter(device, verb)
        self._call(verb, self._hip.hipFree, address)
        with self._lock:
            self._memory.pop(address, None)

    # host memory

    def host_alloc(self, nbytes: int) -> int:
        """hipHostMalloc, portable and mapped."""
        verb = f"allocate {nbytes} bytes of page-locked memory"
        self._enter_any(verb)
        address = int(self._call(verb, self._hip.hipHostMalloc, nbytes, PORTABLE_AND_MAPPED))
        self._locked.add(Locked(address, nbytes, self._device_pointer(address), registered=False))
        return address

    def host_free(self, address: int) -> None:
        """hipHostFree."""
        self._enter_any("free page-locked memory")
        self._call("free page-locked memory", self._hip.hipHostFree, address)
        self._locked.remove(address)

    def register(self, address: int, nbytes: int) -> None:
        """hipHostRegister, portable and mapped."""
        verb = f"page-lock {nbytes} bytes"
        self._enter_any(verb)
        if any(self._locked.holding(at) for at in (address, address + nbytes - 1)):
            raise DeviceError(f"{verb} failed", "part of it is page-locked already", REPORT)
        self._call(
            verb,
            self._hip.hipHostRegister,
            address,
            nbytes,
            PORTABLE_AND_MAPPED,
            refusals=(OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED),
        )
        self._locked.add(Locked(address, nbytes, self._device_pointer(address), registered=True))

    def unregister(self, address: int) -> None:
        """hipHostUnregister."""
        self._enter_any("unlock memory")
        self._call("unlock memory", self._hip.hipHostUnregister, address)
        self._locked.remove(address)

    def _enter_any(self, verb: str) -> None:
        """Make an open device current: page-locked memory belongs to all of them."""
        self._enter(min(self._opened, default=0), verb)

    def _device_pointer(self, address: int) -> int | None:
        try:
            found = self._call("ask for an alias", self._hip.hipHostGetDevicePointer, address, 0)
        except DeviceError:
            self.take_error()
            return None
        return int(found) or None

    def alias(self, address: int, device: int) -> int | None:
        """The alias that the range got when it was page-locked; all devices share it."""
        del device
        return self._locked.alias(address)

    # streams, events, copies

    def _keep(self, made: Any, device: int, kind: str) -> int:
        """The handle of what was made; the binding's object lives as long as it."""
        handle = int(made)
        with self._lock:
            self._homes[handle] = _Handle(device, kind, made)
        return handle

    def _home(self, handle: int, verb: str, kind: str) -> int:
        """The device that a handle belongs to."""
        found = self._homes.get(handle)
        if found is None or found.kind != kind:
            raise DeviceError(f"{verb} failed", f"{handle:#x} is no {kind} of HIP's", REPORT)
        return found.device

    def _on(self, handle: int, verb: str, kind: str) -> int:
        """Make current the device that a handle belongs to; its index."""
        device = self._home(handle, verb, kind)
        self._enter(device, verb)
        return device

    def _destroy(self, handle: int, kind: str, function: Any) -> None:
        self._on(handle, f"free {kind}", kind)
        self._call(f"free {kind}", function, handle)
        with self._lock:
            self._homes.pop(handle, None)

    def create_stream(self, device: int) -> int:
        """A stream that the default stream does not wait for."""
        verb = f"create a stream on HIP{device}"
        self._enter(device, verb)
        made = self._call(verb, self._hip.hipStreamCreateWithFlags, NON_BLOCKING)
        return self._keep(made, device, "stream")

    def destroy_stream(self, stream: int) -> None:
        """hipStreamDestroy."""
        self._destroy(stream, "stream", self._hip.hipStreamDestroy)

    def create_event(self, device: int) -> int:
        """An event without timing."""
        verb = f"create an event on HIP{device}"
        self._enter(device, verb)
        made = self._call(verb, self._hip.hipEventCreateWithFlags, NO_TIMING)
        return self._keep(made, device, "event")

    def destroy_event(self, event: int) -> None:
        """hipEventDestroy."""
        self._destroy(event, "event", self._hip.hipEventDestroy)

    def record(self, event: int, stream: int) -> None:
        """hipEventRecord."""
        self._home(event, "record an event", "event")
        self._on(stream, "record an event", "stream")
        self._call("record an event", self._hip.hipEventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """hipStreamWaitEvent; the event may be another device's."""
        self._home(event, "wait for an event", "event")
        self._on(stream, "wait for an event", "stream")
        self._call("wait for an event", self._hip.hipStreamWaitEvent, stream, event, 0)

    def finished(self, event: int) -> bool:
        """hipEventQuery. Raises DeviceError where the work before the event failed."""
        self._on(event, "ask for an event", "event")
        answer = answer_of("ask for an event", self._hip.hipEventQuery, event)
        if int(first_of(answer)) == NOT_READY:
            return False
        judged("ask for an event", "hipEventQuery", answer)
        return True

    def synchronize(self, stream: int) -> None:
        """hipStreamSynchronize."""
        self._on(stream, "wait for a stream", "stream")
        self._call("wait for a stream", self._hip.hipStreamSynchronize, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """hipMemcpyAsync; the runtime finds out what lies where."""
        verb = f"copy {nbytes} bytes"
        self._on(stream, verb, "stream")
        if not nbytes:
            return
        if self._locked.split(target, nbytes) or self._locked.split(source, nbytes):
            raise DeviceError(f"{verb} failed", "the host's side lies in two registrations", REPORT)
        self._call(verb, self._hip.hipMemcpyAsync, target, source, nbytes, _kind(self._hip), stream)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """hipMemsetAsync."""
        self._on(stream, "fill memory", "stream")
        self._call("fill memory", self._hip.hipMemsetAsync, target, value, nbytes, stream)

    # kernels and graphs

    def load(self, device: int, kernels: Sequence[KernelKey]) -> None:
        """Compile what is not in the cache, load one module a kernel, find its function."""
        self._enter(device, f"load kernels on HIP{device}")
        for key in kernels:
            if (device, key) in self._functions:
                continue
            verb = f"load kernel {key.name} on HIP{device}"
            code, entry = self._compiler.compiled(key, self.devices()[device].architecture)
            module = self._call(verb, self._hip.hipModuleLoadData, code)
            with self._lock:
                self._modules.append((device, module))  # freed at the end, whatever comes next
            found = self._call(verb, self._hip.hipModuleGetFunction, module, entry.encode())
            with self._lock:
                self._functions[device, key] = found

    def launch(self, launch: Launch, stream: int) -> None:
        """hipModuleLaunchKernel with the packed block as `extra`."""
        verb = f"launch {launch.kernel.name}"
        device = self._on(stream, verb, "stream")
        function = self._functions.get((device, launch.kernel))
        if function is None:
            raise DeviceError(
                f"{verb} failed", f"{launch.kernel} was not loaded on HIP{device}", REPORT
            )
        block = ctypes.create_string_buffer(launch.args, max(len(launch.args), 1))
        size = ctypes.c_size_t(len(launch.args))
        extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(block), BUFFER_SIZE, ctypes.addressof(size), BUFFER_END
        )
        self._call(
            verb,
            self._hip.hipModuleLaunchKernel,
            function,
            *launch.grid,
            *launch.block,
            launch.shared,
            stream,
            None,
            ctypes.addressof(extra),
        )

    def begin_capture(self, stream: int) -> None:
        """hipStreamBeginCapture; other threads may go on calling what a capture forbids."""
        self._on(stream, "begin a capture", "stream")
        mode = self._hip.hipStreamCaptureMode(CAPTURE_THREAD_LOCAL)
        self._call("begin a capture", self._hip.hipStreamBeginCapture, stream, mode)

    def end_capture(self, stream: int) -> int:
        """hipStreamEndCapture, then an instance, which alone is kept."""
        device = self._on(stream, "end a capture", "stream")
        graph = self._call("end a capture", self._hip.hipStreamEndCapture, stream)
        try:
            made = self._call(
                "instantiate a graph", self._hip.hipGraphInstantiateWithFlags, graph, 0
            )
            handle = self._keep(made, device, "graph")
        finally:
            self._call("free a graph", self._hip.hipGraphDestroy, graph)
        return handle

    def destroy_graph(self, graph: int) -> None:
        """hipGraphExecDestroy."""
        self._destroy(graph, "graph", self._hip.hipGraphExecDestroy)

    def launch_graph(self, graph: int, stream: int) -> None:
        """hipGraphLaunch."""
        self._home(graph, "launch a graph", "graph")
        self._on(stream, "launch a graph", "stream")
        self._call("launch a graph", self._hip.hipGraphLaunch, graph, stream)

    @property
    def graph_launcher(self) -> int:
        """hipGraphLaunch itself, of the very library that the binding opened."""
        if self._library is None:
            self._library = ctypes.CDLL(opened_library(self._binding))
        return ctypes.cast(self._library.hipGraphLaunch, ctypes.c_void_p).value or 0

    # end

    def close(self) -> None:
        """Wait for the devices, then free streams, events, graphs, modules and memory."""
        with self._lock:
            opened, self._opened = sorted(self._opened), set()
        if not opened:
            return
        hip = self._hip
        for device in opened:
            self._quietly((hip.hipSetDevice, device), (hip.hipDeviceSynchronize,))
        free = {
            "stream": hip.hipStreamDestroy,
            "event": hip.hipEventDestroy,
            "graph": hip.hipGraphExecDestroy,
        }
        for handle, home in self._homes.items():
            self._quietly((hip.hipSetDevice, home.device), (free[home.kind], handle))
        for device, module in self._modules:
            self._quietly((hip.hipSetDevice, device), (hip.hipModuleUnload, module))
        for address, device in self._memory.items():
            self._quietly((hip.hipSetDevice, device), (hip.hipFree, address))
        for locked in self._locked.all():
            undo = hip.hipHostUnregister if locked.registered else hip.hipHostFree
            self._quietly((undo, locked.address))
            self._locked.remove(locked.address)
        for table in (self._homes, self._functions, self._modules, self._memory):
            table.clear()

    def _quietly(self, *calls: tuple[Any, ...]) -> None:
        """Calls at the end: what fails here leaves nothing to be done."""
        for function, *args in calls:
            try:
                self._call("close", function, *args)
            except DeviceError:
                self.take_error()


def describe_all(binding: Binding) -> tuple[Device, ...]:
    """Every device of the runtime; no context is opened. Raises DeviceError."""
    hip = binding.hip
    count = binding.call("count devices", hip.hipGetDeviceCount)
    found = []
    for index in range(count):
        facts = _properties(binding, index)
        made = Device(
            index=index,
            label=f"HIP{index}",
            name=_text(facts.name),
            architecture=_text(facts.gcnArchName).partition(":")[0],
            total=int(facts.totalGlobalMem),
            units=int(facts.multiProcessorCount),
            warp=int(facts.warpSize),
        )
        found.append(made)
    return tuple(found)


def _properties(binding: Binding, index: int) -> Any:
    """hipDeviceProp_t of a device; older bindings fill one that they are given."""
    verb, function = f"describe HIP{index}", binding.hip.hipGetDeviceProperties
    if not binding.fills_properties:
        return binding.call(verb, function, index)
    facts = binding.hip.hipDeviceProp_t()
    binding.call(verb, function, facts, index)
    return facts


def _kind(hip: Any) -> Any:
    return hip.hipMemcpyKind(MEMCPY_DEFAULT)


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return raw.partition(b"\0")[0].decode(errors="replace")
