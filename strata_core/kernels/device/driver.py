"""What a vendor's driver offers, as the table of functions that `DriverRuntime` is written on.

A plugin for a driver of the usual shape (a current device for each thread, streams, events, graphs
of captured streams, modules of compiled code) fills `DriverCalls` and has all verbs of
`strata_core.runtime`. Every function is called with what is wanted in words, for its error, and
then with its arguments. It raises Refused where the driver has not enough of something, else
DeviceError; after either nothing has changed. What a function makes (a stream, a module) may be an
object of the plugin's; it is kept as long as what it stands for, and given back as it came.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

from attrs import frozen

from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.device.sources import Source
from strata_core.runtime import Device, KernelKey, Launch

POINTER, SIZE = 1, 2
"""Marks in the list of extra launch arguments: what follows is the block, or its size."""


@frozen
class Compiled:
    """Code that a driver loads, and the name of the kernel in it."""

    code: bytes
    entry: str


Obtain = Callable[[KernelKey, str], Compiled]
"""The code of a kernel for a device's architecture. Raises DeviceError."""


@frozen(kw_only=True)
class DriverCalls:
    """A driver's functions; "here" is the device that `set_device` named last on this thread."""

    describe: Callable[[], Sequence[Device]]
    """All devices; opens no context."""
    take_error: Callable[[], str | None]
    """This thread's pending error as text, cleared."""
    graph_launcher: Callable[[], int]
    """Address of the C function that `Runtime.graph_launcher` is."""

    ticks: Callable[[str, int], float]
    """Ticks in a second of the clock that kernels read on a device; 0: not known."""

    set_device: Callable[[str, int], object]
    open_context: Callable[[str], object]
    """Something small that opens the context of the device here."""
    wait_for_device: Callable[[str], object]
    memory: Callable[[str], tuple[int, int]]
    """Bytes free and in all, here."""

    alloc: Callable[[str, int], Any]
    free: Callable[[str, int], object]
    host_alloc: Callable[[str, int], Any]
    """Page-locked memory that every device can address."""
    host_free: Callable[[str, int], object]
    register: Callable[[str, int, int], object]
    unregister: Callable[[str, int], object]
    alias: Callable[[str, int], int | None]
    """Where devices find the start of a page-locked range."""

    create_stream: Callable[[str], Any]
    destroy_stream: Callable[[str, int], object]
    create_event: Callable[[str], Any]
    create_timed_event: Callable[[str], Any]
    destroy_event: Callable[[str, int], object]
    record: Callable[[str, int, int], object]
    """(event, stream)."""
    wait: Callable[[str, int, int], object]
    """(stream, event)."""
    finished: Callable[[str, int], bool]
    elapsed: Callable[[str, int, int], float]
    """Milliseconds from the first to the second of two timed events."""
    synchronize: Callable[[str, int], object]
    copy: Callable[[str, int, int, int, int], object]
    """(target, source, bytes, stream)."""
    fill: Callable[[str, int, int, int, int], object]
    """(target, byte, bytes, stream)."""

    load: Callable[[str, bytes], Any]
    """A module of compiled code, here."""
    unload: Callable[[str, Any], object]
    find: Callable[[str, Any, str, Device], Any]
    """(module, entry, the device here): what `launch` is given."""
    launch: Callable[[str, Any, Launch, int], object]
    """(what was found, launch, stream); the argument block is taken before this returns."""

    begin_capture: Callable[[str, int], object]
    end_capture: Callable[[str, int], Any]
    """What was recorded, which `instantiate` makes a graph of."""
    instantiate: Callable[[str, Any], Any]
    forget_capture: Callable[[str, Any], object]
    destroy_graph: Callable[[str, int], object]
    launch_graph: Callable[[str, int, int], object]
    """(graph, stream)."""


class ArgumentBlock:
    """A launch's packed arguments as drivers take them: marks and addresses, closed by `end`.

    `extra` holds while this object lives.
    """

    def __init__(self, args: bytes, end: int) -> None:
        self._block = ctypes.create_string_buffer(args, max(len(args), 1))
        self._size = ctypes.c_size_t(len(args))
        block, size = ctypes.addressof(self._block), ctypes.addressof(self._size)
        self.extra = (ctypes.c_void_p * 5)(POINTER, block, SIZE, size, end)


def obtain_code(
    cache: CodeCache | None,
    source: Source,
    facts: Sequence[str],
    compile_: Callable[[Source], bytes],
) -> Compiled:
    """Code from the cache, else compiled and kept there.

    `facts` is all beside the source that decides what the code is: what compiles, its version, its
    target, its options. Any thread may call this.
    """
    name = CodeCache.key(*facts, source.name, source.text)
    code = cache.read(name) if cache else None
    if code is None:
        code = compile_(source)
        if cache:
            cache.write(name, code)
    return Compiled(code, source.entry)
