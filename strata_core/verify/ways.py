"""The ways in which a model can be placed, each as settings: the one table of the identity proof.

A way is a place for the experts that no device holds, and a number of experts that devices hold.
Whatever the user has given stays as it is in every way; only the rest is varied.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from attrs import field, frozen

from strata_core.setting_device import MOST_HELPERS
from strata_core.setting_table import BY_KEY
from strata_core.verify.about import About

GIB = 1 << 30

MOVES = (About(lane="entered"),)
"""Experts change places."""

PACES: tuple[tuple[str, int, tuple[About, ...]], ...] = (
    ("static", 0, ()),
    ("adapts each round", 1, MOVES),
)
"""Paces of the cache that each place is proven at besides, and the rounds of `--adapt-every`."""

HELPED = 2
"""Experts that each helper gets."""

HELPS = (About(lane="helper"),)
"""Helpers compute."""


@frozen(kw_only=True)
class Place:
    """Where experts lie that no device holds: a source, with the settings that lead there.

    `pinned` names the setting, in GiB, that is to have `share` of the experts' bytes. Where there
    is a `share` alone, it is the part of them that a memory budget leaves room for. `devices`: it
    needs a backend with devices. `about` is what a run there must have done.
    """

    name: str
    source: str
    options: Mapping[str, Any] = field(factory=dict)
    pinned: str = ""
    share: float | None = None
    devices: bool = False
    about: tuple[About, ...] = ()

    @property
    def budgeted(self) -> bool:
        """Whether its part of the experts is what a memory budget leaves room for."""
        return self.share is not None and not self.pinned


def _tier(percent: int) -> Place:
    return Place(name=f"tiered, {percent} %", source="tiered-file", share=percent / 100)


def _resident(name: str, *paths: str, partly: bool = False, **more: Any) -> Place:
    about = (About(paths=paths, partly=partly),)
    return Place(name=name, source="sliced-pinned", devices=True, about=about, **more)


PLACES: tuple[Place, ...] = (
    Place(name="arena", source="arena"),
    Place(name="mmap", source="mmap"),
    *(_tier(percent) for percent in (0, 25, 50, 100)),
    _resident("path 1", "pinned", options={"complement_pin_gib": "all"}),
    _resident("path 2", "sliced", options={"test_complement_refuse": True}),
    _resident("path 2, partly", "sliced", partly=True, pinned="complement_pin_gib", share=0.25),
    _resident("path 3", "locked", "pageable", options={"complement_pin_gib": 0.0}),
    Place(
        name="pinned prefix",
        source="arena",
        options={"partial_pin": True},
        pinned="partial_pin_gib",
        share=0.5,
        devices=True,
        about=(About(paths=("pinned prefix",)),),
    ),
)
"""Every place that core itself knows."""

CACHES = ("0", "1", "half", "all")
"""How many experts the first device holds."""

USUAL_CACHE = "half"
"""The one of CACHES that a short table has for every place."""


@frozen(kw_only=True)
class Variation:
    """Settings besides place and cache that must not change a token either.

    They are tried at the first place, and at those that `also` names. One that is about the cache
    needs no name of its own. `about` is what a run must have done.
    """

    name: str
    options: Mapping[str, Any]
    devices: bool = False
    also: tuple[str, ...] = ()
    about: tuple[About, ...] = ()


VARIATIONS: tuple[Variation, ...] = (
    Variation(name="", options={"expert_cache": "auto"}, devices=True),
    Variation(name="reads verified", options={"verify_reads": "all"}, about=(About(reads=True),)),
    *(Variation(name=f"chunks of {n}", options={"prefill": n}) for n in (16, 64, 512)),
    *(
        Variation(
            name=f"link's share {share}",
            options={"pcie_frac": share},
            devices=True,
            also=("tiered, 50 %", "path 2, partly"),
            about=(About(lane="pcie"),) if share else (),
        )
        for share in (0.0, 0.37, 1.0)
    ),
    *(
        Variation(
            name=f"{mode} rounds",
            options={"dispatch": mode, "pcie_frac": 0.5},
            devices=True,
            also=("path 2, partly",) if mode == "doorbell" else (),
            about=(About(lane="pcie"), About(dispatch=mode)),
        )
        for mode in ("stepped", "doorbell")
    ),
    Variation(name="adapts every 4 rounds", options={"adapt_every": 4}, devices=True, about=MOVES),
)
"""What is varied beside half the experts; settings of a later version are left out."""


@frozen(kw_only=True)
class Model:
    """What a table of ways has to know of a model: its routed experts and their bytes.

    `cells` are the bytes of a cell in the tier for each of them, `beside` what a memory budget has
    to hold besides. `hashed`: it has hashes to compare what is read with.
    """

    experts: int
    nbytes: int
    cells: int = 0
    beside: int = 0
    hashed: bool = False


@frozen(kw_only=True)
class Way:
    """One row of the table: the names of place and cache, and the settings by key.

    A run that did not do all of `about` proves nothing of what the way is about.
    """

    place: str
    cache: str
    options: Mapping[str, Any]
    about: tuple[About, ...] = ()

    def __str__(self) -> str:
        return f"{self.place}, cache {self.cache}" if self.cache else self.place


def ways(
    model: Model,
    *,
    devices: Sequence[int] = (),
    given: Mapping[str, Any] | None = None,
    quick: bool = False,
) -> tuple[Way, ...]:
    """Every way for a backend that uses these devices; the first computes, the others may help.

    `given` are the settings that every way has: one that would contradict them is left out, and
    where all places or all caches would, what is given is the one there is. `quick`: every place
    with one cache, and every cache at one place.
    """
    given = dict(given or {})
    alone = _alone(devices, given)
    placed = [
        (name, {**alone, **options})
        for name, options in _places(model, bool(devices), given)
        if _agrees(options, given)
    ]
    placed = placed or [(str(given.get("source", "as given")), alone)]
    cached = _caches(model, given) if devices else [("", {})]
    found = [
        Way(place=place, cache=cache, options={**where, **held}, about=_about(place))
        for cache, held in cached
        for place, where in placed
        if not quick or place == placed[0][0] or cache in ("", USUAL_CACHE) or len(cached) == 1
    ]
    if not quick:
        found += _helped(len(devices), placed, cached, given)
        found += _paced(placed, cached, given) if devices else ()
    held = next((c for c in cached if c[0] == USUAL_CACHE), cached[-1])
    found += [
        Way(
            place=f"{place}, {name}" if name else place,
            cache=str(more.get("expert_cache", held[0])),
            options=_joined(where, held[1], more),
            about=(*_about(place), *about),
        )
        for name, more, also, about in _more(model, len(devices))
        if _agrees(more, given) and not (quick and "expert_cache_device1" not in more)
        for place, where in placed
        if place == placed[0][0] or place in also
    ]
    return tuple(found)


def _paced(
    placed: Sequence[tuple[str, dict[str, Any]]],
    cached: Sequence[tuple[str, dict[str, Any]]],
    given: Mapping[str, Any],
) -> Iterator[Way]:
    """Every place once more where the cache stays as it is, and where it moves in every round."""
    cache, held = next((c for c in cached if c[0] == USUAL_CACHE), cached[-1])
    for pace, rounds, about in PACES:
        if _agrees({"adapt_every": rounds}, given):
            for place, where in placed:
                options = _joined(where, held, {"adapt_every": rounds})
                expected = (*_about(place), *about)
                name = f"{place}, {pace}"
                yield Way(place=name, cache=cache, options=options, about=expected)


def _helped(
    devices: int,
    placed: Sequence[tuple[str, dict[str, Any]]],
    cached: Sequence[tuple[str, dict[str, Any]]],
    given: Mapping[str, Any],
) -> Iterator[Way]:
    """Every place and cache once more, with all helpers; the tier serves none."""
    helpers = min(devices - 1, MOST_HELPERS)
    more = {f"expert_cache_device{n}": HELPED for n in range(1, helpers + 1)}
    if helpers < 1 or not _agrees(more, given):
        return
    for cache, held in cached:
        for place, where in placed:
            if where.get("source") != "tiered-file":
                yield Way(
                    place=f"{place}, helped",
                    cache=cache,
                    options=_joined(where, held, more),
                    about=(*_about(place), *HELPS),
                )


def _about(place: str) -> tuple[About, ...]:
    """What a run at a place of that name must have done; nothing where it is not one of core's."""
    return next((each.about for each in PLACES if each.name == place), ())


def _joined(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over each other; with helpers, all devices are used."""
    options = {key: value for part in parts for key, value in part.items()}
    if "expert_cache_device1" in options:
        options.pop("device", None)
    return options


def _alone(devices: Sequence[int], given: Mapping[str, Any]) -> dict[str, Any]:
    """The first device without helpers, unless helpers were asked for."""
    helped = any(key.startswith("expert_cache_device") for key in given)
    return {"device": (devices[0],)} if len(devices) > 1 and not helped else {}


def _places(
    model: Model, devices: bool, given: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and settings of the places; a budget that was given makes one of the tiers."""
    budgeted = False
    for place in PLACES:
        if place.devices and not devices:
            continue
        if place.budgeted and "ram_budget" in given:
            if not budgeted:
                yield place.source, {"source": place.source}
            budgeted = True
            continue
        yield place.name, _placed(place, model)


def _placed(place: Place, model: Model) -> dict[str, Any]:
    options = {"source": place.source, **place.options}
    if place.pinned:
        options[place.pinned] = (place.share or 0) * model.nbytes / GIB
    elif place.budgeted:
        # a byte too little would leave the last expert out
        options["ram_budget"] = (model.beside + (place.share or 0) * model.cells + 1) / GIB
    return options


def _agrees(options: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    return all(given.get(key, value) == value for key, value in options.items())


def _caches(model: Model, given: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    if "expert_cache" in given:
        return [(str(given["expert_cache"]), {})]
    counts = {"0": 0, "1": 1, "half": model.experts // 2, "all": model.experts}
    return [(name, {"expert_cache": counts[name]}) for name in CACHES]


def _more(
    model: Model, devices: int
) -> Iterator[tuple[str, dict[str, Any], tuple[str, ...], tuple[About, ...]]]:
    """Names and settings of what is varied, the places where besides the first, and about what."""
    for count in range(1, min(devices, MOST_HELPERS + 1)):
        helped = {f"expert_cache_device{n}": HELPED for n in range(1, count + 1)}
        yield f"{count} helper{'s' * (count > 1)}", helped, (), HELPS
    for item in VARIATIONS:
        later = any(BY_KEY[key].pending for key in item.options)
        unhashed = "verify_reads" in item.options and not model.hashed
        if not later and not unhashed and (devices or not item.devices):
            yield item.name, dict(item.options), item.also, item.about
