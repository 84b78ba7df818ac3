"""The verbs of an accelerator: the small set that core's policies are written on.

A GPU plugin supplies one object with these methods; the simulated accelerator of
`strata_core.testing` is another. Core decides what lives where and in which order things happen;
a runtime only carries out.

Handles of streams, events and graphs are the native ones as integers, so that compiled code can
use them. Sizes are bytes, addresses integers: of host memory as the CPU sees it, of device memory
and of aliases as that device sees it. Unless a docstring says otherwise a method may be called
from any thread, but one object (a stream, an event, a capture) by one thread at a time.

Errors. A verb that the driver refuses for lack of memory raises `Refused`; any other failure raises
`DeviceError`. After either, the verb has changed nothing, but the driver may keep the error
pending for the thread that called, and then later verbs of that thread fail with it: call
`take_error` on the same thread before going on after a refusal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from attrs import frozen

PLAIN_ROOM = 48 << 10
"""Bytes of shared memory that a block may have on every accelerator."""


@frozen(kw_only=True)
class Device:
    """One accelerator, told without opening a context on it.

    `index` counts from 0 in the runtime's order; `label` is what logs call it ("SIM1"); `name` the
    product; `architecture` what kernels are compiled for; `total` its memory
    (0: not known without a context); `units` its multiprocessors; `warp` the threads that run
    together; `shared` the most bytes of shared memory that a block may have; `matrix` whether units
    of its own multiply matrices of bytes (`kernels/device/prompt_table.py` says what they are for).
    """

    index: int
    label: str
    name: str
    architecture: str
    total: int
    units: int
    warp: int
    shared: int = PLAIN_ROOM
    matrix: bool = False


@frozen
class DeviceMemory:
    """Memory of a device now: bytes free, and bytes in all."""

    free: int
    total: int


@frozen(order=True)
class KernelKey:
    """A compiled device kernel: its name in the kernel table and what it is compiled for.

    `parameters` are weight types, a KV type, a head size, as the table's entry names them.
    """

    name: str
    parameters: tuple[str | int, ...] = ()


@frozen
class Launch:
    """One kernel launch. `args` is the packed argument block, laid out as the kernel table says.

    `grid` counts blocks, `block` threads of one; `shared` is dynamic shared memory. `early`: it
    follows another launch of the stream, and its kernel waits by itself for what that one writes;
    a runtime that can starts it before that one ends, another one takes no notice.
    """

    kernel: KernelKey
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int
    args: bytes
    early: bool = False


@runtime_checkable
class Runtime(Protocol):
    """What an accelerator can be told to do."""

    # devices

    @property
    def label(self) -> str:
        """What its devices are called in logs, before their index: "SIM"."""

    def devices(self) -> Sequence[Device]:
        """All devices, in order of their index; opens no context."""

    def open_context(self, device: int) -> None:
        """Make a device ready for use; does nothing where it is. Raises Refused, DeviceError.

        Every other verb needs an open context on the device that it concerns.
        """

    def memory(self, device: int) -> DeviceMemory:
        """What is really free on a device now."""

    def take_error(self) -> str | None:
        """The driver's pending error of this thread as text, cleared; None where it has none."""

    # device memory

    def alloc(self, device: int, nbytes: int) -> int:
        """Device memory, aligned to 256 bytes, contents undefined. Raises Refused."""

    def free(self, device: int, address: int) -> None:
        """Give back what `alloc` gave. Work that uses it must have finished."""

    # host memory

    def host_alloc(self, nbytes: int) -> int:
        """Page-locked host memory that every open device can address and copy. Raises Refused."""

    def host_free(self, address: int) -> None:
        """Give back what `host_alloc` gave. Work that uses it must have finished."""

    def register(self, address: int, nbytes: int) -> None:
        """Page-lock memory that exists, for copies and addressing by all devices. Raises Refused.

        `address` and `nbytes` are multiples of the page. The memory must stay mapped until
        `unregister`; what it holds is kept.
        """

    def unregister(self, address: int) -> None:
        """Undo `register`; before the memory is unmapped, after work that uses it."""

    def alias(self, address: int, device: int) -> int | None:
        """Where a device finds host memory that is page-locked; None where it cannot."""

    # streams, events, copies

    def create_stream(self, device: int) -> int:
        """A stream that no other one waits for by itself."""

    def destroy_stream(self, stream: int) -> None:
        """Free a stream; its work must have finished."""

    def create_event(self, device: int) -> int:
        """An event without timing, not recorded yet."""

    def destroy_event(self, event: int) -> None:
        """Free an event."""

    def record(self, event: int, stream: int) -> None:
        """The event happens when everything put on the stream so far is done."""

    def wait(self, stream: int, event: int) -> None:
        """What is put on the stream from now on waits for the event; the host does not."""

    def finished(self, event: int) -> bool:
        """Whether the event has happened; an event that was never recorded has. May raise."""

    def synchronize(self, stream: int) -> None:
        """Wait on the host until the stream is empty. Raises DeviceError if its work failed."""

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy in stream order, in any direction. `target` and `source` are host or device memory.

        Host memory that is not page-locked may be copied before this returns. A copy whose host
        side lies in two registrations is refused with DeviceError.
        """

    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """Set `nbytes` of device memory to the byte `value`, in stream order."""

    # kernels and graphs

    def load(self, device: int, kernels: Sequence[KernelKey]) -> None:
        """Compile and load kernels, so that a launch only launches. Raises DeviceError."""

    def launch(self, launch: Launch, stream: int) -> None:
        """Run a loaded kernel in stream order."""

    def begin_capture(self, stream: int) -> None:
        """From now on what is put on the stream is recorded instead of done."""

    def end_capture(self, stream: int) -> int:
        """The graph of what was recorded, ready to launch."""

    def destroy_graph(self, graph: int) -> None:
        """Free a graph that is not running."""

    def launch_graph(self, graph: int, stream: int) -> None:
        """Run a graph in stream order."""

    @property
    def graph_launcher(self) -> int:
        """Address of a C function `int32 launch(void *graph, void *stream)`; 0 is success.

        Compiled code calls it from any thread, without the interpreter's lock; it does what
        `launch_graph` does. It holds until `close`.
        """

    def close(self) -> None:
        """Free whatever is left and close the contexts. Calling it again does nothing."""


@frozen
class WaitClock:
    """The clock by which a device's kernels bound their waits: its ticks in a second.

    0 where a kernel must not wait for the host, and then why: "why not" in a few words.
    """

    ticks: float
    why_not: str = ""


@runtime_checkable
class BoundsWaits(Protocol):
    """A runtime whose kernels may wait for the host, on some devices at least."""

    def wait_clock(self, device: int) -> WaitClock:
        """What `ticks()` of the device sources counts there. The device's context is open."""


@runtime_checkable
class TimesEvents(Protocol):
    """A runtime whose events can tell how much time lay between them."""

    def create_timed_event(self, device: int) -> int:
        """As `create_event`, for an event that keeps the time when it happened."""

    def elapsed(self, first: int, last: int) -> float:
        """Seconds from one timed event of a device to another; both have happened.

        Raises DeviceError where one has not, or keeps no time.
        """


@runtime_checkable
class StatesLink(Protocol):
    """A runtime that says what its link moves, instead of having it measured."""

    def link_rate(self, device: int) -> float:
        """Bytes a second from host memory to the device."""
