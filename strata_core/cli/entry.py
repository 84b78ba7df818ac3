"""The first lines of the `strata` command: from here on Ctrl-C ends it without a stack trace."""

from __future__ import annotations

import sys

from strata_core.cli import INTERRUPTED

_DOCUMENT = """{
  "error": {
    "type": "StrataError",
    "what": "interrupted",
    "why": "",
    "remedy": ""
  }
}
"""


def run() -> None:
    """Import the command and run it; Ctrl-C while it is imported ends the process."""
    try:
        from strata_core.cli.main import run as run_command
    except KeyboardInterrupt:
        args = sys.argv[1:]
        own = args[: args.index("--")] if "--" in args else args
        try:
            if "--json" in own:
                sys.stdout.write(_DOCUMENT)
            else:
                sys.stderr.write("strata: interrupted\n")
        except (OSError, AttributeError):
            pass  # a stream is closed or full; there is nobody to tell
        sys.exit(INTERRUPTED)
    run_command()
