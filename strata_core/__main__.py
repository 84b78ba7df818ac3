"""`python -m strata_core` is the `strata` command."""

from strata_core.cli.entry import run

run()
