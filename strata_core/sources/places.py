"""Places in one region of host memory: who is in which, which are empty, and who reads them now."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable

from attrs import define, field

from strata_core.interfaces import Expert


@define(eq=False)
class Places:
    """Starts of places in a region, and their sizes in bytes. Any thread may call it.

    A place that `hold` gave keeps its bytes until `let_go`, even if its expert is dropped.
    """

    _starts: dict[Expert, int]
    _sizes: dict[int, int]
    _free: list[int] = field(init=False)
    _readers: Counter[int] = field(factory=Counter, init=False)
    _dropped: set[int] = field(factory=set, init=False)
    _lock: threading.Lock = field(factory=threading.Lock, init=False)

    def __attrs_post_init__(self) -> None:
        taken = set(self._starts.values())
        self._free = [start for start in self._sizes if start not in taken]

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._starts

    def start(self, expert: Expert) -> int | None:
        """Where the expert's place begins; None where it has none."""
        return self._starts.get(expert)

    def experts(self) -> Iterable[Expert]:
        """Those that have a place now."""
        with self._lock:
            return tuple(self._starts)

    def hold(self, expert: Expert) -> int | None:
        """As `start`, and its bytes stay until `let_go`."""
        with self._lock:
            start = self._starts.get(expert)
            if start is not None:
                self._readers[start] += 1
            return start

    def let_go(self, start: int) -> None:
        """End one `hold`."""
        with self._lock:
            self._readers[start] -= 1
            if not self._readers[start] and start in self._dropped:
                self._dropped.remove(start)
                self._free.append(start)

    def take(self, nbytes: int) -> int | None:
        """The smallest empty place that is large enough, no longer empty; None without one."""
        with self._lock:
            fitting = [start for start in self._free if self._sizes[start] >= nbytes]
            if not fitting:
                return None
            start = min(fitting, key=lambda start: (self._sizes[start], start))
            self._free.remove(start)
            return start

    def give(self, start: int) -> None:
        """A place that was taken and got no expert is empty again."""
        with self._lock:
            self._free.append(start)

    def put(self, expert: Expert, start: int) -> None:
        """From now on the expert is in a place that was taken, whose bytes are complete."""
        with self._lock:
            self._starts[expert] = start

    def drop(self, expert: Expert) -> None:
        """The expert has no place any more; its place is empty once nobody holds it."""
        with self._lock:
            start = self._starts.pop(expert)
            if self._readers[start]:
                self._dropped.add(start)
            else:
                self._free.append(start)
