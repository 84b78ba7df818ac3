"""`strata plugins`: what can do the work here, what would be chosen, and why."""

from __future__ import annotations

from strata_core.cli.command import Invocation, command
from strata_core.cli.survey import refusals, report_text, survey


@command("plugins", groups=["choice", "plugins"])
def command_object(invocation: Invocation) -> int:
    """List the backends, allocators and sources that are installed.

    Each is shown with the distribution it comes from and whether it can be used on this machine,
    or why not; what would be chosen is shown with its reason, and every other record with the
    reason why it was not. Plugins that did not load are listed with their error. Leaves with exit
    code 2 where what was asked for cannot be chosen.
    """
    settings = invocation.settings()
    from strata_core.machine import read_machine

    report = survey(settings, read_machine()).report
    invocation.console.document(report)
    invocation.console.text(report_text(report))
    return 2 if refusals(report) else 0
