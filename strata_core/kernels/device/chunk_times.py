"""The times of one chunk of a prompt, as data. Pure."""

from __future__ import annotations

from typing import Any

from attrs import frozen


@frozen
class Spent:
    """Work of one kind: when the first began and the last ended, and the seconds of all of it.

    Times are seconds since the chunk began. `nbytes` of `experts` were moved.
    """

    begin: float = 0.0
    end: float = 0.0
    seconds: float = 0.0
    nbytes: int = 0
    experts: int = 0

    def as_json(self) -> dict[str, Any]:
        """Times in microseconds."""
        return {
            "begin_us": self.begin * 1e6,
            "end_us": self.end * 1e6,
            "us": self.seconds * 1e6,
        }


@frozen
class LayerTimes:
    """One layer: its experts' copies, its launches, and seconds of waiting.

    `wait` is how long the device stood still for experts, `held` how long copies waited for a free
    part of the ring. `layer` None is what comes behind the last layer with experts.
    """

    layer: int | None
    copy: Spent
    compute: Spent
    wait: float
    held: float

    def as_json(self) -> dict[str, Any]:
        """Times in microseconds."""
        moved = {"experts": self.copy.experts, "bytes": self.copy.nbytes}
        return {
            "layer": self.layer,
            "copy": self.copy.as_json() | moved,
            "compute": self.compute.as_json(),
            "wait_us": self.wait * 1e6,
            "held_us": self.held * 1e6,
        }


@frozen
class ChunkTimes:
    """A chunk of `tokens` from position `start` on."""

    tokens: int
    start: int
    layers: tuple[LayerTimes, ...]

    @property
    def seconds(self) -> float:
        """From its beginning to the end of its last launch."""
        return max((each.compute.end for each in self.layers), default=0.0)

    def sums(self) -> dict[str, float]:
        """Seconds of copies, computing and waits of all layers together, and bytes that moved."""
        return {
            "bytes": sum(each.copy.nbytes for each in self.layers),
            "copy": sum(each.copy.seconds for each in self.layers),
            "compute": sum(each.compute.seconds for each in self.layers),
            "wait": sum(each.wait for each in self.layers),
            "held": sum(each.held for each in self.layers),
        }

    def as_json(self) -> dict[str, Any]:
        """As an entry of a document; times in microseconds."""
        sums = {f"{name}_us": 1e6 * value for name, value in self.sums().items() if name != "bytes"}
        return {
            "tokens": self.tokens,
            "start": self.start,
            "us": self.seconds * 1e6,
            "bytes": self.sums()["bytes"],
            **sums,
            "layers": [each.as_json() for each in self.layers],
        }
