"""Bringing waves of experts to a device, ahead of what computes them.

Two streams, ordered by events alone: a wave's copies wait until its part of the ring is free, its
launches until the part is filled. The host puts both on their streams and does not wait for either,
so that copies run as many waves ahead as the ring has parts, across layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from attrs import define, field

from strata_core.cache.stager import Stager
from strata_core.errors import DeviceError, EngineError
from strata_core.interfaces import BlobLayout, Expert
from strata_core.kernels.device.lost import Lost
from strata_core.kernels.device.prompt_timeline import Untimed
from strata_core.kernels.device.prompt_waves import Wave
from strata_core.runtime import Runtime


@define(eq=False)
class Bringing:
    """Experts on their way to a device; used by one thread.

    `stream` is where the device computes; `asked` says whether a chunk picked an expert of the
    layer that is computed next. `new_event` gives events, of which `parts` of each kind are taken.
    """

    runtime: Runtime
    stream: int
    stager: Stager
    layouts: Mapping[int, BlobLayout]
    lost: Lost
    new_event: Callable[[], int]
    parts: int
    asked: Callable[[Expert], bool] = field(default=lambda _: True)
    times: Untimed = field(factory=Untimed)
    free: tuple[int, ...] = field(init=False)
    _filled: tuple[int, ...] = field(init=False)

    def __attrs_post_init__(self) -> None:
        self.free = tuple(self.new_event() for _ in range(self.parts))
        self._filled = tuple(self.new_event() for _ in range(self.parts))

    def begin(self, layer: int, experts: Sequence[int]) -> bool:
        """Tell the source which experts come next; whether it took that for all of them."""
        self.stager.settle()  # the source's memory may have room for no more than a layer
        try:
            self.stager.begin(layer, experts)
        except Exception:  # noqa: BLE001 - each is asked for by itself, and its error is told
            return False
        return True

    def bring(self, layer: int, wave: Wave, *, begun: bool) -> None:
        """Copy a wave's experts once its part is free; what computes them waits for that.

        Raises what the source raises for an expert that was picked. The buffer of another one may
        hold anything: a wave computes what was picked alone.
        """
        if wave.part is None:
            return
        stager, filled = self.stager, self._filled[wave.part]
        with self.times.span("held", layer, stager.stream):
            self.runtime.wait(stager.stream, self.free[wave.part])
        nbytes = len(wave.moves) * self.layouts[layer].nbytes
        with self.times.span("copy", layer, stager.stream, nbytes, len(wave.moves)):
            for index, address in wave.moves:
                expert = Expert(layer, index)
                error = self.send(expert, address, begun=begun)
                if error is not None:
                    if self.asked(expert):
                        raise error
                    self.lost.unread(expert, error)
        self.runtime.record(filled, stager.stream)
        stager.let_go(filled)
        with self.times.span("wait", layer, self.stream):
            self.runtime.wait(self.stream, filled)

    def computed(self, wave: Wave) -> None:
        """What computes a wave is on its stream: its part is free behind that."""
        if wave.part is not None:
            self.runtime.record(self.free[wave.part], self.stream)

    def send_back(
        self,
        experts: Mapping[Expert, int],
        behind: int,
        gone: Callable[[Expert, Exception], None],
    ) -> None:
        """Copy experts to their slots, behind all waves; `gone` is told of one that has an error.

        `behind` is an event that happens when all copies have. Raises only what is the device's.
        """
        stager = self.stager
        for event in self.free:
            self.runtime.wait(stager.stream, event)
        by_layer: dict[int, list[Expert]] = {}
        for expert in experts:
            by_layer.setdefault(expert.layer, []).append(expert)
        for layer, few in by_layer.items():
            begun = self.begin(layer, [expert.index for expert in few])
            for expert in few:
                error = self.send(expert, experts[expert], begun=begun)
                if error is not None:
                    gone(expert, error)
            self.runtime.record(behind, stager.stream)
            stager.let_go(behind)
            stager.settle()

    def send(self, expert: Expert, address: int, *, begun: bool) -> Exception | None:
        """Copy an expert to an address; the error where the source had one.

        Raises only what is the device's.
        """
        try:
            if not begun:
                self.stager.begin(expert.layer, [expert.index])
            self.stager.send(expert, self.layouts[expert.layer], address)
        except (DeviceError, EngineError):
            raise
        except Exception as error:  # noqa: BLE001 - a source may be a plugin's
            return error
        return None
