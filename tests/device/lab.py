"""What the measuring programs share: kernels, memory, timing, tables. CuPy is imported late."""

from __future__ import annotations

import ctypes
import json
import time
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parent
KERNELS = HERE / "kernels"
HIDDEN, INNER, EXPERTS, TOP, LAYERS = 2048, 768, 128, 8, 48
"""The 30B-A3B shape, whose rounds are measured."""
OPTIONS = ("--fmad=false", "-std=c++17")


def source(name):
    """A kernel file as one self-contained text."""
    text = (KERNELS / name).read_text()
    return text.replace('#include "exact.cuh"', (KERNELS / "exact.cuh").read_text())


def missing():
    """Why nothing can be measured here, or None."""
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - an absent or a broken CuPy both mean: skip
        return f"no device: {error}"
    return None


class Module:
    """A compiled kernel file; `launch` names a kernel, its grid and its plain arguments."""

    def __init__(self, name, defines=(), binaries=None):
        import cupy

        ready = binaries and Path(binaries) / f"{Path(name).stem}{''.join(defines)}.cubin"
        if ready and ready.exists():
            self._module = cupy.RawModule(path=str(ready))
        else:
            options = OPTIONS + tuple(f"-D{d}" for d in defines)
            self._module = cupy.RawModule(code=source(name), options=options)
        self._kernels = {}
        self.early = False
        """Launch with programmatic dependence: a kernel may start before its predecessor ends."""

    def __call__(self, name, grid, block, args, shared=0):
        kernel = self._kernels.get(name)
        if kernel is None:
            kernel = self._kernels[name] = self._module.get_function(name)
        if shared > 48 * 1024 and kernel.max_dynamic_shared_size_bytes < shared:
            kernel.max_dynamic_shared_size_bytes = shared
        if self.early:
            launch_early(kernel.kernel.ptr, grid, block, args, shared)
        else:
            kernel(grid, block, args, shared_mem=shared)


class _Attribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_uint32 * 16)]


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    ]


def launch_early(function, grid, block, args, shared):
    """cuLaunchKernelEx with the attribute that CuPy has no word for, on the current stream."""
    import cupy

    three = lambda t: (ctypes.c_uint * 3)(*(*t, 1, 1)[:3])  # noqa: E731
    values = [
        np.uint64(a.data.ptr) if isinstance(a, cupy.ndarray) else np.asarray(a)[()] for a in args
    ]
    cells = [np.atleast_1d(v) for v in values]
    pointers = (ctypes.c_void_p * len(cells))(*(c.ctypes.data for c in cells))
    attribute = _Attribute(6, b"", (ctypes.c_uint32 * 16)(1))
    stream = cupy.cuda.get_current_stream().ptr
    config = _Launch(three(grid), three(block), shared, stream, ctypes.pointer(attribute), 1)
    library = ctypes.CDLL("libcuda.so.1")
    code = library.cuLaunchKernelEx(
        ctypes.byref(config), ctypes.c_void_p(function), pointers, ctypes.c_void_p()
    )
    if code:
        raise RuntimeError(f"cuLaunchKernelEx: error {code}")


def mapped(nbytes):
    """(uint8 host array, device alias) of fresh mapped pinned memory; never freed."""
    from cupy.cuda import runtime

    address = runtime.hostAlloc(nbytes, 3)
    host = np.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), np.uint8)
    return host, runtime.pointerGetAttributes(address).devicePointer


def at(address, shape, dtype):
    """A CuPy array over memory that somebody else owns."""
    import cupy

    nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = cupy.cuda.UnownedMemory(int(address), nbytes, None)
    return cupy.ndarray(shape, dtype, cupy.cuda.MemoryPointer(memory, 0))


def capture(stream, body):
    """`body` as a graph, warmed by one launch; whatever was uploaded before has landed."""
    import cupy

    cupy.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        body()
        graph = stream.end_capture()
        graph.launch(stream)
    stream.synchronize()
    return graph


def event_times(stream, work, times):
    """Milliseconds of device time of each call of `work`."""
    import cupy

    out = []
    for _ in range(times):
        a, b = cupy.cuda.Event(), cupy.cuda.Event()
        a.record(stream)
        with stream:
            work()
        b.record(stream)
        b.synchronize()
        out.append(cupy.cuda.get_elapsed_time(a, b))
    return np.array(out)


def wall(work):
    """Seconds of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def spread(values):
    """Median and 99th percentile, as text."""
    return f"{np.median(values):.4g} / {np.percentile(values, 99):.4g}"


class Report:
    """Rows of one table, printed as they come and written as JSON."""

    def __init__(self, title, columns, out=None):
        self.title, self.columns, self.rows = title, columns, []
        self._path = out and Path(out) / f"{title}.json"
        print(f"\n## {title}\n" + " | ".join(columns), flush=True)

    def add(self, *cells):
        self.rows.append([c if isinstance(c, (int, str)) else float(c) for c in cells])
        text = [f"{c:.4g}" if isinstance(c, (float, np.floating)) else str(c) for c in cells]
        print(" | ".join(text), flush=True)
        if self._path:
            data = {"title": self.title, "columns": self.columns, "rows": self.rows}
            self._path.write_text(json.dumps(data, indent=1))
