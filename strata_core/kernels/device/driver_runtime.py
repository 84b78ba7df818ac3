"""The verbs of `strata_core.runtime` over a driver's functions: all that does not name a vendor.

Here is which contexts are open, which device a handle belongs to, what is page-locked and where,
which kernels are loaded, and what has to be given back in which order. How a driver is called,
which of its answers are refusals and how its code is compiled comes in with `DriverCalls`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

from attrs import frozen

from strata_core.errors import REPORT, DeviceError
from strata_core.kernels.device.driver import Compiled, DriverCalls, Obtain
from strata_core.memory.page_locked import Locked, PageLocked
from strata_core.runtime import Device, DeviceMemory, KernelKey, Launch, WaitClock


@frozen
class _Handle:
    """A stream, event or graph: its device, which of these it is, and the driver's object."""

    device: int
    kind: str
    made: Any


class DriverRuntime:
    """One driver for all devices of the process. Thread-safe as `Runtime` asks.

    Handles are the driver's own. Every verb makes the device that it concerns this thread's
    current one. `obtain` gives the kernels' code, on as many as `compilers` threads at once.
    """

    def __init__(
        self, label: str, calls: DriverCalls, obtain: Obtain, *, compilers: int = 1
    ) -> None:
        """Calls nothing yet."""
        self._label = label
        self._calls = calls
        self._obtain = obtain
        self._compilers = compilers
        self._lock = Lock()
        self._devices: tuple[Device, ...] | None = None
        self._opened: set[int] = set()
        self._handles: dict[int, _Handle] = {}
        self._memory: dict[int, int] = {}
        self._locked = PageLocked()
        self._modules: list[tuple[int, Any]] = []
        self._functions: dict[tuple[int, KernelKey], Any] = {}

    # devices

    @property
    def label(self) -> str:
        """What its devices are called."""
        return self._label

    def _named(self, device: int) -> str:
        return f"{self._label}{device}"

    def devices(self) -> Sequence[Device]:
        """All devices that the driver shows this process; asked for once."""
        if self._devices is None:
            self._devices = tuple(self._calls.describe())
        return self._devices

    def open_context(self, device: int) -> None:
        """Make the device current and open its context, unless it is open."""
        if device in self._opened:
            return
        verb = f"open a context on {self._named(device)}"
        count = len(self.devices())
        if not 0 <= device < count:
            raise DeviceError(
                f"open a context on {self._named(device)} failed",
                f"there are {count} devices",
                "name a device that `strata doctor` lists",
            )
        self._calls.set_device(verb, device)
        self._calls.open_context(verb)
        with self._lock:
            self._opened.add(device)

    def _enter(self, device: int, verb: str) -> None:
        """Make a device this thread's current one."""
        if device not in self._opened:
            named = self._named(device)
            raise DeviceError(f"{verb} failed", f"no context is open on {named}", REPORT)
        self._calls.set_device(verb, device)

    def _enter_any(self, verb: str) -> None:
        """Make an open device current: page-locked memory belongs to all of them."""
        self._enter(min(self._opened, default=0), verb)

    def memory(self, device: int) -> DeviceMemory:
        """What the driver says now."""
        verb = f"ask for the memory of {self._named(device)}"
        self._enter(device, verb)
        free, total = self._calls.memory(verb)
        return DeviceMemory(int(free), int(total))

    def wait_clock(self, device: int) -> WaitClock:
        """The clock of a device's kernels; without one of a known rate they must not wait."""
        verb = f"ask for the clock of {self._named(device)}"
        self._enter(device, verb)
        ticks = self._calls.ticks(verb, device)
        return WaitClock(ticks, "" if ticks else "the driver does not tell how fast its clock runs")

    def take_error(self) -> str | None:
        """This thread's pending error.

        An error of a kernel (an illegal address) stays with the context: no verb works after it.
        """
        return self._calls.take_error()

    # device memory

    def alloc(self, device: int, nbytes: int) -> int:
        """Device memory as the driver aligns it, to 256 bytes and more."""
        verb = f"allocate {nbytes} bytes on {self._named(device)}"
        self._enter(device, verb)
        address = int(self._calls.alloc(verb, nbytes))
        with self._lock:
            self._memory[address] = device
        return address

    def free(self, device: int, address: int) -> None:
        """Give it back; drivers wait for the device then."""
        verb = f"free memory on {self._named(device)}"
        self._enter(device, verb)
        self._calls.free(verb, address)
        with self._lock:
            self._memory.pop(address, None)

    # host memory

    def host_alloc(self, nbytes: int) -> int:
        """Page-locked memory for all devices."""
        verb = f"allocate {nbytes} bytes of page-locked memory"
        self._enter_any(verb)
        address = int(self._calls.host_alloc(verb, nbytes))
        self._locked.add(Locked(address, nbytes, self._find_alias(address), registered=False))
        return address

    def host_free(self, address: int) -> None:
        """Give it back."""
        self._enter_any("free page-locked memory")
        self._calls.host_free("free page-locked memory", address)
        self._locked.remove(address)

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory, no byte of it twice."""
        verb = f"page-lock {nbytes} bytes"
        self._enter_any(verb)
        if any(self._locked.holding(at) for at in (address, address + nbytes - 1)):
            raise DeviceError(f"{verb} failed", "part of it is page-locked already", REPORT)
        self._calls.register(verb, address, nbytes)
        self._locked.add(Locked(address, nbytes, self._find_alias(address), registered=True))

    def unregister(self, address: int) -> None:
        """Undo `register`."""
        self._enter_any("unlock memory")
        self._calls.unregister("unlock memory", address)
        self._locked.remove(address)

    def _find_alias(self, address: int) -> int | None:
        """Where devices find page-locked memory; a driver that does not say has no alias."""
        try:
            return self._calls.alias("ask for an alias", address)
        except DeviceError:
            self.take_error()
            return None

    def alias(self, address: int, device: int) -> int | None:
        """The alias that the range got when it was page-locked; all devices share it."""
        del device
        return self._locked.alias(address)

    # streams, events, copies

    def _keep(self, made: Any, device: int, kind: str) -> int:
        """The handle of what was made; the driver's object lives as long as it."""
        handle = int(made)
        with self._lock:
            self._handles[handle] = _Handle(device, kind, made)
        return handle

    def _home(self, handle: int, verb: str, kind: str) -> int:
        """The device that a handle belongs to."""
        found = self._handles.get(handle)
        if found is None or found.kind != kind:
            why = f"{handle:#x} is no {kind} of {self._label}'s"
            raise DeviceError(f"{verb} failed", why, REPORT)
        return found.device

    def _on(self, handle: int, verb: str, kind: str) -> int:
        """Make current the device that a handle belongs to; its index."""
        device = self._home(handle, verb, kind)
        self._enter(device, verb)
        return device

    def _create(self, device: int, kind: str, function: Callable[[str], Any]) -> int:
        article = "an" if kind == "event" else "a"
        verb = f"create {article} {kind} on {self._named(device)}"
        self._enter(device, verb)
        return self._keep(function(verb), device, kind)

    def _destroy(self, handle: int, kind: str, function: Callable[[str, int], object]) -> None:
        verb = f"free {kind}"
        self._on(handle, verb, kind)
        function(verb, handle)
        with self._lock:
            self._handles.pop(handle, None)

    def create_stream(self, device: int) -> int:
        """A stream that the default stream does not wait for."""
        return self._create(device, "stream", self._calls.create_stream)

    def destroy_stream(self, stream: int) -> None:
        """Free a stream."""
        self._destroy(stream, "stream", self._calls.destroy_stream)

    def create_event(self, device: int) -> int:
        """An event without timing."""
        return self._create(device, "event", self._calls.create_event)

    def create_timed_event(self, device: int) -> int:
        """An event with timing."""
        return self._create(device, "event", self._calls.create_timed_event)

    def destroy_event(self, event: int) -> None:
        """Free an event."""
        self._destroy(event, "event", self._calls.destroy_event)

    def record(self, event: int, stream: int) -> None:
        """The event happens after what is on the stream."""
        self._home(event, "record an event", "event")
        self._on(stream, "record an event", "stream")
        self._calls.record("record an event", event, stream)

    def wait(self, stream: int, event: int) -> None:
        """The stream waits; the event may be another device's."""
        self._home(event, "wait for an event", "event")
        self._on(stream, "wait for an event", "stream")
        self._calls.wait("wait for an event", stream, event)

    def finished(self, event: int) -> bool:
        """Whether it happened. Raises DeviceError where the work before the event failed."""
        self._on(event, "ask for an event", "event")
        return self._calls.finished("ask for an event", event)

    def elapsed(self, first: int, last: int) -> float:
        """The driver's own difference."""
        self._home(first, "ask for a time", "event")
        self._on(last, "ask for a time", "event")
        return float(self._calls.elapsed("ask for a time", first, last)) / 1e3

    def synchronize(self, stream: int) -> None:
        """Wait for a stream."""
        self._on(stream, "wait for a stream", "stream")
        self._calls.synchronize("wait for a stream", stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy; the driver finds out what lies where."""
        verb = f"copy {nbytes} bytes"
        self._on(stream, verb, "stream")
        if not nbytes:
            return
        if self._locked.split(target, nbytes) or self._locked.split(source, nbytes):
            raise DeviceError(f"{verb} failed", "the host's side lies in two registrations", REPORT)
        self._calls.copy(verb, target, source, nbytes, stream)

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """Set bytes of a device."""
        self._on(stream, "fill memory", "stream")
        self._calls.fill("fill memory", target, value, nbytes, stream)

    # kernels and graphs

    def load(self, device: int, kernels: Sequence[KernelKey]) -> None:
        """Compile what is not in the cache, several at once; load a module for each kernel."""
        wanted = [key for key in dict.fromkeys(kernels) if (device, key) not in self._functions]
        if not wanted:
            return
        self._enter(device, f"load kernels on {self._named(device)}")
        architecture = self.devices()[device].architecture
        with ThreadPoolExecutor(min(self._compilers, len(wanted))) as pool:
            made = pool.map(lambda key: self._obtain(key, architecture), wanted)
            for key, compiled in zip(wanted, made, strict=True):
                self._load_one(device, key, compiled)

    def _load_one(self, device: int, key: KernelKey, compiled: Compiled) -> None:
        verb = f"load kernel {key.name} on {self._named(device)}"
        module = self._calls.load(verb, compiled.code)
        with self._lock:
            self._modules.append((device, module))  # freed at the end, whatever comes next
        found = self._calls.find(verb, module, compiled.entry, self.devices()[device])
        with self._lock:
            self._functions[device, key] = found

    def launch(self, launch: Launch, stream: int) -> None:
        """Launch what was loaded on the stream's device."""
        verb = f"launch {launch.kernel.name}"
        device = self._on(stream, verb, "stream")
        found = self._functions.get((device, launch.kernel))
        if found is None:
            why = f"{launch.kernel} was not loaded on {self._named(device)}"
            raise DeviceError(f"{verb} failed", why, REPORT)
        self._calls.launch(verb, found, launch, stream)

    def begin_capture(self, stream: int) -> None:
        """Record; other threads may go on calling what a capture forbids."""
        self._on(stream, "begin a capture", "stream")
        self._calls.begin_capture("begin a capture", stream)

    def end_capture(self, stream: int) -> int:
        """End recording and make a graph that can be launched, which alone is kept."""
        device = self._on(stream, "end a capture", "stream")
        recorded = self._calls.end_capture("end a capture", stream)
        try:
            made = self._calls.instantiate("instantiate a graph", recorded)
            handle = self._keep(made, device, "graph")
        finally:
            self._calls.forget_capture("free a graph", recorded)
        return handle

    def destroy_graph(self, graph: int) -> None:
        """Free a graph."""
        self._destroy(graph, "graph", self._calls.destroy_graph)

    def launch_graph(self, graph: int, stream: int) -> None:
        """Launch a graph."""
        self._home(graph, "launch a graph", "graph")
        self._on(stream, "launch a graph", "stream")
        self._calls.launch_graph("launch a graph", graph, stream)

    @property
    def graph_launcher(self) -> int:
        """The driver's own function."""
        return self._calls.graph_launcher()

    # end

    def close(self) -> None:
        """Wait for the devices, then free streams, events, graphs, modules and memory.

        Primary contexts stay: whoever else uses the driver in this process has them too.
        """
        with self._lock:
            opened, self._opened = sorted(self._opened), set()
        if not opened:
            return
        calls = self._calls
        for device in opened:
            self._finally(device, calls.wait_for_device)
        destroy = {
            "stream": calls.destroy_stream,
            "event": calls.destroy_event,
            "graph": calls.destroy_graph,
        }
        for handle, home in self._handles.items():
            self._finally(home.device, destroy[home.kind], handle)
        for device, module in self._modules:
            self._finally(device, calls.unload, module)
        for address, device in self._memory.items():
            self._finally(device, calls.free, address)
        for locked in self._locked.all():
            undo = calls.unregister if locked.registered else calls.host_free
            self._finally(opened[0], undo, locked.address)
            self._locked.remove(locked.address)
        for table in (self._handles, self._functions, self._modules, self._memory):
            table.clear()

    def _finally(self, device: int, function: Callable[..., object], *args: Any) -> None:
        """A call at the end, on its device: what fails here leaves nothing to be done."""
        for call, given in ((self._calls.set_device, (device,)), (function, args)):
            try:
                call("close", *given)
            except DeviceError:
                self.take_error()
