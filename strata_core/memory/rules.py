"""What the user's settings say about page-locking, for each use of host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from attrs import frozen

from strata_core.errors import UsageError
from strata_core.plan.plan import gib

ARENA = "the arena of all experts"
"""Purpose of the memory that holds every expert."""

COMPLEMENT = "the resident experts"
"""Purpose of the memory that holds the experts which no device holds."""

LimitKind = Literal["machine", "known", "none"]
"""Which limit holds: the machine's, whatever gives it; only one that was probed or given; none."""

_GIB = 1 << 30


@frozen(kw_only=True)
class PinRule:
    """How one region may be page-locked.

    `most` are the bytes that the user allows (None: any), `because` the setting that says so.
    `limit` tells which limit holds besides. `one_first`: begin with one allocation; else slices
    are registered, which is faster and lets the file be read meanwhile, and one allocation is
    tried where the first slice is refused. `refuse_one`: as if that one allocation were refused.
    `prefix`: one registration of the beginning, instead of slices.
    """

    most: int | None = None
    because: str = ""
    limit: LimitKind = "machine"
    one_first: bool = False
    refuse_one: bool = False
    prefix: bool = False


@frozen(kw_only=True)
class PinSettings:
    """The settings about page-locking, in bytes; see `setting_memory`."""

    complement: int | Literal["all"] | None = None
    arena: int | Literal["auto"] | None = None
    margin: int = 4 * _GIB
    known: int | None = None
    partial: bool = False
    partial_most: int | None = None
    refuse_one: bool = False
    large: bool = False

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> PinSettings:
        """From options by key; what is not there has its default. Raises UsageError."""
        partial = bool(options.get("partial_pin"))
        piece = options.get("partial_pin_gib")
        if piece is not None and not partial:
            raise UsageError(
                "STRATA_PARTIAL_PIN_GIB says how large a piece is that is not asked for",
                "STRATA_PARTIAL_PIN is not 1",
                "set STRATA_PARTIAL_PIN=1 as well, or leave both out",
            )
        margin = options.get("pin_margin_gib")
        complement, arena = options.get("complement_pin_gib"), options.get("arena_pin_gib")
        return cls(
            complement="all" if complement == "all" else _nbytes(complement),
            arena="auto" if arena == "auto" else _nbytes(arena),
            margin=cls().margin if margin is None else int(margin * _GIB),
            known=_nbytes(options.get("pin_limit_gib")),
            partial=partial,
            partial_most=_nbytes(piece),
            refuse_one=bool(options.get("test_complement_refuse")),
            large=bool(options.get("large_pages")),
        )

    def rule(self, purpose: str) -> PinRule:
        """The rule for memory of that purpose; a purpose without settings of its own is limited."""
        if purpose == COMPLEMENT:
            rule = self._complement()
        elif purpose == ARENA:
            rule = self._arena()
        else:
            return PinRule()
        return self._as_prefix(rule) if self.partial else rule

    def _complement(self) -> PinRule:
        if self.complement is None:
            return PinRule(refuse_one=self.refuse_one)
        if self.complement == "all":
            return PinRule(limit="none", one_first=True, refuse_one=self.refuse_one)
        return PinRule(
            most=self.complement,
            because=_allows("STRATA_COMPLEMENT_PIN_GIB", self.complement),
            limit="none",
            one_first=True,
            refuse_one=self.refuse_one,
        )

    def _arena(self) -> PinRule:
        if self.arena == "auto":
            return PinRule()
        if not self.arena:
            return PinRule(limit="known")
        return PinRule(
            most=self.arena, because=_allows("STRATA_ARENA_PIN_GIB", self.arena), limit="known"
        )

    def _as_prefix(self, rule: PinRule) -> PinRule:
        most, because = rule.most, rule.because
        if self.partial_most is not None and (most is None or self.partial_most < most):
            most = self.partial_most
            because = _allows("STRATA_PARTIAL_PIN_GIB", most)
        return PinRule(most=most, because=because, limit=rule.limit, prefix=True)


def _nbytes(gib: float | None) -> int | None:
    return None if gib is None else int(gib * _GIB)


def _allows(variable: str, nbytes: int) -> str:
    return f"{variable} allows {gib(nbytes)}"
