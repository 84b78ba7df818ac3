"""`strata conformance`: run the suite of a role on an installed record."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata_core.cli.command import Invocation, command
from strata_core.cli.words import table
from strata_core.config import did_you_mean
from strata_core.errors import StrataError, UsageError
from strata_core.interfaces import AllocatorRecord, Role, Unusable
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from strata_core.plugins import Catalogue

ROLES: tuple[Role, ...] = ("source", "allocator", "backend")


@command(
    "conformance",
    [
        click.Argument(["name"], metavar="NAME"),
        click.Option(
            ["--role"],
            metavar="|".join(ROLES),
            help="What NAME is; needed only where several roles have a record of that name.",
        ),
        click.Option(
            ["--model", "model"],
            metavar="MODEL",
            help="Test with this model instead of a small one made for the purpose.",
        ),
        click.Option(
            ["--plain", "plain"],
            metavar="MODEL",
            help="Compare with this pack of the same model, where a plugin keeps its experts.",
        ),
    ],
    LOADING,
)
def command_object(
    invocation: Invocation, name: str, role: str | None, model: str | None, plain: str | None
) -> int:
    """Test an installed backend, allocator or source against what its interface promises.

    NAME is a record's name as `strata plugins` lists it. The settings given are those it is built
    with; an allocator is built for the backend that --backend names, also for one that only stands
    in. Needs pytest and hypothesis (the extra `conformance`). Leaves with exit code 1 where a
    test fails.
    """
    settings = invocation.settings()
    from strata_core.plugins import load_plugins

    catalogue = load_plugins(blocked=settings.block_plugins)
    found = _role(catalogue, name, role)
    _check_usable(catalogue, found, name, settings.backend)
    from strata_core.api import model_path

    _need("pytest", "hypothesis")
    from strata_core.testing.conformance.run import run_conformance

    paths: dict[str, Path | None] = {}
    for flag, given in (("--model", model), ("--plain", plain)):
        path = model_path(given) if given is not None else None
        if path is not None and not path.exists():
            raise UsageError(f"{flag} {given}: there is nothing of that name")
        paths[flag] = path
    options = {key: _plain(value) for key, value in settings.given().items()}
    result = run_conformance(
        found,
        name,
        model=paths["--model"],
        plain=paths["--plain"],
        blocked=settings.block_plugins,
        options=options,
    )
    invocation.console.document(result.as_json())
    rows = [
        (row.outcome, row.test, row.why.splitlines()[0] if row.why else "") for row in result.rows
    ]
    invocation.console.line(table(["outcome", "test", "why"], rows).rstrip())
    count = len(result.failed)
    ran = sum(row.outcome != "skipped" for row in result.rows)
    verdict = f"{count} of {ran} tests failed" if count else f"{ran} tests passed"
    invocation.console.line(f"{found} {name}: {verdict}")
    return 0 if result.passed else 1


def _plain(value: object) -> object:
    return str(value) if isinstance(value, Path) else value


def _check_usable(catalogue: Catalogue, role: Role, name: str, backend: str) -> None:
    """Raise UsageError where the record's probe says that it cannot be used here.

    An allocator that is built for a stand-in is not asked: it is on another machine than its own.
    """
    from strata_core.machine import read_machine
    from strata_core.plugins import probe_catalogue

    (offer,) = [item for item in catalogue.offers(role) if item.name == name]
    if isinstance(offer.record, AllocatorRecord) and backend not in ("auto", *offer.record.serves):
        return
    answer = probe_catalogue(catalogue, read_machine())[role][name]
    if isinstance(answer, Unusable):
        raise UsageError(
            f"{role} {name} of {offer.origin} cannot be tested on this machine",
            answer.reason,
            answer.hint or "test it where `strata plugins` calls it usable",
        )


def _role(catalogue: Catalogue, name: str, given: str | None) -> Role:
    """The role that has a record of that name. Raises UsageError."""
    if given is not None and given not in ROLES:
        raise UsageError(f"--role {given} is none", f"the roles are {', '.join(ROLES)}")
    looked = [role for role in ROLES if given in (None, role)]
    names = {role: [offer.name for offer in catalogue.offers(role)] for role in looked}
    having = [role for role in looked if name in names[role]]
    if len(having) == 1:
        return having[0]
    if having:
        raise UsageError(
            f"{name} names several records", f"there is a {' and a '.join(having)}", "add --role"
        )
    every = [n for found in names.values() for n in found]
    broken = "; ".join(str(item) for item in catalogue.broken)
    raise UsageError(
        f"there is no record named {name}",
        f"there are {', '.join(sorted(every))}" + (f"; not loaded: {broken}" if broken else ""),
        did_you_mean(name, every) or "`strata plugins` lists what is installed",
    )


def _need(*modules: str) -> None:
    """Raise StrataError where a package is missing that the suites are made with."""
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise StrataError(
            "the conformance suite cannot run",
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed",
            "pip install 'strata-core[conformance]'",
        )
