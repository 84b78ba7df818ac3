"""Packs a model in children that die by SIGKILL at chosen system calls; prints what is left.

`python crash_lab.py MODEL FOLDER KILLS` where KILLS are numbers separated by commas: the child
dies just before its N-th call of one of CALLS. Prints {"calls": how many a whole run makes,
"whole": the hash of each file of a whole pack, "runs": what each killed child left}. A process of
its own, because it forks.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import CheckpointError
from strata_core.pack.write import partial_folder, write_pack

CALLS = ("pwrite", "fsync", "ftruncate", "mkdir", "replace", "rename", "unlink", "open")


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


def dying(call: Callable[..., Any], numbers: Iterator[int], last: int) -> Callable[..., Any]:
    def wrapped(*args: Any, **options: Any) -> Any:
        if next(numbers) == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(*args, **options)

    return wrapped


def in_child(model: Path, out: Path, last: int) -> int:
    """Pack in a child that dies before call number `last`; the signal that ended it, else 0."""
    child = os.fork()
    if child:
        return os.waitpid(child, 0)[1] & 0x7F
    numbers = itertools.count(1)
    for name in CALLS:
        setattr(os, name, dying(getattr(os, name), numbers, last))
    write_pack(open_checkpoint(model), out, Silent())
    out.with_name("calls").write_text(str(next(numbers) - 1))
    os._exit(0)


def opens(folder: Path) -> bool:
    try:
        open_checkpoint(folder)
    except CheckpointError:
        return False
    return True


def hashes(folder: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in folder.iterdir()}


def examine(model: Path, folder: Path, last: int) -> dict[str, Any]:
    """What a child that died left, and what the next run makes of it."""
    out = folder / f"out{last}"
    partial = partial_folder(out)
    signalled = in_child(model, out, last)
    left = {
        "killed": signalled == signal.SIGKILL,
        "out": hashes(out) if out.exists() else None,
        "partial_opens": partial.exists() and opens(partial),
        "partial": hashes(partial) if partial.exists() else None,
    }
    finished = write_pack(open_checkpoint(model), out, Silent())
    left["resumed"] = finished.resumed
    left["after"] = hashes(out)
    left["rest"] = partial.exists()
    shutil.rmtree(out)
    return left


def main() -> None:
    model, folder = Path(sys.argv[1]), Path(sys.argv[2])
    whole = folder / "whole"
    assert in_child(model, whole, -1) == 0
    calls = int((folder / "calls").read_text())
    kills = [int(n) for n in sys.argv[3].split(",")]
    runs = {n: examine(model, folder, n) for n in (k if k > 0 else calls + k for k in kills)}
    print(json.dumps({"calls": calls, "whole": hashes(whole), "runs": runs}))


if __name__ == "__main__":
    main()
