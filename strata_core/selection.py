"""Choosing one record per role: pure functions of offers, answers and the request.

A name that the user typed is that record or an error. `auto` drops what is unusable or used only by
name, then what a usable record supersedes, then fallbacks; exactly one left is taken, several are
an error that names the flag, none is the fallback with a notice, unless a plugin failed to load.
The order of the arguments' elements never changes an answer.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from attrs import evolve, field, frozen

from strata_core.errors import Degradation, SelectionError
from strata_core.interfaces import (
    AllocatorRecord,
    BackendRecord,
    Probe,
    Record,
    Role,
    SourceRecord,
    Unusable,
    Usable,
)
from strata_core.plugins.catalogue import Broken, Offer

AUTO = "auto"
_SHOWN = "`strata plugins` lists what there is"


@frozen
class Selection:
    """What was chosen for a role, and why.

    `because` is the reason in a few words; `runners_up` are the other records with the reason that
    each was not taken, by name. `notice` is a line that the user must see, "" if there is none;
    `hint` is then what can be done about it.
    """

    role: Role
    name: str
    distribution: str
    version: str
    because: str
    runners_up: tuple[tuple[str, str], ...] = ()
    notice: str = ""
    hint: str = ""

    @property
    def degradation(self) -> Degradation | None:
        """What a fallback that `auto` took makes worse; None for every other selection."""
        if not self.notice:
            return None
        return Degradation(
            what=f"the {self.role} {self.name} is a fallback",
            why=self.because.removeprefix("the fallback: "),
            cost="models run, but more slowly than they could",
            remedy=self.hint or f"install a plugin with a {self.role} for this machine",
        )

    def as_json(self) -> dict[str, Any]:
        """The selection as one entry of a `--json` document's `selections`."""
        return {
            "role": self.role,
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "because": self.because,
            "runners_up": [{"name": name, "reason": why} for name, why in self.runners_up],
            "notice": self.notice,
        }

    def __str__(self) -> str:
        return f"{self.role} {self.name} ({self.distribution} {self.version}): {self.because}"


def select_backend(
    offers: Sequence[Offer[BackendRecord]],
    broken: Sequence[Broken],
    probes: Mapping[str, Probe],
    request: str = AUTO,
) -> Selection | SelectionError:
    """The backend for `request` ("auto" or a name); `probes` holds each offer's answer by name."""
    choice = _Choice("backend", _sorted(offers), _sorted_broken(broken), probes)
    return choice.named(request) if request != AUTO else choice.automatic()


def select_allocator(
    offers: Sequence[Offer[AllocatorRecord]],
    broken: Sequence[Broken],
    probes: Mapping[str, Probe],
    backend: str,
    request: str = AUTO,
) -> Selection | SelectionError:
    """The allocator for `request` among those that serve `backend`, the backend chosen before."""
    others = {
        offer.name: f"serves {', '.join(sorted(offer.record.serves))}, not {backend}"
        for offer in offers
        if backend not in offer.record.serves
    }
    wanted = f"allocator that serves {backend}"
    choice = _Choice("allocator", _sorted(offers), _sorted_broken(broken), probes, others, wanted)
    return choice.named(request) if request != AUTO else choice.automatic()


def select_source(
    offers: Sequence[Offer[SourceRecord]],
    broken: Sequence[Broken],
    probes: Mapping[str, Probe],
    request: str,
    form: str,
) -> SourceChoice:
    """The choice of a source for `request` and a checkpoint of `form`, as far as a plan may go on.

    Settled are a source that was named, and for "auto" the one that claims the form.
    """
    choice = _Choice("source", _sorted(offers), _sorted_broken(broken), probes)
    if request != AUTO:
        return SourceChoice(choice, form, {}, choice.named(request))
    claiming = {}
    for offer in sorted(offers, key=lambda offer: offer.name):
        answer = _claims(offer.record, form)
        if answer is not None:
            claiming[offer.name] = answer
    return SourceChoice(choice, form, claiming, choice.claimed(form, claiming))


def chosen(result: Selection | SelectionError) -> Selection:
    """The selection, or its error raised."""
    if isinstance(result, SelectionError):
        raise result
    return result


# --- the rules ---------------------------------------------------------------------------------


@frozen
class _Choice:
    """One role's offers, sorted by name.

    `unfit` gives the reasons of records that are out of the question, `wanted` the words for what
    is sought, where the role alone does not say it.
    """

    role: Role
    offers: tuple[Offer[Record], ...]
    broken: tuple[Broken, ...]
    probes: Mapping[str, Probe]
    unfit: Mapping[str, str] = field(factory=dict)
    wanted: str = ""

    @property
    def flag(self) -> str:
        return f"--{self.role}"

    def named(self, request: str) -> Selection | SelectionError:
        """The record that the user named, or why it cannot be."""
        for offer in self.offers:
            if offer.name == request:
                break
        else:
            return self._unknown(request)
        what = f"{self.role} {request!r} cannot be used"
        if request in self.unfit:
            fit = [name for name in self._names() if name not in self.unfit]
            way = f"use {self.flag} auto" + (f", or one of {', '.join(fit)}" if fit else "")
            return SelectionError(what, f"it {self.unfit[request]}", way)
        probe = self.probes[request]
        if isinstance(probe, Unusable):
            return SelectionError(what, probe.reason, _joined(probe.hint, self._way_on(request)))
        others = self._reasons({}, f"{request} was named by {self.flag}")
        return self._selection(offer, f"named by {self.flag}", others)

    def automatic(self) -> Selection | SelectionError:
        """The one record that is left, or why there is none or more than one."""
        candidates = [offer for offer in self._usable() if _automatic(offer)]
        superseded = _superseded(candidates)
        left = [offer for offer in candidates if offer.name not in superseded]
        real = [offer for offer in left if not offer.record.fallback]
        if len(real) > 1:
            return self._several(real, "nothing says which of them to prefer")
        if real:
            because = self._because(real[0], superseded)
            return self._selection(real[0], because, self._reasons(superseded, ""))
        return self._fallback(left, superseded)

    def claimed(
        self, form: str, claiming: Mapping[str, bool | str]
    ) -> Selection | SelectionError | None:
        """The source that claims `form`, None where none does.

        `claiming` is True or what went wrong in asking.
        """
        usable = [offer for offer in self._usable() if claiming.get(offer.name) is True]
        superseded = _superseded(usable)
        left = [offer for offer in usable if offer.name not in superseded]
        if len(left) > 1:
            return self._several(left, f"each claims models of the form {form!r}")
        if not left:
            return None
        because = f"it claims models of the form {form!r}"
        others = self._reasons(superseded, f"{left[0].name} claims the model's form")
        return self._selection(left[0], because, others)

    def planned(
        self, name: str, because: str, claiming: Mapping[str, bool | str]
    ) -> Selection | SelectionError:
        """The source that the planner chose, or why it cannot be."""
        for offer in self.offers:
            if offer.name == name and isinstance(self.probes[name], Usable):
                odd = {other: text for other, text in claiming.items() if isinstance(text, str)}
                others = {**self._reasons({}, "the planner chose another"), **odd}
                return self._selection(offer, because, others)
        probe = self.probes.get(name)
        failed = [str(item) for item in self.broken if item.concerns(self.role)]
        why, way = "no plugin that loaded offers it", "reinstall strata-core"
        if isinstance(probe, Unusable):
            why, way = probe.reason, probe.hint
        elif failed:
            why, way = "; ".join(failed), "repair, remove or block that plugin"
        usable = [f"{self.flag} {offer.name}" for offer in self._usable()]
        another = f"choose another: {' or '.join(usable)}" if usable else ""
        return SelectionError(
            f"{self.role} {name!r} cannot be used",
            f"{why}; the planner chose it: {because}",
            _joined(way, another),
        )

    def nobody_reads(self, form: str, claiming: Mapping[str, bool | str]) -> SelectionError:
        """The error where neither a plugin nor a built-in source reads models of `form`."""
        reasons = {}
        for name, answer in claiming.items():
            probe = self.probes[name]
            reasons[name] = probe.reason if isinstance(probe, Unusable) else str(answer)
        failed = [str(item) for item in self.broken if item.concerns(self.role)]
        if failed:
            reasons["plugins that did not load"] = "; ".join(failed)
        return SelectionError(
            f"no source reads models of the form {form!r}",
            _listed(reasons) if reasons else "no source claims that form",
            self._hints() or "install the plugin that this form of model came from",
        )

    def _usable(self) -> list[Offer[Record]]:
        return [
            offer
            for offer in self.offers
            if offer.name not in self.unfit and isinstance(self.probes[offer.name], Usable)
        ]

    def _because(self, taken: Offer[Record], superseded: Mapping[str, str]) -> str:
        over = sorted(name for name, by in superseded.items() if by == taken.name)
        if over:
            return f"usable here, and it supersedes {', '.join(over)}"
        rivals = [offer for offer in self._usable() if _automatic(offer)]
        others = "" if rivals == [taken] else " that is no fallback"
        return f"the only {self.role} usable here{others}"

    def _fallback(
        self, left: Sequence[Offer[Record]], superseded: Mapping[str, str]
    ) -> Selection | SelectionError:
        """What is taken when no real record is left: `left` holds usable fallbacks only."""
        why_not = self._reasons(superseded, "")
        suspects = [item for item in self.broken if item.concerns(self.role)]
        if suspects:
            names = [f"{self.flag} {offer.name}" for offer in left]
            way = f"go on without with {' or '.join(names)}" if names else "then try again"
            return SelectionError(
                f"no {self.role} was chosen, because a plugin that may offer one did not load",
                "; ".join(map(str, suspects)),
                f"repair, remove or block that plugin; {way}",
            )
        if len(left) > 1:
            return self._several(left, "all of them are fallbacks")
        if left:
            others = {name: why for name, why in why_not.items() if name != left[0].name}
            found = _listed(self._real(others)) or (
                "only fallbacks are installed" if others else "no other is installed"
            )
            notice = f"{self.role} {left[0].name}, the fallback: {found}"
            taken = self._selection(left[0], f"the fallback: {found}", others)
            return evolve(taken, notice=notice, hint=self._hints())
        return SelectionError(
            f"no {self.wanted or self.role} can be used on this machine",
            _listed(why_not) if why_not else f"no {self.role} is installed",
            self._hints() or f"install a plugin that offers one; {_SHOWN}",
        )

    def _several(self, offers: Sequence[Offer[Record]], why: str) -> SelectionError:
        names = [offer.name for offer in offers]
        return SelectionError(
            f"several {self.role}s can be used: {', '.join(names)}",
            why,
            f"choose with {' or '.join(f'{self.flag} {name}' for name in names)}",
        )

    def _unknown(self, request: str) -> SelectionError:
        for item in self.broken:
            if (self.role, request) in item.offered:
                return SelectionError(
                    f"{self.role} {request!r} cannot be used",
                    item.error,
                    "remove, update or block one of the plugins named",
                )
        names = self._names()
        why = f"there are {', '.join(names)}" if names else f"no {self.role} is installed"
        failed = [str(item) for item in self.broken if item.concerns(self.role)]
        if failed:
            why += f"; plugins that did not load: {'; '.join(failed)}"
        close = difflib.get_close_matches(request, [*names, AUTO], n=1)
        guess = f"did you mean {self.flag} {close[0]}? " if close else ""
        way = f"a plugin that is not installed may offer it; {_SHOWN}"
        return SelectionError(f"there is no {self.role} {request!r}", why, guess + way)

    def _names(self) -> list[str]:
        return [offer.name for offer in self.offers]

    def _reasons(self, superseded: Mapping[str, str], otherwise: str) -> dict[str, str]:
        """Why each record was not taken, in the order in which `auto` drops them."""
        reasons = {}
        for offer in self.offers:
            probe = self.probes[offer.name]
            if offer.name in self.unfit:
                reasons[offer.name] = self.unfit[offer.name]
            elif isinstance(probe, Unusable):
                reasons[offer.name] = probe.reason
            elif not otherwise and not _automatic(offer):
                reasons[offer.name] = f"used only where {self.flag} names it"
            elif offer.name in superseded:
                reasons[offer.name] = f"superseded by {superseded[offer.name]}"
            else:
                reasons[offer.name] = otherwise or "a fallback, taken only when nothing else is"
        return reasons

    def _real(self, reasons: Mapping[str, str]) -> dict[str, str]:
        """Without what `auto` passes over anyway: that does not say why a fallback is taken."""
        by_name = {offer.name for offer in self.offers if not _automatic(offer)}
        gave_way = by_name | {o.name for o in self._usable() if o.record.fallback}
        return {name: why for name, why in reasons.items() if name not in gave_way}

    def _hints(self) -> str:
        asked = (offer for offer in self.offers if _automatic(offer))
        probes = ((offer.name, self.probes[offer.name]) for offer in asked)
        return "; ".join(
            f"{name}: {probe.hint}"
            for name, probe in probes
            if isinstance(probe, Unusable) and probe.hint and name not in self.unfit
        )

    def _way_on(self, request: str) -> str:
        ways = [offer for offer in self._usable() if _automatic(offer)]
        usable = [offer.name for offer in ways if offer.name != request]
        return f"usable here: {', '.join(usable)}" if usable else ""

    def _selection(
        self, offer: Offer[Record], because: str, others: Mapping[str, str]
    ) -> Selection:
        runners_up = tuple((name, why) for name, why in others.items() if name != offer.name)
        return Selection(
            self.role, offer.name, offer.distribution, offer.version, because, runners_up
        )


@frozen
class SourceChoice:
    """The choice of a source in two steps, with the plan between them.

    `settled` is what needs no plan: a source that was named or that claims the model's form, or the
    error of such a choice; None leaves the choice to the planner.
    """

    _choice: _Choice
    _form: str
    _claiming: Mapping[str, bool | str]
    settled: Selection | SelectionError | None

    def final(self, planned: str | None, because: str) -> Selection | SelectionError:
        """What is settled, else the planner's choice among the built-in sources.

        `because` is the planner's reason; `planned` is None where no built-in source can read the
        model's form.
        """
        if self.settled is not None:
            return self.settled
        if planned is None:
            return self._choice.nobody_reads(self._form, self._claiming)
        return self._choice.planned(planned, because, self._claiming)


def _automatic(offer: Offer[Record]) -> bool:
    """Whether `auto` may take a record."""
    return not isinstance(offer.record, BackendRecord) or offer.record.automatic


def _superseded(usable: Sequence[Offer[Record]]) -> dict[str, str]:
    """Name -> a usable record that supersedes it.

    Counted from records that nothing supersedes: those that only supersede each other all stay,
    and are several.
    """
    direct = {name for offer in usable for name in offer.record.supersedes}
    by_name = {offer.name: offer for offer in usable}
    waiting = [offer for offer in usable if offer.name not in direct]
    found: dict[str, str] = {}
    for offer in waiting:
        for name in offer.record.supersedes:
            if name in by_name and name not in found:
                waiting.append(by_name[name])
            found.setdefault(name, offer.name)
    return found


def _claims(record: SourceRecord, form: str) -> bool | str | None:
    """True, what went wrong, or None where the record does not claim the form."""
    if record.claims is None:
        return None
    try:
        answer: object = record.claims(form)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything; it is reported
        return f"asked whether it claims the form {form!r}, it raised {type(error).__name__}"
    if isinstance(answer, bool):
        return answer or None
    return f"asked whether it claims the form {form!r}, it returned {type(answer).__name__}"


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {why}" for name, why in reasons.items())


def _joined(*sentences: str) -> str:
    return "; ".join(sentence for sentence in sentences if sentence)


R = TypeVar("R", BackendRecord, AllocatorRecord, SourceRecord)


def _sorted(offers: Sequence[Offer[R]]) -> tuple[Offer[R], ...]:
    return tuple(sorted(offers, key=lambda offer: offer.name))


def _sorted_broken(broken: Sequence[Broken]) -> tuple[Broken, ...]:
    return tuple(sorted(broken, key=lambda item: (item.distribution, item.entry_point, item.error)))
