"""The CUDA runtime as core's table of driver functions, through CuPy and the driver's library."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from threading import local
from typing import Any

from attrs import define

from strata_core.errors import DeviceError
from strata_core.kernels.device.driver import ArgumentBlock, DriverCalls
from strata_core.kernels.device.driver_runtime import DriverRuntime
from strata_core.runtime import Device, Launch
from strata_cuda.binding import (
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    Binding,
    load_binding,
)
from strata_cuda.compiler import Compiler
from strata_cuda.early import FIRST, early_config
from strata_cuda.probe import MATRIX_CAPABILITY

PORTABLE_AND_MAPPED = 3
"""cudaHostAllocPortable | cudaHostAllocMapped, and the same of cudaHostRegister."""

NON_BLOCKING, TIMING, NO_TIMING = 1, 0, 2
"""cudaStreamNonBlocking; cudaEventDefault and cudaEventDisableTiming."""

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

TIMER = 1e9
"""%globaltimer counts nanoseconds."""

ARGS_END = 0
"""CU_LAUNCH_PARAM_END, the mark that closes `extra` of cuLaunchKernel."""

MOST_COMPILERS = 8
"""Kernels that are compiled at once."""


class CudaRuntime(DriverRuntime):
    """One CUDA runtime for all devices of the process; CUDA_VISIBLE_DEVICES chooses and orders."""

    def __init__(self, binding: Binding | None = None, compiler: Compiler | None = None) -> None:
        """Loads CuPy and the driver's library; opens no context. Raises DeviceError."""
        loaded = binding or load_binding()
        compiler = compiler or Compiler(loaded)
        calls = calls_of(loaded)
        super().__init__("CUDA", calls, compiler.obtain, compilers=MOST_COMPILERS)


def calls_of(binding: Binding) -> DriverCalls:
    """The table: CuPy's functions by name, and arguments behind what core gives them."""
    driver = _Driver(binding)
    call = driver.function
    locking = (OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED)
    return DriverCalls(
        describe=driver.describe,
        take_error=driver.take_error,
        graph_launcher=driver.graph_launcher,
        ticks=lambda _verb, _device: TIMER,
        set_device=call("setDevice"),
        open_context=call("free", 0),
        wait_for_device=call("deviceSynchronize"),
        memory=call("memGetInfo"),
        alloc=call("malloc"),
        free=call("free"),
        host_alloc=call("hostAlloc", PORTABLE_AND_MAPPED),
        host_free=call("freeHost"),
        register=call("hostRegister", PORTABLE_AND_MAPPED, refusals=locking),
        unregister=call("hostUnregister"),
        alias=driver.alias,
        create_stream=call("streamCreateWithFlags", NON_BLOCKING),
        destroy_stream=call("streamDestroy"),
        create_event=call("eventCreateWithFlags", NO_TIMING),
        create_timed_event=call("eventCreateWithFlags", TIMING),
        destroy_event=call("eventDestroy"),
        record=call("eventRecord"),
        wait=call("streamWaitEvent"),
        finished=driver.finished,
        elapsed=call("eventElapsedTime"),
        synchronize=call("streamSynchronize"),
        copy=driver.copy,
        fill=call("memsetAsync"),
        load=call("moduleLoadData", of=binding.modules),
        unload=call("moduleUnload", of=binding.modules),
        find=driver.find,
        launch=driver.launch,
        begin_capture=call("streamBeginCapture", CAPTURE_THREAD_LOCAL),
        end_capture=call("streamEndCapture"),
        instantiate=call("graphInstantiate"),
        forget_capture=call("graphDestroy"),
        destroy_graph=call("graphExecDestroy"),
        launch_graph=call("graphLaunch"),
    )


@define
class _Function:
    """A loaded kernel on one device: whether it can start early, and how much dynamic shared memory
    it may have by now."""

    handle: int
    early: bool
    shared: int = PLAIN_SHARED


class _Driver:
    """Calls that are more than a function of CuPy, and each thread's last failure."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._cuda = binding.runtime
        self._pending = local()

    def function(
        self, name: str, *after: Any, of: Any = None, refusals: tuple[int, ...] = (OUT_OF_MEMORY,)
    ) -> Callable[..., Any]:
        """A function of CuPy's runtime, or of the module `of`, with `after` behind what is given.

        It is looked up when it is called.
        """
        module = self._cuda if of is None else of
        return lambda verb, *args: self._call(
            verb, getattr(module, name), *args, *after, refusals=refusals
        )

    def _call(
        self,
        verb: str,
        function: Callable[..., Any],
        *args: Any,
        refusals: tuple[int, ...] = (OUT_OF_MEMORY,),
    ) -> Any:
        return self._noted(lambda: self._binding.call(verb, function, *args, refusals=refusals))

    def _noted(self, work: Callable[[], Any]) -> Any:
        """Do it, and keep the text of a failure for `take_error`."""
        try:
            return work()
        except DeviceError as error:
            self._pending.text = error.why
            raise

    def take_error(self) -> str | None:
        """This thread's last failure, forgotten; CuPy cleared CUDA's own when it told of it."""
        text: str | None = getattr(self._pending, "text", None)
        self._pending.text = None
        return text

    def describe(self) -> tuple[Device, ...]:
        count = self._call("count devices", self._cuda.getDeviceCount)
        return tuple(self._describe(index) for index in range(count))

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
            matrix=(facts["major"], facts["minor"]) >= MATRIX_CAPABILITY,
        )

    def alias(self, verb: str, address: int) -> int | None:
        """With unified addressing all devices find page-locked memory at one place."""
        found = self._call(verb, self._cuda.pointerGetAttributes, address)
        return int(found.devicePointer) or None if found.type == HOST_MEMORY else None

    def finished(self, verb: str, event: int) -> bool:
        code = self._cuda.eventQuery(event)
        if code == NOT_READY:
            return False
        self._call(verb, self._cuda.check_status, code)
        return True

    def copy(self, verb: str, target: int, source: int, nbytes: int, stream: int) -> None:
        self._call(verb, self._cuda.memcpyAsync, target, source, nbytes, COPY_DEFAULT, stream)

    def find(self, verb: str, module: int, entry: str, device: Device) -> _Function:
        # a function belongs to its module, a module to its device
        found = self._call(verb, self._binding.modules.moduleGetFunction, module, entry)
        return _Function(found, int(device.architecture.removeprefix("sm_")) >= FIRST)

    def launch(self, verb: str, found: _Function, launch: Launch, stream: int) -> None:
        """cuLaunchKernel with the packed block as `extra`; an early launch where a device can."""
        if launch.shared > found.shared:
            modules = self._binding.modules
            attribute = modules.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._call(verb, modules.funcSetAttribute, found.handle, attribute, launch.shared)
            found.shared = launch.shared
        block = ArgumentBlock(launch.args, ARGS_END)
        shape = (*launch.grid, *launch.block, launch.shared)
        given: tuple[Any, ...]
        name, given = "cuLaunchKernel", (found.handle, *shape, stream, None, block.extra)
        if launch.early and found.early:
            config = early_config(shape, stream)
            name, given = "cuLaunchKernelEx", (config, found.handle, None, block.extra)
        self._noted(lambda: self._binding.drive(verb, name, *given))

    def graph_launcher(self) -> int:
        """cuGraphLaunch of the driver; its handles are the runtime's."""
        return ctypes.cast(self._binding.driver.cuGraphLaunch, ctypes.c_void_p).value or 0
