"""How fast a plan decodes: the bytes that a token takes from each place, over the places' rates.

Pure. What a token needs of the dense weights is read where they lie; of the experts, those that a
device holds are read there, the others by the CPU and over the link at the same time, and what is
in no memory comes from the file first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from attrs import asdict, field, frozen

Lane = Literal["vram", "link", "host", "file"]
"""Where bytes are read: a device's memory, its link to the host, host memory, the model's file."""

ROUND_S = 0.00005
"""What a round takes besides reading: Python before and after it."""


@frozen
class Rate:
    """Bytes (or operations) a second, and where the figure is from."""

    bytes_s: float
    origin: str


@frozen(kw_only=True)
class Pace:
    """What is known for a prediction.

    `rates` has a rate for each lane; `dense` the bytes of dense weights that a token reads; `asked`
    how often a token asks for each expert, in the order in which places are given away.
    `link_share` is the part of what no device holds that goes over the link, None for the part that
    ends both lanes at the same time; `cached` bytes of a mapped file may stay in host memory.
    `compute` are the operations a second of a prompt's products, None where that is not known.
    """

    rates: Mapping[Lane, Rate]
    dense: int
    asked: Sequence[float] = ()
    link_share: float | None = 0.0
    cached: int = 0
    compute: Rate | None = None


@frozen(kw_only=True)
class Placed:
    """Experts by place, in the order of `Pace.asked`: on the first device, on helpers, in RAM.

    The rest is in the file, which is mapped or not. `blob` is the mean size of an expert, `pinned`
    the part of those in RAM that the link can read. `dense_in`: where the dense weights are.
    """

    cached: int = 0
    helped: int = 0
    in_ram: int = 0
    blob: float = 0.0
    pinned: float = 0.0
    mapped: bool = False
    dense_in: Lane = "host"


@frozen(kw_only=True)
class Speed:
    """A prediction for decoding one sequence at a short context.

    `bytes_by_lane` is what a token reads there, `seconds` the whole of it.
    """

    tokens_s: float
    seconds: float
    bytes_by_lane: Mapping[Lane, int]
    rates: Mapping[Lane, Rate] = field(factory=dict)

    def as_json(self) -> dict[str, Any]:
        """As a member of the plan's document."""
        return {
            "decode_tok_s": self.tokens_s,
            "seconds_a_token": self.seconds,
            "lanes": {
                lane: {"bytes_a_token": nbytes, **asdict(self.rates[lane])}
                for lane, nbytes in self.bytes_by_lane.items()
            },
        }

    def __str__(self) -> str:
        parts = [
            f"{nbytes / 2**20:.1f} MiB from {_NAMES[lane]} at {self.rates[lane].bytes_s / 1e9:.1f} "
            f"GB/s ({self.rates[lane].origin})"
            for lane, nbytes in self.bytes_by_lane.items()
            if nbytes
        ]
        return f"about {self.tokens_s:.1f} tokens/s: a token reads {', '.join(parts)}"


_NAMES: Mapping[Lane, str] = {
    "vram": "VRAM",
    "link": "host memory over the link",
    "host": "host memory",
    "file": "the file",
}


def predict(pace: Pace, placed: Placed) -> Speed:
    """The rate of decoding with experts placed so."""
    first, helped, ram, rest = _asked(pace.asked, placed)
    size = placed.blob
    if placed.mapped and rest:
        held = min(1.0, pace.cached / max(1.0, size * len(pace.asked)))
        ram, rest = ram + rest * held, rest * (1 - held)
    over_link = (ram + rest) * _share(pace, placed)
    by_cpu = ram + rest - over_link
    reads: dict[Lane, float] = {
        "vram": first * size,
        "link": over_link * size,
        "host": by_cpu * size,
        "file": rest * size,
    }
    seconds = {lane: nbytes / pace.rates[lane].bytes_s for lane, nbytes in reads.items()}
    dense = pace.dense / pace.rates[placed.dense_in].bytes_s
    helpers = helped * size / pace.rates["vram"].bytes_s
    whole = dense + seconds["file"] + ROUND_S
    whole += max(seconds["vram"], helpers, seconds["link"], seconds["host"])
    reads["vram"] += helped * size
    reads[placed.dense_in] += pace.dense
    return Speed(
        tokens_s=1 / whole,
        seconds=whole,
        bytes_by_lane={lane: int(nbytes) for lane, nbytes in reads.items() if nbytes},
        rates=pace.rates,
    )


def learned(speed: Speed, tokens_s: float, origin: str) -> tuple[Lane, Rate] | None:
    """The rate of the one lane that all bytes came by, from a rate that was measured.

    None where there were several: then no single one can be told from the whole.
    """
    if len(speed.bytes_by_lane) != 1 or tokens_s <= 0:
        return None
    ((lane, nbytes),) = speed.bytes_by_lane.items()
    seconds = max(1 / tokens_s - ROUND_S, 0.1 / tokens_s)
    return lane, Rate(nbytes / seconds, origin)


def _asked(asked: Sequence[float], placed: Placed) -> tuple[float, float, float, float]:
    """Experts that a token asks for, by place: first device, helpers, RAM, neither."""
    bounds = (0, placed.cached, placed.cached + placed.helped)
    last = bounds[2] + placed.in_ram
    first, helped = sum(asked[: bounds[1]]), sum(asked[bounds[1] : bounds[2]])
    return first, helped, sum(asked[bounds[2] : last]), sum(asked[last:])


def _share(pace: Pace, placed: Placed) -> float:
    """The part of what no device holds that goes over the link."""
    if placed.dense_in == "host" or not placed.pinned:
        return 0.0
    if pace.link_share is not None:
        return min(pace.link_share, placed.pinned)
    link, host = pace.rates["link"].bytes_s, pace.rates["host"].bytes_s
    return min(placed.pinned, link / (link + host))
