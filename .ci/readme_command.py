"""Prints one of the README's two commands: the first line of the code block after its marker."""

from __future__ import annotations

import re
import sys
from pathlib import Path


def readme_command(readme: str, name: str) -> str:
    """The command that follows `<!-- command: NAME -->` in the README's text."""
    found = re.findall(rf"<!-- command: {name} -->\n+```\w*\n(.+)\n```\n", readme)
    if len(found) != 1:
        raise SystemExit(f"the README has {len(found)} commands named {name!r}, not one")
    command: str = found[0]
    return command


if __name__ == "__main__":
    sys.stdout.write(readme_command(Path(sys.argv[1]).read_text("utf-8"), sys.argv[2]) + "\n")
