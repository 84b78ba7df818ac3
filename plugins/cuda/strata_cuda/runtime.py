"""The verbs of `strata_core.runtime` on the CUDA runtime, through CuPy.

Handles are CUDA's own. Every verb makes the device that it concerns this thread's current one.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock, local
from typing import Any

from attrs import frozen

from strata_core.errors import DeviceError
from strata_core.memory.page_locked import Locked, PageLocked
from strata_core.runtime import Device, DeviceMemory, KernelKey, Launch
from strata_cuda.binding import (
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    REPORT,
    Binding,
    load_binding,
)
from strata_cuda.compiler import Compiled, Compiler
from strata_cuda.early import FIRST, early_config

PORTABLE_AND_MAPPED = 3
"""cudaHostAllocPortable | cudaHostAllocMapped, and the same of cudaHostRegister."""

NON_BLOCKING, NO_TIMING = 1, 2
"""cudaStreamNonBlocking; cudaEventDisableTiming."""

COPY_DEFAULT = 4
"""cudaMemcpyDefault: addresses tell what is host memory and what a device's."""

CAPTURE_THREAD_LOCAL = 1
"""Other threads may go on calling what a capture forbids."""

HOST_MEMORY = 1
"""cudaMemoryTypeHost: page-locked."""

NOT_READY = 600
"""cudaErrorNotReady: an answer of eventQuery, no failure."""

PLAIN_SHARED = 48 << 10
"""Bytes of dynamic shared memory that a kernel may have without being told so."""

ARGS, ARGS_SIZE, ARGS_END = 1, 2, 0
"""Marks in `extra` of cuLaunchKernel: CU_LAUNCH_PARAM_BUFFER_POINTER, _BUFFER_SIZE, _END."""

MOST_COMPILERS = 8
"""Kernels that are compiled at once."""


@frozen
class _Function:
    """A loaded kernel on one device."""

    handle: int
    module: int


class CudaRuntime:
    """One CUDA runtime for all devices of the process. Thread-safe as `Runtime` asks."""

    label = "CUDA"

    def __init__(self, binding: Binding | None = None, compiler: Compiler | None = None) -> None:
        """Loads CuPy and the driver's library; opens no context. Raises DeviceError."""
        self._binding = binding or load_binding()
        self._cuda = self._binding.runtime
        self._compiler = compiler or Compiler(self._binding)
        self._lock = Lock()
        self._pending = local()
        self._devices: tuple[Device, ...] | None = None
        self._opened: set[int] = set()
        self._homes: dict[int, tuple[int, str]] = {}
        self._memory: dict[int, int] = {}
        self._locked = PageLocked()
        self._functions: dict[tuple[int, KernelKey], _Function] = {}
        self._shared: dict[int, int] = {}
        self._early: set[int] = set()

    def _call(
        self,
        verb: str,
        function: Callable[..., Any],
        *args: Any,
        refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
    ) -> Any:
        return self._noted(lambda: self._binding.call(verb, function, *args, refusals=refusals))

    def _drive(self, verb: str, name: str, *args: Any) -> None:
        self._noted(lambda: self._binding.drive(verb, name, *args))

    def _noted(self, work: Callable[[], Any]) -> Any:
        """Do it, and keep the text of a failure for `take_error`."""
        try:
            return work()
        except DeviceError as error:
            self._pending.text = error.why
            raise

    # devices

    def devices(self) -> Sequence[Device]:
        """All devices that CUDA shows this process; CUDA_VISIBLE_DEVICES chooses and orders."""
        if self._devices is None:
            count = self._call("count devices", self._cuda.getDeviceCount)
            self._devices = tuple(self._describe(index) for index in range(count))
        return self._devices

    def _describe(self, index: int) -> Device:
        facts = self._call(f"describe CUDA{index}", self._cuda.getDeviceProperties, index)
        return Device(
            index=index,
            label=f"CUDA{index}",
            name=bytes(facts["name"]).partition(b"\0")[0].decode(errors="replace"),
            architecture=f"sm_{facts['major']}{facts['minor']}",
            total=int(facts["totalGlobalMem"]),
            units=int(facts["multiProcessorCount"]),
            warp=int(facts["warpSize"]),
            shared=int(facts["sharedMemPerBlockOptin"]),
        )

    def open_context(self, device: int) -> None:
        """Make the device current and free nothing, which opens its primary context."""
        if device in self._opened:
            return
        if not 0 <= device < len(self.devices()):
            raise DeviceError(
                f"open a context on CUDA{device} failed",
                f"there are {len(self.devices())} devices",
                "name a device that `strata doctor` lists",
            )
        verb = f"open a context on CUDA{device}"
        self._call(verb, self._cuda.setDevice, device)
        self._call(verb, self._cuda.free, 0)
        with self._lock:
            self._opened.add(device)
            if int(self.devices()[device].architecture.removeprefix("sm_")) >= FIRST:
                self._early.add(device)

    def _enter(self, device: int, verb: str) -> None:
        """Make a device this thread's current one."""
        if device not in self._opened:
            raise DeviceError(f"{verb} failed", f"no context is open on CUDA{device}", REPORT)
        self._call(verb, self._cuda.setDevice, device)

    def memory(self, device: int) -> DeviceMemory:
        """What cudaMemGetInfo says."""
        verb = f"ask for the memory of CUDA{device}"
        self._enter(device, verb)
        free, total = self._call(verb, self._cuda.memGetInfo)
        return DeviceMemory(int(free), int(total))

    def take_error(self) -> str | None:
        """This thread's last failure, forgotten; CuPy cleared CUDA's own when it told of it.

        An error of a kernel (an illegal address) stays with the context: no verb works after it.
        """
        text: str | None = getattr(self._pending, "text", None)
        self._pending.text = None
        return text

    # device memory

    def alloc(self, device: int, nbytes: int) -> int:
        """cudaMalloc, whose addresses are aligned to 256 bytes and more."""
        verb = f"allocate {nbytes} bytes on CUDA{device}"
        self._enter(device, verb)
        address = int(self._call(verb, self._cuda.malloc, nbytes))
        with self._lock:
            self._memory[address] = device
        return address

    def free(self, device: int, address: int) -> None:
        """cudaFree; it waits for the device."""
        verb = f"free memory on CUDA{device}"
        self._enter(device, verb)
        self._call(verb, self._cuda.free, address)
        with self._lock:
            self._memory.pop(address, None)

    # host memory

    def host_alloc(self, nbytes: int) -> int:
        """cudaHostAlloc, portable and mapped."""
        verb = f"allocate {nbytes} bytes of page-locked memory"
        self._enter_any(verb)
        address = int(self._call(verb, self._cuda.hostAlloc, nbytes, PORTABLE_AND_MAPPED))
        self._locked.add(Locked(address, nbytes, self._device_pointer(address), registered=False))
        return address

    def host_free(self, address: int) -> None:
        """cudaFreeHost."""
        self._enter_any("free page-locked memory")
        self._call("free page-locked memory", self._cuda.freeHost, address)
        self._locked.remove(address)

    def register(self, address: int, nbytes: int) -> None:
        """cudaHostRegister, portable and mapped."""
        verb = f"page-lock {nbytes} bytes"
        self._enter_any(verb)
        self._call(
            verb,
            self._cuda.hostRegister,
            address,
            nbytes,
            PORTABLE_AND_MAPPED,
            refusals=(OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED),
        )
        self._locked.add(Locked(address, nbytes, self._device_pointer(address), registered=True))

    def unregister(self, address: int) -> None:
        """cudaHostUnregister."""
        self._enter_any("unlock memory")
        self._call("unlock memory", self._cuda.hostUnregister, address)
        self._locked.remove(address)

    def _enter_any(self, verb: str) -> None:
        """Make an open device current: page-locked memory belongs to all of them."""
        self._enter(min(self._opened, default=0), verb)

    def _device_pointer(self, address: int) -> int | None:
        """Where devices find page-locked memory; with unified addressing all find it there."""
        found = self._call("ask for an alias", self._cuda.pointerGetAttributes, address)
        return int(found.devicePointer) or None if found.type == HOST_MEMORY else None

    def alias(self, address: int, device: int) -> int | None:
        """The alias that the range got when it was page-locked; all devices share it."""
        del device
        return self._locked.alias(address)

    # streams, events, copies

    def _keep(self, handle: int, device: int, kind: str) -> int:
        with self._lock:
            self._homes[handle] = device, kind
        return handle

    def _home(self, handle: int, verb: str, kind: str) -> int:
        """The device that a handle belongs to."""
        home = self._homes.get(handle)
        if home is None or home[1] != kind:
            raise DeviceError(f"{verb} failed", f"{handle:#x} is no {kind} of CUDA's", REPORT)
        return home[0]

    def _on(self, handle: int, verb: str, kind: str) -> int:
        """Make current the device that a handle belongs to; its index."""
        device = self._home(handle, verb, kind)
        self._enter(device, verb)
        return device

    def _destroy(self, handle: int, kind: str, function: Callable[[int], Any]) -> None:
        self._on(handle, f"free {kind}", kind)
        self._call(f"free {kind}", function, handle)
        with self._lock:
            self._homes.pop(handle, None)

    def create_stream(self, device: int) -> int:
        """A stream that the default stream does not wait for."""
        verb = f"create a stream on CUDA{device}"
        self._enter(device, verb)
        made = self._call(verb, self._cuda.streamCreateWithFlags, NON_BLOCKING)
        return self._keep(int(made), device, "stream")

    def destroy_stream(self, stream: int) -> None:
        """cudaStreamDestroy."""
        self._destroy(stream, "stream", self._cuda.streamDestroy)

    def create_event(self, device: int) -> int:
        """An event without timing."""
        verb = f"create an event on CUDA{device}"
        self._enter(device, verb)
        made = self._call(verb, self._cuda.eventCreateWithFlags, NO_TIMING)
        return self._keep(int(made), device, "event")

    def destroy_event(self, event: int) -> None:
        """cudaEventDestroy."""
        self._destroy(event, "event", self._cuda.eventDestroy)

    def record(self, event: int, stream: int) -> None:
        """cudaEventRecord."""
        self._home(event, "record an event", "event")
        self._on(stream, "record an event", "stream")
        self._call("record an event", self._cuda.eventRecord, event, stream)

    def wait(self, stream: int, event: int) -> None:
        """cudaStreamWaitEvent; the event may be another device's."""
        self._home(event, "wait for an event", "event")
        self._on(stream, "wait for an event", "stream")
        self._call("wait for an event", self._cuda.streamWaitEvent, stream, event)

    def finished(self, event: int) -> bool:
        """cudaEventQuery. Raises DeviceError where the work before the event failed."""
        self._on(event, "ask for an event", "event")
        code = self._cuda.eventQuery(event)
        if code == NOT_READY:
            return False
        self._call("ask for an event", self._cuda.check_status, code)
        return True

    def synchronize(self, stream: int) -> None:
        """cudaStreamSynchronize."""
        self._on(stream, "wait for a stream", "stream")
        self._call("wait for a stream", self._cuda.streamSynchronize, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """cudaMemcpyAsync; addresses tell the direction."""
        verb = f"copy {nbytes} bytes"
        self._on(stream, verb, "stream")
        if not nbytes:
            return
        if self._locked.split(target, nbytes) or self._locked.split(source, nbytes):
            raise DeviceError(f"{verb} failed", "the host's side lies in two registrations", REPORT)
        self._call(verb, self._cuda.memcpyAsync, target, source, nbytes, COPY_DEFAULT, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """cudaMemsetAsync."""
        self._on(stream, "fill memory", "stream")
        self._call("fill memory", self._cuda.memsetAsync, target, value, nbytes, stream)

    # kernels and graphs

    def load(self, device: int, kernels: Sequence[KernelKey]) -> None:
        """Compile what is not in the cache, several at once; load a module for each kernel."""
        wanted = [key for key in dict.fromkeys(kernels) if (device, key) not in self._functions]
        if not wanted:
            return
        self._enter(device, f"load kernels on CUDA{device}")
        architecture = self.devices()[device].architecture
        with ThreadPoolExecutor(min(MOST_COMPILERS, len(wanted))) as pool:
            made = pool.map(lambda key: self._compiler.obtain(key, architecture), wanted)
            for key, compiled in zip(wanted, made, strict=True):
                self._load_one(device, key, compiled)

    def _load_one(self, device: int, key: KernelKey, compiled: Compiled) -> None:
        verb, modules = f"load kernel {key.name} on CUDA{device}", self._binding.modules
        module = int(self._call(verb, modules.moduleLoadData, compiled.code))
        found = int(self._call(verb, modules.moduleGetFunction, module, compiled.entry))
        with self._lock:
            self._functions[device, key] = _Function(found, module)

    def launch(self, launch: Launch, stream: int) -> None:
        """cuLaunchKernel with the packed block as `extra`; it is copied before this returns.

        An early launch is one where the device can: see `early.py`.
        """
        verb = f"launch {launch.kernel.name}"
        device = self._on(stream, verb, "stream")
        function = self._functions.get((device, launch.kernel))
        if function is None:
            raise DeviceError(
                f"{verb} failed", f"{launch.kernel} was not loaded on CUDA{device}", REPORT
            )
        if launch.shared > self._shared.get(function.handle, PLAIN_SHARED):
            self._allow_shared(verb, function.handle, launch.shared)
        block = ctypes.create_string_buffer(launch.args, max(len(launch.args), 1))
        size = ctypes.c_size_t(len(launch.args))
        extra = (ctypes.c_void_p * 5)(
            ARGS, ctypes.addressof(block), ARGS_SIZE, ctypes.addressof(size), ARGS_END
        )
        shape = (*launch.grid, *launch.block, launch.shared)
        if launch.early and device in self._early:
            config = early_config(shape, stream)
            to = ctypes.addressof(config)
            self._drive(verb, "cuLaunchKernelEx", to, function.handle, None, extra)
        else:
            self._drive(verb, "cuLaunchKernel", function.handle, *shape, stream, None, extra)

    def _allow_shared(self, verb: str, function: int, nbytes: int) -> None:
        modules = self._binding.modules
        attribute = modules.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._call(verb, modules.funcSetAttribute, function, attribute, nbytes)
        self._shared[function] = nbytes

    def begin_capture(self, stream: int) -> None:
        """cudaStreamBeginCapture."""
        self._on(stream, "begin a capture", "stream")
        self._call("begin a capture", self._cuda.streamBeginCapture, stream, CAPTURE_THREAD_LOCAL)

    def end_capture(self, stream: int) -> int:
        """cudaStreamEndCapture, then an instance, which alone is kept."""
        device = self._on(stream, "end a capture", "stream")
        graph = self._call("end a capture", self._cuda.streamEndCapture, stream)
        try:
            made = self._call("instantiate a graph", self._cuda.graphInstantiate, graph)
        finally:
            self._call("free a graph", self._cuda.graphDestroy, graph)
        return self._keep(int(made), device, "graph")

    def destroy_graph(self, graph: int) -> None:
        """cudaGraphExecDestroy."""
        self._destroy(graph, "graph", self._cuda.graphExecDestroy)

    def launch_graph(self, graph: int, stream: int) -> None:
        """cudaGraphLaunch."""
        self._home(graph, "launch a graph", "graph")
        self._on(stream, "launch a graph", "stream")
        self._call("launch a graph", self._cuda.graphLaunch, graph, stream)

    @property
    def graph_launcher(self) -> int:
        """cuGraphLaunch of the driver; its handles are the runtime's."""
        return ctypes.cast(self._binding.driver.cuGraphLaunch, ctypes.c_void_p).value or 0

    # end

    def close(self) -> None:
        """Wait for the devices, then free streams, events, graphs, modules and memory.

        The primary contexts stay: whoever else uses CUDA in this process has them too.
        """
        with self._lock:
            opened, self._opened = sorted(self._opened), set()
        if not opened:
            return
        cuda = self._cuda
        for device in opened:
            self._quietly([(cuda.setDevice, device), (cuda.deviceSynchronize,)])
        free = {
            "stream": cuda.streamDestroy,
            "event": cuda.eventDestroy,
            "graph": cuda.graphExecDestroy,
        }
        for handle, (device, kind) in self._homes.items():
            self._quietly([(cuda.setDevice, device), (free[kind], handle)])
        for (device, _), function in self._functions.items():
            unload = self._binding.modules.moduleUnload
            self._quietly([(cuda.setDevice, device), (unload, function.module)])
        for address, device in self._memory.items():
            self._quietly([(cuda.setDevice, device), (cuda.free, address)])
        for locked in self._locked.all():
            undo = cuda.hostUnregister if locked.registered else cuda.freeHost
            self._quietly([(undo, locked.address)])
            self._locked.remove(locked.address)
        for table in (self._homes, self._functions, self._memory, self._shared):
            table.clear()
        self.take_error()

    def _quietly(self, calls: Iterable[tuple[Any, ...]]) -> None:
        """Calls at the end: what fails here leaves nothing to be done."""
        for function, *args in calls:
            try:
                self._call("close", function, *args)
            except DeviceError:
                return
