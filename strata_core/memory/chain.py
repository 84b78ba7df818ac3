"""The chain by which host memory becomes readable by devices: pinned, else sliced, else locked.

Path 1 is one page-locked allocation. Path 2 is plain memory that is populated by several threads
and registered slice by slice, before anything is written to it: where pages were written while
they registered, their contents were lost. Slice i may be written once it and the next one are
registered, or registering has ended. Path 3 is what is left: pages locked into RAM by the system,
or where it refuses that, pageable memory.

The first slice is settled before `begin` returns, so that addresses are final; the rest follows in
the background while the caller already reads the file into what is ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Condition, Thread

from attrs import frozen

from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import Region, Span
from strata_core.memory.holding import Holding, Host
from strata_core.memory.outcome import Outcome
from strata_core.memory.platform import rounded
from strata_core.memory.populate import Populator
from strata_core.memory.slices import Slice, cut_off, make_slices


@frozen(kw_only=True)
class Wish:
    """How a region is wanted.

    `most` bytes may be page-locked (None: any number), `because` what says so; `clamped` where that
    is not the user's own wish. `threads` populate; `large` asks for the system's large pages. The
    rest is as in `rules.PinRule`.
    """

    nbytes: int
    cuts: Sequence[int]
    purpose: str
    most: int | None = None
    because: str = ""
    clamped: bool = False
    one_first: bool = False
    refuse_one: bool = False
    prefix: bool = False
    threads: int = 1
    large: bool = False


@frozen(eq=False)
class _Parts:
    """Slices to register, and those that are not to be."""

    below: tuple[Slice, ...] = ()
    above: tuple[Slice, ...] = ()


class Preparation:
    """One region on its way. `begin` starts it, `close` ends it and gives everything back.

    `wait` and `region` may be called by any thread, `close` by one thread and while others wait:
    they get an error then.
    """

    def __init__(self, host: Host, wish: Wish, degrade: Callable[[Degradation], None]) -> None:
        self._host, self._wish, self._degrade = host, wish, degrade
        page = host.system.page
        self._size = rounded(wish.nbytes, page)
        self._parts = _parts(wish, self._size, page)
        self._changed = Condition()
        self._spans: list[Span] = []
        self._locked = 0
        self._unlocked_because: str | None = None
        self._one_tried = False
        self._writable = 0
        self._settled = False
        self._closing = False
        self._error: BaseException | None = None
        self._region: Region | None = None
        self._populator: Populator | None = None
        self._thread: Thread | None = None
        self.address = 0
        self._holding = Holding(host, self._size, wish.purpose)

    # for the allocator

    def begin(self) -> None:
        """Take the memory and settle its first slice. Raises StrataError; then nothing is held."""
        try:
            if self._wish.one_first and self._one_allocation():
                return
            self.address = self._holding.reserve(self._size, large=self._wish.large)
            self._populator = Populator(
                self._host.system, self.address, self._size, self._wish.threads
            )
            if self._parts.below:
                self._populator.extend(self._parts.below[-1].end)
                if not self._register_next() and self._one_allocation():
                    self._populator.stop()
                    self._holding.unreserve()
                    return
            self._thread = Thread(target=self._work, name="strata-pin", daemon=True)
            self._thread.start()
        except OSError as error:
            self.close()
            raise self._not_had(error) from error
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop and give everything back. Raises DeviceError where the driver keeps something."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        if self._populator is not None:
            self._populator.stop()
        if self._thread is not None:
            self._thread.join()
        self._holding.close()

    # for whoever fills the memory

    def wait(self, start: int, nbytes: int) -> None:
        """Wait until `nbytes` from the offset `start` may be written.

        Raises StrataError where the memory cannot be had after all, or was closed.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._writable >= start + nbytes or self._closing or self._error
            )
            self._check()

    def region(self) -> Region:
        """The finished region, once every slice is settled. Raises StrataError as `wait` does."""
        with self._changed:
            self._changed.wait_for(lambda: self._settled or self._closing or self._error)
            self._check()
            assert self._region is not None
            return self._region

    def _check(self) -> None:
        if isinstance(self._error, OSError):
            raise self._not_had(self._error) from self._error
        if self._error is not None:
            raise self._error
        if self._closing:
            raise StrataError(f"the memory of {self._wish.purpose} was given back meanwhile")

    def _not_had(self, error: OSError) -> StrataError:
        return StrataError(
            f"{self._wish.nbytes / 2**30:.2f} GiB of host memory for {self._wish.purpose} "
            "cannot be had",
            f"the operating system refused pages of it: {error}",
            "close other programs, or choose --source mmap",
        )

    # path 1

    def _one_allocation(self) -> bool:
        """Take everything as one page-locked allocation, if that may be."""
        wish = self._wish
        if self._one_tried or wish.prefix or (wish.most is not None and wish.most < self._size):
            return False
        self._one_tried = True
        if wish.refuse_one:
            return False
        span = self._holding.allocate(self._size)
        if span is None:
            return False
        self.address = span.address
        self._spans = [span]
        self._finish(self._size)
        return True

    # path 2

    def _register_next(self) -> bool:
        """Register the first slice that is not; False at a refusal. Its predecessor is ready."""
        part = self._parts.below[len(self._spans)]
        if self._populator is None or not self._populator.wait(part.end) or self._closing:
            return False
        span = self._holding.register(part)
        if span is None:
            self._populator.hold()
            return False
        with self._changed:
            self._spans.append(span)
            self._writable = part.start
            self._changed.notify_all()
        return True

    def _work(self) -> None:
        try:
            if self._spans:  # else the first was refused, and registering ends there
                while len(self._spans) < len(self._parts.below) and self._register_next():
                    pass
            self._lock_rest()
            if not self._closing:
                self._finish(self._size)
        except BaseException as error:  # noqa: BLE001 - raised where somebody waits
            with self._changed:
                self._error = error
                self._changed.notify_all()
        finally:
            if self._populator is not None:
                self._populator.stop()

    # path 3

    def _lock_rest(self) -> None:
        """Lock what is not registered, slice by slice, up to the first refusal."""
        done = self._parts.below[len(self._spans) - 1].end if self._spans else 0
        self._may_write(done)
        rest = [part for part in (*self._parts.below, *self._parts.above) if part.start >= done]
        for part in rest:
            if self._closing:
                return
            why = self._lock(part)
            if why is not None:
                self._unlocked_because = why
                return
            self._locked += part.nbytes
            self._may_write(part.end)

    def _lock(self, part: Slice) -> str | None:
        limit = self._host.system.lock_limit()
        if (
            (limit is None or self._locked + part.nbytes <= limit)
            and self._populator is not None
            and not self._populator.wait(part.end)
        ):
            return "it was given back meanwhile"
        return self._holding.lock(part)

    def _may_write(self, until: int) -> None:
        with self._changed:
            self._writable = until
            self._changed.notify_all()

    # the end

    def _finish(self, writable: int) -> None:
        """Everything is settled: make the region and tell how it was had."""
        wish = self._wish
        outcome = Outcome(
            nbytes=wish.nbytes,
            purpose=wish.purpose,
            spans=_whole(self._spans, self.address, wish.nbytes),
            one=self._holding.has_one,
            prefix=wish.prefix,
            refusals=tuple(self._holding.refusals),
            asked=wish.because,
            clamped=wish.clamped and bool(self._parts.above),
            stopped=bool(self._parts.above),
            test_refused=wish.refuse_one and self._one_tried,
            locked=self._locked,
            unlocked_because=self._unlocked_because,
            small_pages=wish.large and not self._holding.in_large_pages,
        )
        outcome.log()
        for item in outcome.degradations():
            self._degrade(item)
        with self._changed:
            self._region = outcome.region(self.address)
            self._writable = writable
            self._settled = True
            self._changed.notify_all()


def _parts(wish: Wish, size: int, page: int) -> _Parts:
    cuts = () if wish.prefix else wish.cuts
    below, above = cut_off(make_slices(size, cuts, page), wish.most, page)
    if wish.prefix:
        above = cut_off(make_slices(size, wish.cuts, page), wish.most, page)[1]
    return _Parts(below, above)


def _whole(spans: Sequence[Span], address: int, nbytes: int) -> tuple[Span, ...]:
    """The page-locked spans, cut to `nbytes`, and one more for what is not page-locked."""
    end = address + nbytes
    found = [
        Span(s.address, min(s.nbytes, end - s.address), s.alias, s.pinned)
        for s in spans
        if s.address < end
    ]
    covered = found[-1].address + found[-1].nbytes if found else address
    if covered < end or not found:
        found.append(Span(covered, end - covered))
    return tuple(found)
