"""How a region was had: which path, in words for the log, as a region and as degradations."""

from __future__ import annotations

import logging

from attrs import frozen

from strata_core.errors import Degradation
from strata_core.interfaces import Region, Span

_LOG = logging.getLogger("strata.memory")

ONE, SLICED, PREFIX = "pinned", "sliced", "pinned prefix"
LOCKED, PAGEABLE = "locked", "pageable"
"""`Region.path`: path 1, path 2, a registered beginning; path 3 locked into RAM, or not."""


@frozen(kw_only=True)
class Outcome:
    """What became of a region of `nbytes` for `purpose`.

    `spans` cover it; `one`: it is one page-locked allocation; `prefix`: one registered beginning
    was wanted. `refusals` are the driver's and the ledger's reasons, in order. `asked` is the
    setting or limit that bounds what is page-locked, `stopped` whether it did, `clamped` whether
    that was the machine's limit. `test_refused`: a setting refused the one allocation. Of the rest
    `locked` bytes are locked into RAM; `unlocked_because` says why not all. `small_pages`: large
    pages were asked for and not had.
    """

    nbytes: int
    purpose: str
    spans: tuple[Span, ...]
    one: bool
    prefix: bool
    refusals: tuple[str, ...]
    asked: str
    stopped: bool
    clamped: bool
    test_refused: bool
    locked: int
    unlocked_because: str | None
    small_pages: bool = False

    @property
    def pinned(self) -> int:
        """Bytes that are page-locked."""
        return sum(span.nbytes for span in self.spans if span.pinned)

    @property
    def path(self) -> str:
        """As `Region.path` has it."""
        if self.one:
            return ONE
        if self.pinned:
            return PREFIX if self.prefix else SLICED
        return PAGEABLE if self.unlocked_because else LOCKED

    @property
    def reason(self) -> str:
        """Why this path, in words."""
        words = ["one allocation was refused for a test"] if self.test_refused else []
        words += self.refusals
        if self.stopped and self.asked:
            words.append(self.asked)
        if words:
            return "; ".join(words)
        return "granted at once" if self.one else "granted slice by slice, while it was filled"

    def region(self, address: int) -> Region:
        """The region at `address`."""
        return Region(address, self.nbytes, self.spans, self.path, self.reason, self.purpose)

    def log(self) -> None:
        """Write the line about page-locking."""
        path = {ONE: "path 1", SLICED: "path 2", PREFIX: PREFIX}.get(self.path, "path 3")
        slices = sum(span.pinned for span in self.spans)
        how = f" in {slices} slices" if self.path == SLICED else ""
        rest = ""
        if self.pinned < self.nbytes:
            rest = f"; the rest is {'locked into RAM' if not self.unlocked_because else 'pageable'}"
        _LOG.info(
            "page-locking %s, %s: %s of %s GiB pinned%s (%s)%s",
            path,
            self.purpose,
            _number(self.pinned),
            _number(self.nbytes),
            how,
            self.reason,
            rest,
        )

    def degradations(self) -> tuple[Degradation, ...]:
        """What is worse than asked, or than the machine could."""
        found = []
        if self.refusals or self.clamped:
            found.append(self._less_pinned())
        if self.unlocked_because:
            found.append(self._not_locked())
        if self.small_pages:
            found.append(self._in_small_pages())
        return tuple(found)

    def _less_pinned(self) -> Degradation:
        amount = f"{_number(self.pinned)} of {_number(self.nbytes)} GiB"
        if self.pinned == self.nbytes:
            way = "as one allocation" if self.one else "in slices"
            return Degradation(
                what=f"{self.purpose} is page-locked {way} only",
                why=self.reason,
                cost="none while it runs; the start took another way",
                remedy="nothing needs to be done",
            )
        return Degradation(
            what=f"only {amount} of {self.purpose} is page-locked",
            why=self.reason,
            cost="devices cannot read the rest: the CPU computes with it, and copies are slow",
            remedy="free memory, raise what the driver may page-lock, or set a limit of your own "
            "with STRATA_PIN_LIMIT_GIB or STRATA_PIN_MARGIN_GIB",
        )

    def _not_locked(self) -> Degradation:
        left = self.nbytes - self.pinned - self.locked
        return Degradation(
            what=f"{_number(left)} GiB of {self.purpose} is not locked into RAM",
            why=self.unlocked_because or "",
            cost="the system may move it out when memory runs short; a token then waits for a disk",
            remedy="raise the limit (ulimit -l, or LimitMEMLOCK of the service), or free memory",
        )

    def _in_small_pages(self) -> Degradation:
        why = "the system's pool has too few large pages, or does not let this account have them"
        if self.one:
            why = "the driver allocated it as a whole, in pages of its own choice"
        return Degradation(
            what=f"{self.purpose} is not in large pages, which STRATA_LARGE_PAGES asks for",
            why=why,
            cost="page-locking and the processor's look-ups of addresses take somewhat longer",
            remedy="enlarge the pool (/proc/sys/vm/nr_hugepages on Linux; the right to lock pages "
            "in memory on Windows), or leave STRATA_LARGE_PAGES out",
        )


def _number(nbytes: int) -> str:
    """GiB for a message; small amounts with the digits that tell them apart."""
    amount = nbytes / 2**30
    digits = 2 if amount >= 1 or not nbytes else 4 if amount >= 0.01 else 6
    return f"{amount:.{digits}f}"
