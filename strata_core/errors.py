"""Errors and degradations: what happened, why, and what to do about it.

Every failure that Strata foresees is a `StrataError`; the command line prints its three lines and
leaves with its exit code. Everything that still works, but worse than asked, is a `Degradation`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from attrs import field, frozen

REPORT = "this is an error in the engine; please report it"
"""The remedy of what no user can cause."""


class StrataError(Exception):
    """A failure with a cause and a remedy; names the file, field, expert or flag concerned.

    `what` is one line saying what did not work, `why` one line saying for what reason, `remedy` one
    line saying what the user can do. Exit code 1: the request was fine, carrying it out failed.
    """

    exit_code = 1

    def __init__(self, what: str, why: str = "", remedy: str = "") -> None:
        super().__init__(what, why, remedy)
        self.what = what
        self.why = why
        self.remedy = remedy

    def __str__(self) -> str:
        return "\n".join(line for line in (self.what, self.why, self.remedy) if line)

    def as_json(self) -> dict[str, str]:
        """The error as the `error` member of a `--json` document."""
        return {
            "type": type(self).__name__,
            "what": self.what,
            "why": self.why,
            "remedy": self.remedy,
        }


class UsageError(StrataError):
    """A flag, setting, variable or prompt that cannot be used as given. Exit code 2."""

    exit_code = 2


class CheckpointError(StrataError):
    """A model file or folder that is damaged, incomplete or of an unknown kind. Exit code 2."""

    exit_code = 2


class PluginError(StrataError):
    """A plugin that did not load or broke a contract; names its distribution. Exit code 2."""

    exit_code = 2


class SelectionError(StrataError):
    """No single backend, allocator or source answers what was asked. Exit code 2."""

    exit_code = 2


class DoesNotFit(StrataError):
    """The model needs more memory than there is; says how much, and what would fit."""


class EngineError(StrataError):
    """A round failed; the sequences it served are closed, the engine itself goes on."""


class DeviceError(StrataError):
    """A verb of an accelerator failed; names the verb, the device and the driver's error."""


class Refused(DeviceError):
    """Memory was asked for and not granted; whoever asked may go on with less, and says so."""


ERRORS: Mapping[str, type[StrataError]] = {
    kind.__name__: kind
    for kind in (
        StrataError,
        UsageError,
        CheckpointError,
        PluginError,
        SelectionError,
        DoesNotFit,
        EngineError,
        DeviceError,
        Refused,
    )
}
"""Every class of error by its name, as `as_json` and the engine's messages give it."""


@frozen
class Degradation:
    """Something that works, but less well than asked or than this machine could.

    `what` happened, `why`, what it costs (`cost`), and how to get rid of it (`remedy`).
    """

    what: str
    why: str
    cost: str
    remedy: str

    def as_json(self) -> dict[str, str]:
        """The degradation as one entry of a `--json` document's `degradations`."""
        return {"what": self.what, "why": self.why, "cost": self.cost, "remedy": self.remedy}

    def __str__(self) -> str:
        return f"{self.what}: {self.why}. Cost: {self.cost}. Remedy: {self.remedy}."


@frozen(eq=False)
class Degradations:
    """The list that every part reports to; an equal report is kept once.

    Appending is atomic, so any thread may report. Order is the order of first reports.
    """

    _items: list[Degradation] = field(factory=list)

    def report(self, item: Degradation) -> None:
        """Add one degradation unless an equal one is there already."""
        if item not in self._items:
            self._items.append(item)

    def __iter__(self) -> Iterator[Degradation]:
        return iter(tuple(self._items))

    def __len__(self) -> int:
        return len(self._items)
