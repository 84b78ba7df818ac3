"""Where the time of a prompt's chunk goes: copies, computing and waits by layer, by timed events.

Off, a chunk pays a call that does nothing for each wave. On, the events of a chunk are read once it
has ended; what they tell is the device's own time.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Literal, get_args

from attrs import define, field, frozen

from strata_core.errors import UsageError
from strata_core.kernels.device.chunk_times import ChunkTimes, LayerTimes, Spent
from strata_core.memory.held import undo_all
from strata_core.runtime import Runtime, TimesEvents

Kind = Literal["compute", "wait", "copy", "held"]
"""On the computing stream: launches, and waiting for experts; on the copying one: copies, and
waiting for a free part of the ring."""

KINDS: tuple[Kind, ...] = get_args(Kind)

_NOTHING = nullcontext()


class Untimed:
    """Keeps no times."""

    def span(
        self, kind: Kind, layer: int | None, stream: int, nbytes: int = 0, experts: int = 0
    ) -> AbstractContextManager[None]:
        """Nothing, around what is put on a stream."""
        del kind, layer, stream, nbytes, experts
        return _NOTHING


@frozen
class _Span:
    kind: Kind
    layer: int | None
    first: int
    last: int
    nbytes: int
    experts: int


@define(eq=False)
class Timed(Untimed):
    """Keeps the times of chunks; used by the thread that computes them.

    Its events are made when they are first needed and used again for the next chunk; `close` frees
    them.
    """

    runtime: Runtime
    device: int
    chunks: list[ChunkTimes] = field(factory=list, init=False)
    _clock: TimesEvents = field(init=False)
    _events: list[int] = field(factory=list, init=False)
    _used: int = field(default=0, init=False)
    _begun: int = field(default=0, init=False)
    _spans: list[_Span] = field(factory=list, init=False)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.runtime, TimesEvents):
            raise UsageError(
                f"{self.runtime.label}{self.device} tells no times",
                "its runtime has no timed events",
                "leave --timeline out",
            )
        self._clock = self.runtime

    def begin(self, stream: int) -> None:
        """A chunk begins; what a failed one left is forgotten."""
        self._used, self._spans = 0, []
        self._begun = self._mark(stream)

    @contextmanager
    def _around(
        self, kind: Kind, layer: int | None, stream: int, nbytes: int, experts: int
    ) -> Iterator[None]:
        first = self._mark(stream)
        yield
        last = self._mark(stream)
        self._spans.append(_Span(kind, layer, first, last, nbytes, experts))

    def span(
        self, kind: Kind, layer: int | None, stream: int, nbytes: int = 0, experts: int = 0
    ) -> AbstractContextManager[None]:
        """Times what is put on a stream inside; `layer` None is what comes behind the last one."""
        return self._around(kind, layer, stream, nbytes, experts)

    def end(self, tokens: int, start: int) -> None:
        """The chunk of `tokens` from position `start` on has ended: read its events."""
        spent: dict[int | None, dict[Kind, list[_Span]]] = {}
        for span in self._spans:
            spent.setdefault(span.layer, {}).setdefault(span.kind, []).append(span)
        layers = tuple(self._layer(layer, kinds) for layer, kinds in spent.items())
        self.chunks.append(ChunkTimes(tokens, start, layers))

    def _layer(self, layer: int | None, kinds: dict[Kind, list[_Span]]) -> LayerTimes:
        compute, wait, copy, held = (self._sum(kinds.get(kind, [])) for kind in KINDS)
        return LayerTimes(layer, copy, compute, wait.seconds, held.seconds)

    def _sum(self, spans: list[_Span]) -> Spent:
        if not spans:
            return Spent()
        times = [
            (self._clock.elapsed(self._begun, s.first), self._clock.elapsed(self._begun, s.last))
            for s in spans
        ]
        return Spent(
            begin=min(first for first, _ in times),
            end=max(last for _, last in times),
            seconds=sum(last - first for first, last in times),
            nbytes=sum(s.nbytes for s in spans),
            experts=sum(s.experts for s in spans),
        )

    def _mark(self, stream: int) -> int:
        if self._used == len(self._events):
            self._events.append(self._clock.create_timed_event(self.device))
        event = self._events[self._used]
        self._used += 1
        self.runtime.record(event, stream)
        return event

    def close(self) -> None:
        """Free the events; nothing may be under way."""
        events, self._events = self._events, []
        undo_all(self.runtime, [partial(self.runtime.destroy_event, event) for event in events])
