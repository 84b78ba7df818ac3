"""A driver on host memory, strict about its rules, whose n-th call can be made to fail.

Every function checks that this thread's current device is the one that it concerns, and that what
it is given is alive. Work is done at once; one kernel exists, `add_rows`.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import Counter
from threading import Lock, get_ident

import attrs
import numpy as np

from strata_core.errors import DeviceError, Refused
from strata_core.kernels.device.driver import ArgumentBlock, Compiled, DriverCalls
from strata_core.memory.address import bytes_at
from strata_core.runtime import Device

MEMORY = 1 << 30
END = 7
FREEING = frozenset({
    "free", "host_free", "unregister", "destroy_stream", "destroy_event", "destroy_graph",
    "forget_capture", "unload",
})  # fmt: skip
REFUSING = frozenset({"alloc", "host_alloc", "register"})


class HostDriver:
    """Several devices; `alive` has everything that was made and not given back, by kind."""

    def __init__(self, devices: int = 2) -> None:
        self.count = devices
        self.alive: dict[str, dict[int, object]] = {}
        self.calls: Counter[str] = Counter()
        self.failing = 0
        self.failed = ""
        self.times: dict[int, float] = {}
        self.compiled: list[tuple[str, str, int]] = []
        self._here: dict[int, int] = {}
        self._errors: dict[int, str] = {}
        self._recording: dict[int, list] = {}
        self._next = 0x1000
        self._lock = Lock()
        kind = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        self._launcher = kind(lambda graph, stream: self._replay(graph))

    def _ticks(self, _verb, device):
        return 1e8 * (device + 1)

    def table(self) -> DriverCalls:
        """The functions below by the names of the table's fields."""
        names = [field.name for field in attrs.fields(DriverCalls)]
        return DriverCalls(**{name: self._counted(name) for name in names})

    def obtain(self, key, architecture):
        """Code for a kernel, and a note of who made it."""
        with self._lock:
            self.compiled.append((key.name, architecture, get_ident()))
        return Compiled(f"code for {architecture}".encode(), "add_rows")

    def left(self) -> dict[str, int]:
        """How much there is of each kind that there is something of."""
        return {kind: len(items) for kind, items in self.alive.items() if items}

    def _counted(self, name):
        function = getattr(self, f"_{name}")

        def call(*args):
            self.calls[name] += 1
            if name not in ("take_error", "graph_launcher") and sum(self.calls.values()) == (
                self.failing
            ):
                self.failed = name
                self._errors[get_ident()] = name
                error = Refused if name in REFUSING else DeviceError
                raise error(f"{args[0] if args else name} failed", f"{name} was to fail", "nothing")
            return function(*args)

        return call

    def _make(self, kind, thing):
        with self._lock:
            self._next += 0x100
            self.alive.setdefault(kind, {})[self._next] = thing
            return self._next

    def _is_here(self, device):
        assert self._here[get_ident()] == device

    def _take(self, kind, handle):
        """Forget what is alive; it must belong to the device here."""
        device, *_ = self.alive[kind].pop(handle)
        if self.failed != "set_device":  # then it is better freed from elsewhere than lost
            self._is_here(device)

    def _at(self, stream, work):
        """Do it, or keep it where the stream records."""
        self._is_here(self.alive["stream"][stream][0])
        if stream in self._recording:
            self._recording[stream].append(work)
        else:
            work()

    # the table, in its order

    def _describe(self):
        return [
            Device(index=i, label=f"HOST{i}", name="Host", architecture=f"host{i}", total=MEMORY,
                   units=1, warp=1)
            for i in range(self.count)
        ]  # fmt: skip

    def _take_error(self):
        return self._errors.pop(get_ident(), None)

    def _graph_launcher(self):
        return ctypes.cast(self._launcher, ctypes.c_void_p).value

    def _set_device(self, verb, device):
        assert 0 <= device < self.count
        self._here[get_ident()] = device

    def _open_context(self, verb):
        assert get_ident() in self._here

    def _wait_for_device(self, verb):
        pass

    def _memory(self, verb):
        mine = self._here[get_ident()]
        blocks = self.alive.get("block", {}).values()
        return MEMORY - sum(len(b) for device, b in blocks if device == mine), MEMORY

    def _alloc(self, verb, nbytes):
        if nbytes > self._memory(verb)[0]:
            self._errors[get_ident()] = "no memory"
            raise Refused(f"{verb}: refused", "no memory", "ask for less")
        block = ctypes.create_string_buffer(nbytes + 256)
        address = (ctypes.addressof(block) + 255) // 256 * 256
        self.alive.setdefault("block", {})[address] = (self._here[get_ident()], block)
        return address

    def _free(self, verb, address):
        self._take("block", address)

    def _host_alloc(self, verb, nbytes):
        if nbytes > MEMORY:
            self._errors[get_ident()] = "no memory"
            raise Refused(f"{verb}: refused", "no memory", "ask for less")
        block = ctypes.create_string_buffer(max(nbytes, 1))
        self.alive.setdefault("pinned", {})[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def _host_free(self, verb, address):
        del self.alive["pinned"][address]

    def _register(self, verb, address, nbytes):
        registered = self.alive.setdefault("registered", {})
        assert address not in registered
        registered[address] = nbytes

    def _unregister(self, verb, address):
        del self.alive["registered"][address]

    def _alias(self, verb, address):
        known = {**self.alive.get("pinned", {}), **self.alive.get("registered", {})}
        return address if address in known else None

    def _create_stream(self, verb):
        return self._make("stream", (self._here[get_ident()],))

    def _destroy_stream(self, verb, stream):
        self._take("stream", stream)

    def _create_event(self, verb):
        return self._make("event", (self._here[get_ident()],))

    def _create_timed_event(self, verb):
        return self._make("event", (self._here[get_ident()], "timed"))

    def _destroy_event(self, verb, event):
        self._take("event", event)

    def _record(self, verb, event, stream):
        assert event in self.alive["event"]
        self.times[event] = time.monotonic()
        self._is_here(self.alive["stream"][stream][0])

    def _wait(self, verb, stream, event):
        assert event in self.alive["event"]
        self._is_here(self.alive["stream"][stream][0])

    def _finished(self, verb, event):
        self._is_here(self.alive["event"][event][0])
        return True

    def _elapsed(self, verb, first, last):
        timed = (self._here[get_ident()], "timed")
        assert (self.alive["event"][first], self.alive["event"][last]) == (timed, timed)
        return 1e3 * (self.times[last] - self.times[first])

    def _synchronize(self, verb, stream):
        self._is_here(self.alive["stream"][stream][0])

    def _copy(self, verb, target, source, nbytes, stream):
        assert nbytes
        self._at(stream, lambda: ctypes.memmove(target, source, nbytes))

    def _fill(self, verb, target, value, nbytes, stream):
        self._at(stream, lambda: ctypes.memset(target, value, nbytes))

    def _load(self, verb, code):
        here = self._here[get_ident()]
        assert code == f"code for host{here}".encode()
        return self._make("module", (here,))

    def _unload(self, verb, module):
        self._take("module", module)

    def _find(self, verb, module, entry, device):
        self._is_here(device.index)
        assert (module in self.alive["module"], entry) == (True, "add_rows")
        return self.alive["module"][module]

    def _launch(self, verb, found, launch, stream):
        self._is_here(found[0])
        held = ArgumentBlock(launch.args, END)
        pointer, block, size, length, end = held.extra
        assert (pointer, size, end) == (1, 2, END)
        raw = ctypes.string_at(block, ctypes.c_size_t.from_address(length).value)
        assert raw == launch.args
        x, y, rows, width = struct.unpack("<QQii", raw)

        def work():
            to, more = (bytes_at(at, 4 * rows * width).view(np.float32) for at in (x, y))
            to += more

        self._at(stream, work)

    def _begin_capture(self, verb, stream):
        self._is_here(self.alive["stream"][stream][0])
        self._recording[stream] = []

    def _end_capture(self, verb, stream):
        return self._make("recorded", (self._here[get_ident()], self._recording.pop(stream)))

    def _instantiate(self, verb, recorded):
        return self._make("graph", self.alive["recorded"][recorded])

    def _forget_capture(self, verb, recorded):
        self._take("recorded", recorded)

    def _destroy_graph(self, verb, graph):
        self._take("graph", graph)

    def _launch_graph(self, verb, graph, stream):
        self._is_here(self.alive["stream"][stream][0])
        self._replay(graph)

    def _replay(self, graph):
        for work in self.alive["graph"][graph][1]:
            work()
        return 0
