"""What `strata plugins` shows, as JSON data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strata_core.errors import SelectionError
from strata_core.interfaces import API, AllocatorRecord, BackendRecord, Probe, Record, Role, Usable
from strata_core.plugins.catalogue import Blocked, Broken, Catalogue, Offer
from strata_core.plugins.probing import Probes
from strata_core.selection import Selection

LISTS: Mapping[Role, str] = {
    "backend": "backends",
    "allocator": "allocators",
    "source": "sources",
}
"""The member of the report that lists the records of a role."""


def report_plugins(
    catalogue: Catalogue, selections: Mapping[Role, Selection | SelectionError], probes: Probes
) -> dict[str, Any]:
    """Everything about the plugins of this machine, ready for `json.dumps`.

    Members:
    - `api`: [major, minor] of this core's interface;
    - `backends`, `allocators`, `sources`: one object per record, sorted by name, with `name`,
      `summary`, `distribution`, `version`, `api`, `supersedes`, `fallback`, `automatic` (backends
      alone), `serves` (allocators alone), `usable`, `detail` (where usable), `reason` and `hint`
      (where not), `selected`;
    - `selections`: by role what was chosen (`Selection.as_json`), or `error` with its three lines;
      a role that was not asked for (a source without a model) is missing;
    - `broken`: what is quarantined: `distribution`, `version`, `entry_point`, `stage`, `error`,
      `trace`, `offered` (role and name of the records concerned, empty if they are not known);
    - `blocked`: names kept from loading, and the entry points that each kept out.
    """
    report: dict[str, Any] = {"api": list(API)}
    for role, member in LISTS.items():
        chosen = selections.get(role)
        name = chosen.name if isinstance(chosen, Selection) else None
        report[member] = [
            _offer(offer, probes[role][offer.name], offer.name == name)
            for offer in catalogue.offers(role)
        ]
    report["selections"] = {role: _selection(chosen) for role, chosen in selections.items()}
    report["broken"] = [_broken(item) for item in catalogue.broken]
    report["blocked"] = [_blocked(item) for item in catalogue.blocked]
    return report


def _offer(offer: Offer[Record], probe: Probe, selected: bool) -> dict[str, Any]:
    record = offer.record
    described: dict[str, Any] = {
        "name": record.name,
        "summary": record.summary,
        "distribution": offer.distribution,
        "version": offer.version,
        "api": list(record.api),
        "supersedes": list(record.supersedes),
        "fallback": record.fallback,
    }
    if isinstance(record, BackendRecord):
        described["automatic"] = record.automatic
    if isinstance(record, AllocatorRecord):
        described["serves"] = list(record.serves)
    if isinstance(probe, Usable):
        described |= {"usable": True, "detail": probe.detail}
    else:
        described |= {"usable": False, "reason": probe.reason, "hint": probe.hint}
    described["selected"] = selected
    return described


def _selection(chosen: Selection | SelectionError) -> dict[str, Any]:
    if isinstance(chosen, SelectionError):
        return {"error": chosen.as_json()}
    return chosen.as_json()


def _broken(item: Broken) -> dict[str, Any]:
    return {
        "distribution": item.distribution,
        "version": item.version,
        "entry_point": item.entry_point,
        "stage": item.stage,
        "error": item.error,
        "trace": item.trace,
        "offered": [{"role": role, "name": name} for role, name in item.offered],
    }


def _blocked(item: Blocked) -> dict[str, Any]:
    return {"name": item.name, "entry_points": list(item.entry_points)}
