"""A stand-in for CuPy's modules and the driver's library, on host memory: everything is at once.

It answers as the CUDA runtime does, so that the plugin's own code runs where no device is. One
kernel exists, `add_rows`. `fail` names a function and the status that it answers from then on.
"""

from __future__ import annotations

import ctypes
import struct
import time
from collections import Counter
from types import SimpleNamespace

import numpy as np

from strata_core.memory.address import bytes_at
from strata_cuda.binding import Binding

GIB = 1 << 30
BUFFER, SIZE = 1, 2


class Failed(RuntimeError):
    def __init__(self, status):
        super().__init__(f"cudaError{status}: a text")
        self.status = status


class FakeCuda:
    """CuPy's `cuda.runtime`, `cuda.driver` and `cuda.nvrtc` in one, and the driver's calls."""

    CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8

    def __init__(self, devices=2, memory=GIB, pins=GIB):
        self.count, self.memory, self.pins = devices, memory, pins
        self.fail, self.calls = {}, Counter()
        self.device = None
        self.blocks, self.host, self.registered = {}, {}, {}
        self.handles, self.next = {}, 0x1000
        self.times = {}
        self.recording, self.graphs = {}, {}
        self.options = []
        self.major, self.minor, self.early = 9, 0, 0
        self._launcher = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(
            lambda graph, stream: self._replay(graph)
        )

    def binding(self):
        driver = SimpleNamespace(
            cuLaunchKernel=self._launch,
            cuLaunchKernelEx=self._launch_early,
            cuGraphLaunch=self._launcher,
            cuGetErrorName=self._name,
        )
        return Binding(self, self, self, driver)

    def __getattribute__(self, name):
        found = object.__getattribute__(self, name)
        if name.startswith("_") or name == "binding" or not callable(found):
            return found

        def call(*args):
            self.calls[name] += 1
            if name in self.fail:
                self.check_status(self.fail[name])
            return found(*args)

        call.__name__ = name
        return call

    def _handle(self, kind):
        self.next += 8
        self.handles[self.next] = kind
        return self.next

    def _name(self, code, text):
        text._obj.value = f"CUDA_ERROR_{code}".encode()
        return 0

    def check_status(self, status):
        if status:
            raise Failed(status)

    # devices and memory

    def getDeviceCount(self):  # noqa: N802 - CUDA's name, and so on
        return self.count

    def getDeviceProperties(self, index):  # noqa: N802
        return {
            "name": b"Fake\0\0",
            "major": self.major,
            "minor": self.minor,
            "totalGlobalMem": self.memory,
            "multiProcessorCount": 132,
            "warpSize": 32,
            "sharedMemPerBlockOptin": 227 << 10,
        }

    def setDevice(self, device):  # noqa: N802
        self.device = device

    def deviceSynchronize(self):  # noqa: N802
        pass

    def memGetInfo(self):  # noqa: N802
        used = sum(len(b) for d, b in self.blocks.values() if d == self.device)
        return self.memory - used, self.memory

    def malloc(self, nbytes):
        if nbytes > self.memGetInfo()[0]:
            raise Failed(2)
        block = ctypes.create_string_buffer(nbytes + 256)
        address = (ctypes.addressof(block) + 255) // 256 * 256
        self.blocks[address] = self.device, block
        return address

    def free(self, address):
        if address:
            del self.blocks[address]

    def hostAlloc(self, nbytes, flags):  # noqa: N802
        assert flags == 3
        if nbytes > self.pins:
            raise Failed(2)
        block = ctypes.create_string_buffer(max(nbytes, 1))
        self.host[ctypes.addressof(block)] = block
        return ctypes.addressof(block)

    def freeHost(self, address):  # noqa: N802
        del self.host[address]

    def hostRegister(self, address, nbytes, flags):  # noqa: N802
        assert flags == 3
        if address in self.registered:
            raise Failed(712)
        self.registered[address] = nbytes

    def hostUnregister(self, address):  # noqa: N802
        if self.registered.pop(address, None) is None:
            raise Failed(713)

    def pointerGetAttributes(self, address):  # noqa: N802
        locked = address in self.host or address in self.registered
        return SimpleNamespace(type=int(locked), devicePointer=address if locked else 0)

    # streams, events, copies

    def streamCreateWithFlags(self, flags):  # noqa: N802
        assert flags == 1
        return self._handle("stream")

    def eventCreateWithFlags(self, flags):  # noqa: N802
        assert flags in (0, 2)
        return self._handle("event")

    def _forget(self, handle):
        del self.handles[handle]

    streamDestroy = eventDestroy = lambda self, handle: self._forget(handle)  # noqa: N815

    def eventQuery(self, event):  # noqa: N802
        return self.fail.get("event", 0)

    def eventElapsedTime(self, first, last):  # noqa: N802
        assert (self.handles[first], self.handles[last]) == ("event", "event")
        return 1e3 * (self.times[last] - self.times[first])

    def eventRecord(self, event, stream):  # noqa: N802
        assert (self.handles[event], self.handles[stream]) == ("event", "stream")
        self.times[event] = time.monotonic()

    def streamWaitEvent(self, stream, event):  # noqa: N802
        assert (self.handles[event], self.handles[stream]) == ("event", "stream")

    def streamSynchronize(self, stream):  # noqa: N802
        assert self.handles[stream] == "stream"

    def _do(self, stream, work):
        if stream in self.recording:
            self.recording[stream].append(work)
        else:
            work()

    def memcpyAsync(self, target, source, nbytes, kind, stream):  # noqa: N802
        assert kind == 4
        self._do(stream, lambda: ctypes.memmove(target, source, nbytes))

    def memsetAsync(self, target, value, nbytes, stream):  # noqa: N802
        self._do(stream, lambda: ctypes.memset(target, value, nbytes))

    # graphs

    def streamBeginCapture(self, stream, mode):  # noqa: N802
        assert mode == 1
        self.recording[stream] = []

    def streamEndCapture(self, stream):  # noqa: N802
        self.graphs[handle := self._handle("captured")] = self.recording.pop(stream)
        return handle

    def graphInstantiate(self, graph):  # noqa: N802
        self.graphs[handle := self._handle("graph")] = self.graphs[graph]
        return handle

    graphDestroy = graphExecDestroy = lambda self, graph: self._forget(graph)  # noqa: N815

    def graphLaunch(self, graph, stream):  # noqa: N802
        self._replay(graph)

    def _replay(self, graph):
        for work in self.graphs[graph]:
            work()
        return 0

    # compiling, modules, launching

    def getVersion(self):  # noqa: N802
        return 13, 5

    def getSupportedArchs(self):  # noqa: N802
        return 75, 80, 90

    def createProgram(self, text, name, headers, names):  # noqa: N802
        return self._handle("program")

    def compileProgram(self, program, options):  # noqa: N802
        self.options.append(options)

    def getProgramLog(self, program):  # noqa: N802
        return "x.cu(3): note\nx.cu(7): error: no such thing\n"

    def getCUBIN(self, program):  # noqa: N802
        return b"cubin"

    def getPTX(self, program):  # noqa: N802
        return "ptx"

    def destroyProgram(self, program):  # noqa: N802
        self._forget(program)

    def moduleLoadData(self, code):  # noqa: N802
        assert code in (b"cubin", b"ptx")
        return self._handle("module")

    def moduleGetFunction(self, module, entry):  # noqa: N802
        return self._handle(f"function {entry}")

    def moduleUnload(self, module):  # noqa: N802
        assert self.handles[module] == "module"
        self._forget(module)

    def funcSetAttribute(self, function, attribute, value):  # noqa: N802
        assert attribute == 8

    def _launch_early(self, config, function, plain, extra):
        config = ctypes.cast(config, ctypes.c_void_p).value
        words = (ctypes.c_uint * 7).from_address(config)
        stream, attributes = (ctypes.c_void_p * 2).from_address(config + 32)
        assert ctypes.c_uint.from_address(config + 48).value == 1
        assert ctypes.c_int.from_address(attributes).value == 6
        assert ctypes.c_int.from_address(attributes + 8).value == 1
        self.early += 1
        return self._launch(function, *words, stream, plain, extra)

    def _launch(self, function, *args):
        *shape, stream, plain, extra = args
        assert plain is None
        if "cuLaunchKernel" in self.fail or shape[3] > 1024:
            return self.fail.get("cuLaunchKernel", 1)
        assert self.handles[function] == "function add_rows"
        assert (extra[0], extra[2], extra[4]) == (BUFFER, SIZE, None)
        block = ctypes.string_at(extra[1], ctypes.c_size_t.from_address(extra[3]).value)
        x, y, rows, width = struct.unpack("<QQii", block)

        def work():
            to, more = (bytes_at(at, 4 * rows * width).view(np.float32) for at in (x, y))
            to += more

        self._do(stream, work)
        return 0
