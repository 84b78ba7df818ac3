"""The frozen result of loading: offers by role, and what could not be used."""

from __future__ import annotations

from typing import Generic, Literal, TypeVar

from attrs import frozen

from strata_core.interfaces import AllocatorRecord, BackendRecord, Record, Role, SourceRecord

R_co = TypeVar("R_co", bound=Record, covariant=True)

Stage = Literal[
    "metadata", "import", "hooks", "call", "records", "api", "changes", "duplicate", "settings"
]
"""Where a plugin failed: reading its entry points, importing its module, checking its hooks against
the specification, calling one, checking the records, their interface version, what it replaced of
the program, their names; or reading the settings that it declares."""


@frozen
class Offer(Generic[R_co]):
    """A record that may be chosen, and the distribution and version that it came from."""

    record: R_co
    distribution: str
    version: str

    @property
    def name(self) -> str:
        """The record's name."""
        return self.record.name

    @property
    def origin(self) -> str:
        """The distribution and its version, as messages name them."""
        return f"{self.distribution} {self.version}"


@frozen
class Broken:
    """An entry point, or one record of it, that is quarantined.

    `error` is one line; `trace` the stack trace, "" where there is none. `offered` are the
    (role, name) of the records concerned; empty when the failure came before they were known, so
    that it may concern any role.
    """

    distribution: str
    version: str
    entry_point: str
    stage: Stage
    error: str
    trace: str = ""
    offered: tuple[tuple[Role, str], ...] = ()

    def concerns(self, role: Role) -> bool:
        """Whether an offer for `role` may be missing because of this."""
        if self.stage == "settings":
            return False
        return not self.offered or any(offered == role for offered, _ in self.offered)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.entry_point}): {self.error}"


@frozen
class Blocked:
    """A name that the user keeps from loading, and the entry points ("dist: name") it kept out."""

    name: str
    entry_points: tuple[str, ...]


@frozen
class Catalogue:
    """Everything that plugins offer, sorted by name, and everything that could not be used.

    Names are unique within a role. The order in which plugins were found changes nothing here.
    """

    backends: tuple[Offer[BackendRecord], ...]
    allocators: tuple[Offer[AllocatorRecord], ...]
    sources: tuple[Offer[SourceRecord], ...]
    broken: tuple[Broken, ...] = ()
    blocked: tuple[Blocked, ...] = ()

    def offers(self, role: Role) -> tuple[Offer[Record], ...]:
        """The offers for one role."""
        table: dict[Role, tuple[Offer[Record], ...]] = {
            "backend": self.backends,
            "allocator": self.allocators,
            "source": self.sources,
        }
        return table[role]

    def backend(self, name: str) -> Offer[BackendRecord]:
        """The backend of that name, as a selection names it; KeyError if there is none."""
        return {offer.name: offer for offer in self.backends}[name]

    def allocator(self, name: str) -> Offer[AllocatorRecord]:
        """The allocator of that name, as a selection names it; KeyError if there is none."""
        return {offer.name: offer for offer in self.allocators}[name]

    def source(self, name: str) -> Offer[SourceRecord]:
        """The source of that name, as a selection names it; KeyError if there is none."""
        return {offer.name: offer for offer in self.sources}[name]
