"""The page-locked memory through which a device and the host talk, one small block.

The host writes a *frame* before a round: the round's number, ids, positions, places, wanted rows,
the lines of the rope tables. The device writes the *mail* of a layer (activations, picks, lanes),
the words that announce it, and at the end what the lanes served so far, the status and the logits.
The CPU and helpers write the rows of their lanes, and the CPU the answers that a device waits for
where a round is one graph. Nothing is reset between rounds: words and answers hold the number of
the round. Every routed layer has picks and lanes of its own, which the device writes once a round:
who reads them late reads nothing half written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from attrs import define, field, frozen
from numpy.typing import NDArray

from strata_core.errors import Refused
from strata_core.interfaces import Window
from strata_core.kernels.device.layout import LANES, PLACE_FIELDS, STATUS_BYTES
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.program import Program
from strata_core.kernels.rope import angles
from strata_core.memory.address import bytes_at
from strata_core.runtime import Runtime

LINE = 64
MOST_HELPERS = 3
_LAST = (1 << 63) - 1

FRAME = ("round", "ids", "positions", "logits_rows", "places", "cos", "sin")
"""Parts of a frame, in order."""


@frozen
class Shape:
    """Sizes that the exchange is made for; widths and counts of the program's routed layers."""

    tokens: int
    top_k: int
    inputs: int
    outputs: int
    layers: int
    vocabulary: int
    half: int

    @classmethod
    def of(cls, program: Program, tokens: int) -> Shape:
        """The sizes of a program, in windows of at most `tokens`."""
        routed = [op for op in program.ops if op.kernel == "experts"]
        widths = [[int(getattr(op.args[n], "width", 0)) for op in routed] for n in ("x", "out")]
        return cls(
            tokens=tokens,
            top_k=program.top_k,
            inputs=max(widths[0], default=0),
            outputs=max(widths[1], default=0),
            layers=len(routed),
            vocabulary=program.vocabulary,
            half=program.rope.dim // 2,
        )

    @property
    def entries(self) -> int:
        """Entries of the largest window."""
        return self.tokens * self.top_k


def next_number(number: int) -> int:
    """The number of the round after one; 0 is none's, as memory holds it before the first."""
    return number + 1 if number < _LAST else 1


def frame_regions(shape: Shape) -> Regions:
    """Where the parts of a frame lie, on the host and on a device alike."""
    regions = Regions()
    sizes = {
        "round": 8,
        "ids": 4 * shape.tokens,
        "positions": 4 * shape.tokens,
        "logits_rows": 4 * shape.tokens,
        "places": 8 * len(PLACE_FIELDS) * shape.tokens,
        "cos": 4 * shape.half * shape.tokens,
        "sin": 4 * shape.half * shape.tokens,
    }
    for name in FRAME:
        regions.add(name, sizes[name])
    return regions


def exchange_regions(shape: Shape) -> Regions:
    """Where everything else lies that host and devices exchange."""
    regions = Regions()
    words = shape.layers * (1 + MOST_HELPERS) + 1
    regions.add("words", LINE * words)
    regions.add("answers", LINE * shape.layers)
    regions.add("x", 4 * shape.tokens * shape.inputs)
    for name in ("picks", "lanes", "host"):
        regions.add(name, picks_of(shape, shape.layers))
    regions.add("host_rows", 4 * shape.entries * shape.outputs)
    regions.add("share", 4 * (shape.entries + 1))
    add_counts(regions, shape)
    regions.add("result", STATUS_BYTES + 4 * shape.tokens * shape.vocabulary)
    regions.add("helper status", LINE * MOST_HELPERS)
    return regions


def add_counts(regions: Regions, shape: Shape) -> None:
    """Entries served so far, by routed layer and lane: right before "result", for one copy of both.

    A device adds to its own; at the end of each round the host gets a copy.
    """
    regions.add("counts", counts_of(shape.layers))


def counts_of(layer: int) -> int:
    """Offset in "counts" of the uint64 [LANES] of the `layer`-th routed layer."""
    return 8 * LANES * layer


def picks_of(shape: Shape, layer: int) -> int:
    """Offset in "picks", "lanes" and "host" of those of the `layer`-th routed layer."""
    return 4 * shape.entries * layer


def word(shape: Shape, layer: int, helper: int = 0) -> int:
    """Offset in "words" of what announces the mail of the `layer`-th routed layer.

    `layer` == shape.layers is the end of the round; `helper` (1 to 3) the rows of that helper.
    """
    return LINE * (layer if not helper else shape.layers * helper + 1 + layer)


@frozen(eq=False)
class _Token:
    """A frame's parts for its first token; to write a number through an array takes longer."""

    number: memoryview
    id: memoryview
    position: memoryview
    row: memoryview
    place: memoryview
    cos: memoryview
    sin: memoryview

    @classmethod
    def of(cls, views: Mapping[str, NDArray[Any]]) -> _Token:
        """Those of a frame by the names of its parts."""
        return cls(
            number=views["round"].data,
            id=views["ids"].data,
            position=views["positions"].data,
            row=views["logits_rows"].data,
            place=views["places"][0].data,
            cos=views["cos"][0].view(np.uint8).data,
            sin=views["sin"][0].view(np.uint8).data,
        )


@define(eq=False)
class Exchange:
    """The block at its host address, with views for the host to read and write."""

    shape: Shape
    address: int
    frame: Regions
    rest: Regions
    _views: dict[str, NDArray[Any]] = field(factory=dict, init=False)
    _first: _Token | None = field(default=None, init=False)

    @classmethod
    def plan(cls, shape: Shape) -> Exchange:
        """Sizes alone; `settle` gives it its place."""
        return cls(shape, 0, frame_regions(shape), exchange_regions(shape))

    @property
    def nbytes(self) -> int:
        """Bytes of the whole block."""
        return self.frame.nbytes + self.rest.nbytes

    def settle(self, address: int) -> None:
        """Lie at `address`, zeroed."""
        self.address = self.frame.base = address
        self.rest.base = address + self.frame.nbytes
        bytes_at(address, self.nbytes)[:] = 0
        self._views = {name: self._frame_view(name) for name in FRAME}
        self._first = _Token.of(self._views)

    def alias(self, runtime: Runtime, device: int) -> int:
        """Where a device finds the block. Raises Refused."""
        found = runtime.alias(self.address, device)
        if found is None:
            raise Refused(
                f"{runtime.label}{device} cannot address page-locked host memory",
                "the driver gives no alias for what the host and the devices exchange",
                "use another device, or --backend cpu",
            )
        return found

    def _frame_view(self, name: str) -> NDArray[Any]:
        kinds: dict[str, Any] = {
            "round": np.int64,
            "places": np.uint64,
            "cos": np.float32,
            "sin": np.float32,
        }
        width = {"places": len(PLACE_FIELDS), "cos": self.shape.half, "sin": self.shape.half}
        raw = bytes_at(self.frame.at(name), self.frame.size(name))
        flat: NDArray[Any] = raw.view(kinds.get(name, np.int32))
        return flat.reshape(-1, width[name]) if name in width else flat

    def array(self, name: str, dtype: Any, *shape: int) -> NDArray[Any]:
        """A view of a region other than the frame's."""
        count = int(np.prod(shape)) * np.dtype(dtype).itemsize
        made: NDArray[Any] = bytes_at(self.rest.at(name), count).view(dtype).reshape(shape)
        return made

    def fill_frame(
        self, number: int, window: Window, places: Sequence[Sequence[int]], program: Program
    ) -> None:
        """Write the frame of round `number`; `places` are those of the window's tokens."""
        tokens, wanted = len(window.ids), len(window.logits_rows)
        views = self._views
        views["round"][0] = number
        views["ids"][:tokens] = window.ids
        views["positions"][:tokens] = window.positions
        views["logits_rows"][:wanted] = window.logits_rows
        views["places"][:tokens] = places
        views["cos"][:tokens], views["sin"][:tokens] = angles(program.rope, window.positions)

    def fill_token(
        self,
        number: int,
        token: int,
        position: int,
        place: Sequence[int],
        turns: tuple[bytes, bytes],
    ) -> None:
        """The frame of a window of one token; `turns` are the bytes of its rows of cos and sin."""
        first = self._first
        assert first is not None, "it has its place"
        first.number[0], first.id[0], first.position[0], first.row[0] = number, token, position, 0
        to = first.place
        to[0], to[1], to[2], to[3] = place
        first.cos[:], first.sin[:] = turns
