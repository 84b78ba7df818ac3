"""Loading: entry point by entry point, each in quarantine until it has proved sound.

Every entry point gets a plugin manager of its own, so that nothing one plugin does can reach
another, whatever the order, and every failure has exactly one name on it.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from types import ModuleType
from typing import Any

import pluggy
from attrs import field, frozen

from strata_core import __version__, hookspecs
from strata_core.installed import entry_points_of, normal, origin_of
from strata_core.interfaces import AllocatorRecord, BackendRecord, Record, Role, SourceRecord
from strata_core.plugins.catalogue import Blocked, Broken, Catalogue, Offer, Stage
from strata_core.plugins.guard import describe, folder_kept, stdout_to_stderr
from strata_core.plugins.records import HOOKS, Unsound, api_problem, check_result
from strata_core.plugins.untouched import Program

GROUP = hookspecs.PROJECT

LOAD_SECONDS = 10.0
"""How long one plugin may take to load: its module's import and the calls of its hooks."""


@frozen
class _Candidate:
    """An entry point before it is loaded; `plugin` is set for what core brings along itself."""

    distribution: str
    version: str
    name: str
    entry_point: metadata.EntryPoint | None = None
    plugin: ModuleType | None = None

    @property
    def key(self) -> tuple[str, str]:
        """What tells it from others, and orders them."""
        return (self.distribution, self.name)

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.name})"


@frozen
class _Found:
    """A sound record and the entry point it came from."""

    role: Role
    record: Record
    origin: _Candidate


class _Quarantined(Exception):
    """Ends the loading of one entry point."""

    def __init__(self, stage: Stage, error: str, offered: Sequence[_Found] = ()) -> None:
        super().__init__(error)
        self.stage: Stage = stage
        self.error = error
        self.offered = tuple((found.role, found.record.name) for found in offered)


def load_plugins(
    entry_points: Iterable[metadata.EntryPoint] | None = None,
    blocked: Sequence[str] = (),
    seconds: float = LOAD_SECONDS,
) -> Catalogue:
    """Ask the built-ins and every plugin what they offer; no plugin can make this fail.

    `entry_points` are those to load, by default all installed ones of the group `strata`.
    `blocked` names entry points or distributions that are not even imported. What a plugin writes
    to `sys.stdout` while it loads goes to stderr, because stdout belongs to the command's own
    output. Ctrl-C while a plugin loads passes through; everything else that a plugin raises, even
    SystemExit, puts it into `Catalogue.broken`, and so does loading for more than `seconds` and
    replacing functions or classes of the program, which are put back. A name that two plugins offer
    for one role belongs to neither. The result does not depend on the order of `entry_points`.

    Plugins are loaded one after the other, each in a thread of its own, because a thread can be
    left behind where it never comes back. Other threads' output to `sys.stdout` goes to stderr
    meanwhile as well; the current folder is the same afterwards.
    """
    from strata_core import builtin

    broken: list[Broken] = []
    if entry_points is None:
        entry_points, broken = _installed()
    candidates = sorted(map(_candidate, entry_points), key=lambda item: item.key)
    kept, kept_out = _without(candidates, blocked)
    broken = [item for item in broken if not _is_blocked(item, blocked)]
    core = _Candidate("strata-core", __version__, "builtin", plugin=builtin)
    found: list[_Found] = []
    for candidate in [core, *kept]:
        try:
            found += _load_within(candidate, seconds)
        except _Quarantined as failure:
            broken.append(_broken(candidate, failure))
    sound, duplicates = _unique(found)
    broken += duplicates
    broken.sort(key=lambda item: (item.distribution, item.entry_point, item.error))
    return _catalogue(sound, broken, kept_out)


def _installed() -> tuple[list[metadata.EntryPoint], list[Broken]]:
    """What is installed; declared settings are read as well, to know those that are broken."""
    from strata_core.setting_plugins import installed_settings

    found, unreadable = entry_points_of(GROUP)
    broken = [
        Broken(item.distribution, item.version, "?", "metadata", item.error) for item in unreadable
    ]
    broken += [
        Broken(item.distribution, item.version, item.entry_point, "settings", item.error)
        for item in installed_settings().broken
    ]
    return found, broken


def _candidate(entry_point: metadata.EntryPoint) -> _Candidate:
    return _Candidate(*origin_of(entry_point), entry_point.name, entry_point)


def _without(
    candidates: Sequence[_Candidate], blocked: Sequence[str]
) -> tuple[list[_Candidate], tuple[Blocked, ...]]:
    kept = list(candidates)
    kept_out = []
    for name in sorted({normal(name) for name in blocked}):
        hit = [item for item in candidates if name in map(normal, item.key)]
        kept = [item for item in kept if item not in hit]
        kept_out.append(Blocked(name, tuple(f"{item.distribution}: {item.name}" for item in hit)))
    return kept, tuple(kept_out)


def _is_blocked(item: Broken, blocked: Sequence[str]) -> bool:
    names = {normal(name) for name in blocked}
    return item.stage == "settings" and bool(
        names & {normal(item.distribution), normal(item.entry_point)}
    )


@frozen(eq=False)
class _Loading:
    """One entry point being loaded in a thread of its own."""

    candidate: _Candidate
    results: list[list[_Found] | BaseException] = field(factory=list)

    def run(self) -> None:
        """Load it and keep how that ended."""
        try:
            self.results.append(_load(self.candidate))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that waits
            self.results.append(error)

    def wait(self, seconds: float) -> list[_Found]:
        """What was found. Raises what loading raised, and _Quarantined where it takes longer."""
        thread = threading.Thread(target=self.run, name=f"load {self.candidate}", daemon=True)
        thread.start()
        thread.join(seconds)
        if not self.results:
            raise _Quarantined("import", f"it did not load within {seconds:g} s")
        (result,) = self.results
        if isinstance(result, BaseException):
            raise result
        return result


def _load_within(candidate: _Candidate, seconds: float) -> list[_Found]:
    """The records of one entry point. Raises _Quarantined; the program is as it was before."""
    if candidate.entry_point is None:
        return _load(candidate)
    program = Program()
    try:
        with stdout_to_stderr(), folder_kept():
            found = _Loading(candidate).wait(seconds)
    finally:
        replaced = program.put_back()
    if replaced:
        more = f" and {len(replaced) - 3} more" if len(replaced) > 3 else ""
        text = f"it replaced {', '.join(replaced[:3])}{more} of the program"
        raise _Quarantined("changes", text, found)
    return found


def _load(candidate: _Candidate) -> list[_Found]:
    """The records of one entry point. Raises _Quarantined."""
    manager = _register(candidate, _import(candidate))
    found: list[_Found] = []
    for hook, (role, _) in HOOKS.items():
        found += [_Found(role, record, candidate) for record in _call(manager, hook)]
    for item in found:
        problem = api_problem(item.record)
        if problem:
            text = f"{item.role} {item.record.name!r} is {problem}"
            raise _Quarantined("api", text, found)
    return found


def _import(candidate: _Candidate) -> Any:
    if candidate.entry_point is None:
        return candidate.plugin
    try:
        plugin = candidate.entry_point.load()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _Quarantined("import", describe(error)) from error
    if plugin is None:
        raise _Quarantined("import", f"{candidate.entry_point.value} is None")
    return plugin


def _register(candidate: _Candidate, plugin: Any) -> pluggy.PluginManager:
    """A manager that holds this plugin alone, its hooks checked against the specification."""
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    try:
        manager.register(plugin, candidate.name)
        manager.check_pending()
        hooks = manager.get_hookcallers(plugin) or []
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise _Quarantined("hooks", describe(error)) from error
    if not any(hook.name in HOOKS for hook in hooks):
        raise _Quarantined("hooks", f"it implements none of {', '.join(HOOKS)}")
    for hook in hooks:
        for implementation in hook.get_hookimpls():
            options = ("wrapper", "hookwrapper", "tryfirst", "trylast")
            used = [name for name in options if getattr(implementation, name, False)]
            if used:
                text = f"{hook.name} is marked {used[0]}: a hook only returns its own list"
                raise _Quarantined("hooks", text)
    return manager


def _call(manager: pluggy.PluginManager, hook: str) -> Iterator[Record]:
    """The checked records of one hook.

    The implementation is called itself: the manager's call would drop a None unseen.
    """
    for implementation in getattr(manager.hook, hook).get_hookimpls():
        try:
            result = implementation.function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _Quarantined("call", f"{hook} raised {describe(error)}") from error
        try:
            yield from check_result(hook, result)
        except Unsound as error:
            raise _Quarantined("records", str(error)) from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            raise _Quarantined("records", describe(error)) from error


def _unique(found: Sequence[_Found]) -> tuple[list[_Found], list[Broken]]:
    """The records whose name is theirs alone within the role, and the others as broken."""
    by_name: dict[tuple[Role, str], list[_Found]] = {}
    for item in found:
        by_name.setdefault((item.role, item.record.name), []).append(item)
    sound: list[_Found] = []
    broken: list[Broken] = []
    for (role, name), items in by_name.items():
        if len(items) == 1:
            sound += items
            continue
        origins = {item.origin.key: item.origin for item in items}
        places = sorted(str(item.origin) for item in items)
        text = f"{role} {name!r} is offered by {' and by '.join(places)}"
        failure = _Quarantined("duplicate", text, items[:1])
        broken += [_broken(origin, failure) for origin in origins.values()]
    return sound, broken


def _broken(candidate: _Candidate, failure: _Quarantined) -> Broken:
    cause = failure.__cause__
    trace = "".join(traceback.format_exception(cause)) if cause is not None else ""
    return Broken(
        candidate.distribution,
        candidate.version,
        candidate.name,
        failure.stage,
        failure.error,
        trace,
        failure.offered,
    )


def _catalogue(
    sound: Sequence[_Found], broken: Sequence[Broken], blocked: tuple[Blocked, ...]
) -> Catalogue:
    backends: list[Offer[BackendRecord]] = []
    allocators: list[Offer[AllocatorRecord]] = []
    sources: list[Offer[SourceRecord]] = []
    for item in sorted(sound, key=lambda item: item.record.name):
        origin = (item.origin.distribution, item.origin.version)
        if isinstance(item.record, BackendRecord):
            backends.append(Offer(item.record, *origin))
        elif isinstance(item.record, AllocatorRecord):
            allocators.append(Offer(item.record, *origin))
        else:
            sources.append(Offer(item.record, *origin))
    return Catalogue(tuple(backends), tuple(allocators), tuple(sources), tuple(broken), blocked)
