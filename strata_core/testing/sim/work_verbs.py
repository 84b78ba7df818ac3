"""The simulator's verbs of streams, events, copies, kernels and graphs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from typing import TYPE_CHECKING, cast

from strata_core.errors import DeviceError
from strata_core.memory.address import bytes_at
from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim.doing import Doing
from strata_core.testing.sim.event_verbs import EventVerbs, outside_capture
from strata_core.testing.sim.failure import (
    BAD_CAPTURE,
    BUSY,
    INVALID_HANDLE,
    INVALID_VALUE,
    LAUNCH_FAILED,
    NOT_FOUND,
    broken,
)
from strata_core.testing.sim.hardware import SimFaults, SimHardware
from strata_core.testing.sim.places import Place
from strata_core.testing.sim.verbs import verb
from strata_core.testing.sim.work import Copy, Fill, Graph, Recorded, Stream, Use, Work

if TYPE_CHECKING:
    from strata_core.testing.sim.runtime import SimRuntime

HostKernel = Callable[["SimRuntime", int, Launch], None]
"""(runtime, device, launch): computes what the device kernel of that name does, at once.

Where it has a method `load`, that is called with each key before the first launch; where it has
`waits`, that says of a launch whether it waits for the host. Such a kernel calls `let_others_go_on`
until the host has answered."""

Pointers = Callable[[Launch], Iterable[int]]
"""The device addresses in a launch's argument block; zero is no address."""

_THREADS = 1024
_GRID = (2**31 - 1, 65535, 65535)
_ARGS = 4096
_SHARED = 227 << 10


class WorkVerbs(EventVerbs):
    """Copies, fills, kernels, graphs, beside streams and events."""

    def __init__(
        self,
        hardware: SimHardware,
        faults: SimFaults,
        host_kernels: Mapping[str, HostKernel],
        pointers: Pointers | None,
    ) -> None:
        super().__init__(hardware, faults)
        self._kernels = dict(host_kernels)
        self._pointers = pointers
        self._loaded: dict[int, set[KernelKey]] = {}
        self._sound: dict[tuple[int, int], Launch] = {}
        self._sound_in = 0

    # copies

    @verb
    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Queue a copy."""
        on = self.queues.stream(stream, "copy")
        if nbytes < 0:
            raise broken("copy", INVALID_VALUE, f"{nbytes} bytes", "copy what there is")
        if nbytes:
            self._take(Copy(target, source, nbytes), on)

    @verb
    def fill(self, target: int, value: int, nbytes: int, stream: int) -> None:
        """Queue a fill of device memory."""
        on = self.queues.stream(stream, "fill")
        if nbytes < 0 or not 0 <= value <= 255:
            raise broken(
                "fill", INVALID_VALUE, f"{nbytes} bytes of {value}", "fill with a byte, 0 to 255"
            )
        if nbytes:
            self._take(Fill(target, value, nbytes), on)

    # kernels

    @verb
    def load(self, device: int, kernels: Sequence[KernelKey]) -> None:
        """Make kernels ready on a device; one that has no host function is refused."""
        self.need_context(device, "load")
        unknown = sorted({key.name for key in kernels} - self._kernels.keys())
        if unknown:
            raise broken(
                f"load: the simulator has no kernel {', '.join(unknown)}",
                NOT_FOUND,
                "it runs the host functions that it was given",
                "give it a host function of that name",
            )
        loaded = self._loaded.setdefault(device, set())
        for key in kernels:
            prepare = getattr(self._kernels[key.name], "load", None)
            if prepare is not None and key not in loaded:
                prepare(key)
            loaded.add(key)

    @verb
    def launch(self, launch: Launch, stream: int) -> None:
        """Run a host kernel now, after everything before it on the stream."""
        self._take(launch, self.queues.stream(stream, "launch"))

    # graphs

    @verb
    def begin_capture(self, stream: int) -> None:
        """Record instead of doing."""
        found = self.queues.stream(stream, "begin_capture")
        outside_capture(found, "begin_capture")
        found.recorded = []

    @verb
    def end_capture(self, stream: int) -> int:
        """The graph of what was recorded."""
        found = self.queues.stream(stream, "end_capture")
        if found.recorded is None:
            raise broken(
                f"end_capture: stream {found.name} is not in a capture",
                BAD_CAPTURE,
                "a capture ends once, on the stream where it began",
                "begin a capture first",
            )
        steps, found.recorded = found.recorded, None
        return self.queues.new_graph(found.device, steps).handle

    @verb
    def destroy_graph(self, graph: int) -> None:
        """Free a graph that has nothing queued."""
        self.queues.graph(graph, "destroy_graph")
        for work in self.queues.queued():
            if work.graph == graph:
                raise broken(
                    f"destroy_graph: its {work.what} on stream {work.stream.name} is not done",
                    BUSY,
                    "a graph is destroyed when it does not run",
                    "synchronize the stream it runs on",
                )
        del self.queues.graphs[graph]

    @verb
    def launch_graph(self, graph: int, stream: int) -> None:
        """Run a graph up to its last kernel now; what comes behind that is queued."""
        self.run_graph(graph, stream, "launch_graph")

    def run_graph(self, graph: int, stream: int, name: str) -> None:
        """What `launch_graph` and the launcher do."""
        found, on = self.queues.graph(graph, name), self.queues.stream(stream, name)
        outside_capture(on, name)
        if found.device != on.device:
            raise broken(
                f"{name}: a graph of device {found.device} on a stream of device {on.device}",
                INVALID_HANDLE,
                "a graph runs on the device where it was captured",
                "launch it on a stream of that device",
            )
        self.account.streams[on.name].graph_launches += 1
        if any(isinstance(step, Launch) and self._awaits_host(step) for step in found.steps):
            self._start(found, on)
            return
        for step in found.steps:
            self._issue(step, on, graph)

    def _awaits_host(self, launch: Launch) -> bool:
        """Whether a kernel of this launch waits for the host."""
        waits = getattr(self._kernels[launch.kernel.name], "waits", None)
        return bool(waits and waits(launch))

    def _start(self, graph: Graph, on: Stream) -> None:
        """Run a graph in a thread of its own, behind what is on its stream."""
        self.queues.drain(on)
        doing = Doing(self.lock, [self._work(step, on, graph.handle) for step in graph.steps])
        self.queues.put(doing.as_one(on, graph.handle))
        doing.start(self)

    # how work is taken

    def _take(self, step: Recorded, stream: Stream) -> None:
        if stream.recorded is None:
            self._issue(step, stream, None)
            return
        self._work(step, stream, None)  # checks it
        if isinstance(step, Copy):
            for address in (step.target, step.source):
                place = self.places.resolve(address, step.nbytes, "copy")
                if place.device is None and place.pin is None:
                    raise broken(
                        "copy: a graph would hold a copy of pageable memory",
                        BAD_CAPTURE,
                        "host memory that a graph copies is page-locked",
                        "pin it, or copy outside the graph",
                    )
        stream.recorded.append(step)

    def _issue(self, step: Recorded, stream: Stream, graph: int | None) -> None:
        work = self._work(step, stream, graph)
        self.queues.put(work)
        if isinstance(step, Launch):
            self.queues.finish(work)

    def _work(self, step: Recorded, stream: Stream, graph: int | None) -> Work:
        if isinstance(step, Launch):
            self._check_launch(step, stream.device, replayed=graph is not None)
            name = f"kernel {step.kernel.name}"
            takes = self.hardware.launch_s + self.hardware.block_s * prod(step.grid)
            run = partial(self._run, step, stream)
            return Work(name, stream, (), run, graph=graph, takes=takes)
        verb = "fill" if isinstance(step, Fill) else "copy"
        target = self.places.resolve(step.target, step.nbytes, verb)
        if isinstance(step, Fill):
            if target.device is None:
                raise broken(
                    f"fill: {step.target:#x} is not device memory",
                    INVALID_VALUE,
                    "a fill is for device memory",
                    "fill host memory from the host",
                )
            uses: tuple[Use, ...] = (Use(target.address, target.end, True),)
            act = partial(self._fill, step, stream, target)
            return Work(f"fill of {step.nbytes} bytes", stream, uses, act, graph=graph)
        source = self.places.resolve(step.source, step.nbytes, "copy")
        self._check_copy(source, target)
        uses = (Use(source.address, source.end, False), Use(target.address, target.end, True))
        act = partial(self._copy, stream, source, target)
        linked = (source.device is None) != (target.device is None)
        takes = step.nbytes / self.hardware.link if linked else 0.0
        name = f"copy of {step.nbytes} bytes"
        return Work(name, stream, uses, act, graph=graph, takes=takes)

    def _check_copy(self, source: Place, target: Place) -> None:
        for place in (source, target):
            self.places.still_there(place, "copy")
        if source.address < target.end and target.address < source.end:
            raise broken(
                f"copy: {source.nbytes} bytes onto themselves",
                INVALID_VALUE,
                "source and target of a copy do not overlap",
                "copy by way of other memory",
            )

    def _check_launch(self, launch: Launch, device: int, *, replayed: bool) -> None:
        """Refuse a launch that a device refuses or that touches what it must not.

        One that is `replayed`, as a part of a graph, is looked at again only after a change of what
        an address means.
        """
        if self._sound_in != self.places.version:
            self._sound.clear()
            self._sound_in = self.places.version
        if replayed and (device, id(launch)) in self._sound:
            return
        name = launch.kernel.name
        if launch.kernel not in self._loaded.get(device, ()):
            raise broken(
                f"launch: {name} {launch.kernel.parameters} is not loaded on device {device}",
                NOT_FOUND,
                "kernels are loaded before the first launch, with the parameters they run with",
                "load it first",
            )
        sizes = (*launch.grid, *launch.block)
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        fits = all(g <= most for g, most in zip(launch.grid, _GRID, strict=True))
        if min(sizes) < 1 or not fits or threads > _THREADS or not 0 <= launch.shared <= _SHARED:
            raise broken(
                f"launch: {name} on a grid of {launch.grid} blocks of {launch.block}, "
                f"{launch.shared} bytes shared",
                INVALID_VALUE,
                f"a block has at most {_THREADS} threads and {_SHARED} bytes, a grid {_GRID}",
                "correct the kernel's grid rule",
            )
        if len(launch.args) > _ARGS:
            raise broken(
                f"launch: {name} with {len(launch.args)} bytes of arguments",
                INVALID_VALUE,
                f"an argument block has at most {_ARGS} bytes",
                "pass a pointer",
            )
        for pointer in self._pointers(launch) if self._pointers else ():
            if pointer:
                self.places.reach(device, pointer, 1, f"kernel {name}")
        if replayed:
            self._sound[device, id(launch)] = launch  # held, so that nothing else gets its id

    # how work is done

    def _run(self, launch: Launch, stream: Stream) -> None:
        name = launch.kernel.name
        self.account.streams[stream.name].launches += 1
        self.account.kernels[name] += 1
        try:
            self._kernels[name](cast("SimRuntime", self), stream.device, launch)
        except DeviceError:
            raise
        except Exception as error:
            raise broken(
                f"kernel {name} failed on {self.label}{stream.device}",
                LAUNCH_FAILED,
                repr(error),
                "see the error of the host kernel",
            ) from error

    def _copy(self, stream: Stream, source: Place, target: Place) -> None:
        for place in (source, target):
            self.places.still_there(place, f"the copy on stream {stream.name}")
        ctypes.memmove(target.address, source.address, source.nbytes)
        self.account.copied(stream.name, source.device, target.device, source.nbytes)

    def _fill(self, fill: Fill, stream: Stream, target: Place) -> None:
        bytes_at(target.address, target.nbytes)[:] = fill.value
        self.account.streams[stream.name].filled += fill.nbytes
