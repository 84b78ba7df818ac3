"""The HIP runtime as core's table of driver functions, through hip-python."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

from strata_core.errors import DeviceError
from strata_core.kernels.device.driver import ArgumentBlock, DriverCalls
from strata_core.kernels.device.driver_runtime import DriverRuntime
from strata_core.runtime import Device, Launch
from strata_hip.binding import (
    NOT_SUPPORTED,
    OPERATING_SYSTEM,
    OUT_OF_MEMORY,
    Binding,
    answer_of,
    first_of,
    judged,
)
from strata_hip.compiler import Compiler
from strata_hip.library import check_library, opened_library

PORTABLE_AND_MAPPED = 3
"""hipHostMallocPortable | hipHostMallocMapped, and the same of hipHostRegister."""

NON_BLOCKING, TIMING, NO_TIMING = 1, 0, 2
MEMCPY_DEFAULT = 4
CAPTURE_THREAD_LOCAL = 1
NOT_READY = 600
"""hipErrorNotReady: the answer of a query, no failure."""

ARGS_END = 3
"""HIP_LAUNCH_PARAM_END, the mark that closes `extra` of hipModuleLaunchKernel."""


class HipRuntime(DriverRuntime):
    """One HIP runtime for all devices of the process; HIP_VISIBLE_DEVICES chooses and orders."""

    def __init__(self, binding: Binding, compiler: Compiler) -> None:
        """Nothing is opened yet. Kernels are compiled one at a time: hiprtc promises no more."""
        super().__init__("HIP", calls_of(binding), compiler.obtain)


def calls_of(binding: Binding) -> DriverCalls:
    """The table: HIP's functions by name, and arguments behind what core gives them."""
    driver = _Driver(binding)
    call = driver.function
    locking = (OUT_OF_MEMORY, OPERATING_SYSTEM, NOT_SUPPORTED)
    return DriverCalls(
        describe=lambda: describe_all(binding),
        take_error=driver.take_error,
        graph_launcher=driver.graph_launcher,
        ticks=driver.ticks,
        set_device=call("hipSetDevice"),
        open_context=call("hipFree", None),
        wait_for_device=call("hipDeviceSynchronize"),
        memory=call("hipMemGetInfo"),
        alloc=call("hipMalloc"),
        free=call("hipFree"),
        host_alloc=call("hipHostMalloc", PORTABLE_AND_MAPPED),
        host_free=call("hipHostFree"),
        register=call("hipHostRegister", PORTABLE_AND_MAPPED, refusals=locking),
        unregister=call("hipHostUnregister"),
        alias=driver.alias,
        create_stream=call("hipStreamCreateWithFlags", NON_BLOCKING),
        destroy_stream=call("hipStreamDestroy"),
        create_event=call("hipEventCreateWithFlags", NO_TIMING),
        create_timed_event=call("hipEventCreateWithFlags", TIMING),
        destroy_event=call("hipEventDestroy"),
        record=call("hipEventRecord"),
        wait=call("hipStreamWaitEvent", 0),
        finished=driver.finished,
        elapsed=call("hipEventElapsedTime"),
        synchronize=call("hipStreamSynchronize"),
        copy=driver.copy,
        fill=call("hipMemsetAsync"),
        load=call("hipModuleLoadData"),
        unload=call("hipModuleUnload"),
        find=driver.find,
        launch=driver.launch,
        begin_capture=driver.begin_capture,
        end_capture=call("hipStreamEndCapture"),
        instantiate=call("hipGraphInstantiateWithFlags", 0),
        forget_capture=call("hipGraphDestroy"),
        destroy_graph=call("hipGraphExecDestroy"),
        launch_graph=call("hipGraphLaunch"),
    )


class _Driver:
    """Calls that are more than a function of the binding, and the library that it opened."""

    def __init__(self, binding: Binding) -> None:
        self._binding = binding
        self._hip = binding.hip
        self._library: ctypes.CDLL | None = None

    def function(
        self, name: str, *after: Any, refusals: tuple[int, ...] = (OUT_OF_MEMORY,)
    ) -> Callable[..., Any]:
        """A function of the binding, with `after` behind what is given; looked up when called."""
        return lambda verb, *args: self._binding.call(
            verb, getattr(self._hip, name), *args, *after, refusals=refusals
        )

    def take_error(self) -> str | None:
        """The last error of this thread, which asking clears; an event that waits is none."""
        status = first_of(answer_of("ask for the last error", self._hip.hipGetLastError))
        if int(status) in (0, NOT_READY):
            return None
        return f"{getattr(status, 'name', status)} ({int(status)})"

    def ticks(self, verb: str, device: int) -> float:
        """The rate of what `wall_clock64` counts; an older runtime or binding does not tell it."""
        kinds = getattr(self._hip, "hipDeviceAttribute_t", None)
        kind = getattr(kinds, "hipDeviceAttributeWallClockRate", None)
        if kind is None:
            return 0.0
        try:
            return 1e3 * int(
                self._binding.call(verb, self._hip.hipDeviceGetAttribute, kind, device)
            )
        except DeviceError:
            self.take_error()
            return 0.0

    def alias(self, verb: str, address: int) -> int | None:
        return int(self._binding.call(verb, self._hip.hipHostGetDevicePointer, address, 0)) or None

    def finished(self, verb: str, event: int) -> bool:
        answer = answer_of(verb, self._hip.hipEventQuery, event)
        if int(first_of(answer)) == NOT_READY:
            return False
        judged(verb, "hipEventQuery", answer)
        return True

    def copy(self, verb: str, target: int, source: int, nbytes: int, stream: int) -> None:
        kind = self._hip.hipMemcpyKind(MEMCPY_DEFAULT)
        self._binding.call(verb, self._hip.hipMemcpyAsync, target, source, nbytes, kind, stream)

    def find(self, verb: str, module: Any, entry: str, device: Device) -> Any:
        del device  # a function belongs to its module, a module to its device
        return self._binding.call(verb, self._hip.hipModuleGetFunction, module, entry.encode())

    def launch(self, verb: str, found: Any, launch: Launch, stream: int) -> None:
        """hipModuleLaunchKernel with the packed block as `extra`."""
        block = ArgumentBlock(launch.args, ARGS_END)
        given = (*launch.grid, *launch.block, launch.shared, stream, None)
        extra = ctypes.addressof(block.extra)
        self._binding.call(verb, self._hip.hipModuleLaunchKernel, found, *given, extra)

    def begin_capture(self, verb: str, stream: int) -> None:
        mode = self._hip.hipStreamCaptureMode(CAPTURE_THREAD_LOCAL)
        self._binding.call(verb, self._hip.hipStreamBeginCapture, stream, mode)

    def graph_launcher(self) -> int:
        """hipGraphLaunch itself, of the very library that the binding opened."""
        if self._library is None:
            self._library = ctypes.CDLL(opened_library(self._binding))
        return ctypes.cast(self._library.hipGraphLaunch, ctypes.c_void_p).value or 0


def describe_all(binding: Binding) -> tuple[Device, ...]:
    """Every device of the runtime; no context is opened. Raises DeviceError.

    It is the first thing that is asked, so that here a library that will not do is refused.
    """
    hip = binding.hip
    count = binding.call("count devices", hip.hipGetDeviceCount)
    check_library()
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


def _text(value: Any) -> str:
    raw = value if isinstance(value, bytes) else str(value).encode()
    return raw.partition(b"\0")[0].decode(errors="replace")
