"""`strata plan`: what would go where, and whether it fits, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import click

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.survey import chosen_text, degradation_text
from strata_core.errors import UsageError
from strata_core.setting_table import LOADING

if TYPE_CHECKING:
    from strata_core.machine import Machine

_LARGEST_FACTS = 16 << 20


@command(
    "plan",
    [
        model_argument(),
        click.Option(
            ["--machine", "machine_file"],
            metavar="FACTS.json",
            help="Plan for the computer whose `strata doctor --json` this file holds.",
        ),
    ],
    LOADING,
)
def command_object(invocation: Invocation, model: str, machine_file: str | None) -> int:
    """Say what MODEL would need and have in each kind of memory, and which parts are chosen.

    Nothing is loaded. Leaves with exit code 1 where the model does not fit; then it says what is
    missing, and what would fit.
    """
    machine = read_machine_file(machine_file) if machine_file is not None else None
    from strata_core.api import make_plan
    from strata_core.plan.explain import explain

    planned = make_plan(model, invocation.settings(), machine)
    document = {"model": model, **planned.as_json()}
    console = invocation.console
    console.document(document)
    console.line(explain(planned.plan))
    for item in document["selections"]:
        console.text(f"{item['role']}:\n" + chosen_text(item))
    for item in document["degradations"]:
        console.text(degradation_text(item))
    return 0 if planned.plan.fits else 1


def read_machine_file(name: str) -> Machine:
    """The machine that a file of facts describes. Raises UsageError naming file and field."""
    from strata_core.machine import Machine

    try:
        with Path(name).open("rb") as stream:
            data = stream.read(_LARGEST_FACTS + 1)
        if len(data) > _LARGEST_FACTS:
            raise ValueError("it is larger than 16 MiB")
        document = json.loads(data)
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(
            f"--machine {name!r} cannot be read",
            " ".join(reason.split()),
            "give a file that `strata doctor --json` wrote",
        ) from error
    return Machine.from_json(document, name)
