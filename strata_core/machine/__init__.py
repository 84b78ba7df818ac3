"""The machine's facts: what probes, the planner and `strata doctor` are told.

`read_machine()` reads this computer; `Machine.from_json` replays one that was recorded elsewhere.
Importing this package is light: standard library and attrs.
"""

from __future__ import annotations

import platform
import sys
from pathlib import Path

from strata_core.machine.fields import Adapter, HugePages
from strata_core.machine.record import Machine

__all__ = ["Adapter", "HugePages", "Machine", "read_machine"]


def read_machine(root: Path = Path("/")) -> Machine:
    """Read the facts of this computer; what cannot be learnt is left at its default.

    `root` stands for `/` where /proc, /sys and /dev are read on Linux, so that a test can lay out
    another machine below a folder; Windows and macOS are asked through their system libraries.
    Takes a few milliseconds, changes nothing, opens no device. Any thread.
    """
    if sys.platform == "win32":
        from strata_core.machine.windows import read_windows

        return read_windows()
    if sys.platform == "darwin":
        from strata_core.machine.macos import read_macos

        return read_macos()
    from strata_core.machine.linux import read_linux

    return read_linux(root, platform.uname())
