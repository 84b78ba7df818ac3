"""What the simulated accelerator did: bytes by direction and stream, launches, waits. No clocks."""

from __future__ import annotations

from collections import Counter
from typing import Any, Literal

from attrs import define, field

Direction = Literal[
    "host_to_device", "device_to_host", "device_to_device", "peer_to_peer", "host_to_host"
]


@define
class StreamAccount:
    """One stream: its work and the waits for it; `host_waits` are synchronizations and polls."""

    copied: Counter[str] = field(factory=Counter)
    filled: int = 0
    launches: int = 0
    graph_launches: int = 0
    synchronizes: int = 0
    event_waits: int = 0

    def as_dict(self) -> dict[str, Any]:
        """The account as plain data."""
        return {
            "copied": dict(self.copied),
            "filled": self.filled,
            "launches": self.launches,
            "graph_launches": self.graph_launches,
            "synchronizes": self.synchronizes,
            "event_waits": self.event_waits,
        }


@define
class Level:
    """An amount that goes up and down, and its highest."""

    now: int = 0
    peak: int = 0

    def add(self, amount: int) -> None:
        """Change the amount."""
        self.now += amount
        self.peak = max(self.peak, self.now)

    def as_dict(self) -> dict[str, int]:
        """The level as plain data."""
        return {"in_use": self.now, "peak": self.peak}


@define
class LinkAccount:
    """Bytes that went over a device's link: by copies, and by kernels that said so."""

    to_device: int = 0
    from_device: int = 0

    def as_dict(self) -> dict[str, int]:
        """The account as plain data."""
        return {"to_device": self.to_device, "from_device": self.from_device}


@define
class Account:
    """Everything counted since the runtime was made. Guarded by the runtime's lock."""

    links: tuple[LinkAccount, ...]
    vram: tuple[Level, ...]
    pinned: Level = field(factory=Level)
    pinned_by: Counter[str] = field(factory=Counter)
    streams: dict[str, StreamAccount] = field(factory=dict)
    kernels: Counter[str] = field(factory=Counter)
    polls: int = 0
    launcher_calls: int = 0

    def pin(self, kind: Literal["contexts", "host_alloc", "registered"], amount: int) -> None:
        """`amount` more bytes are pinned (fewer, where it is negative)."""
        self.pinned.add(amount)
        self.pinned_by[kind] += amount

    def copied(self, stream: str, source: int | None, target: int | None, nbytes: int) -> None:
        """A copy from one device to another; None is the host."""
        self.streams[stream].copied[direction(source, target)] += nbytes
        if source != target:
            if target is not None:
                self.links[target].to_device += nbytes
            if source is not None:
                self.links[source].from_device += nbytes

    def as_dict(self, label: str) -> dict[str, Any]:
        """Everything as plain data; devices are named `label` and their index."""
        total: Counter[str] = Counter()
        for stream in self.streams.values():
            total += stream.copied
        return {
            "copied": dict(total),
            "streams": {name: stream.as_dict() for name, stream in self.streams.items()},
            "links": {f"{label}{i}": link.as_dict() for i, link in enumerate(self.links)},
            "vram": {f"{label}{i}": level.as_dict() for i, level in enumerate(self.vram)},
            "pinned": {**self.pinned.as_dict(), "by": dict(+self.pinned_by)},
            "kernels": dict(self.kernels),
            "graph_launches": sum(stream.graph_launches for stream in self.streams.values()),
            "launcher_calls": self.launcher_calls,
            "polls": self.polls,
        }


def direction(source: int | None, target: int | None) -> Direction:
    """What a copy between two devices is called; None is the host."""
    if source is None:
        return "host_to_host" if target is None else "host_to_device"
    if target is None:
        return "device_to_host"
    return "device_to_device" if source == target else "peer_to_peer"
