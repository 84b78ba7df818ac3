"""What this process has in RAM, as far as the system tells."""

from __future__ import annotations

from pathlib import Path

from attrs import frozen


@frozen
class ProcessMemory:
    """Bytes in RAM now: of this process's own (`own`), and of files that it maps (`mapped`)."""

    own: int
    mapped: int


def process_memory(root: Path = Path("/")) -> ProcessMemory | None:
    """As /proc has it; None on systems without it."""
    try:
        text = (root / "proc/self/status").read_text("ascii", "replace")
    except OSError:
        return None
    found = {}
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if name.startswith("Rss") and len(words) == 2 and words[0].isdigit():
            found[name] = int(words[0]) << 10
    if "RssAnon" not in found or "RssFile" not in found:
        return None
    return ProcessMemory(found["RssAnon"] + found.get("RssShmem", 0), found["RssFile"])
