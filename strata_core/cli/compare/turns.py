"""Running two programs in turn, A B A B, each process alone on the machine.

A machine that slows down then slows both. Nothing is kept of a pair that was not whole.
"""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence

from strata_core.cli.compare.figures import Asked, Figures, Pair
from strata_core.cli.compare.reading import NotFigures
from strata_core.errors import StrataError

Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints. Raises StrataError."""

Reader = Callable[[str, Asked], Figures]


def run(command: Sequence[str], timeout: float) -> str:
    """What a command prints that ends with exit code 0. Raises StrataError."""
    try:
        done = subprocess.run(  # noqa: S603 - the program that the user named
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise _failed(command, f"it ran for more than {timeout:g} s") from None
    except OSError as error:
        raise _failed(command, f"it cannot be run: {error.strerror or error}") from None
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip())[-1000:]
        why = f"it left with exit code {done.returncode}: {said or 'without a word'}"
        raise _failed(command, why)
    return done.stdout


def _failed(command: Sequence[str], why: str) -> StrataError:
    return StrataError(
        f"cannot run {shlex.join(command)}", why, "run the command by hand to see what it needs"
    )


def take_turns(
    strata: tuple[Sequence[str], Reader],
    peer: tuple[Callable[[Figures], Sequence[str]], Reader],
    asked: Asked,
    pairs: int,
    runner: Runner,
    on_pair: Callable[[int, Pair], None],
) -> list[Pair]:
    """Run the pairs; `on_pair(number, pair)` after each, the first having the number 1.

    The peer's command is made from Strata's first figures, so that it gets as much of a device.
    Raises StrataError with the number of the pair and the command that failed.
    """
    command, read = strata
    make, read_peer = peer
    other: Sequence[str] = ()
    measured = []
    for number in range(1, pairs + 1):
        mine = _one(number, command, read, asked, runner)
        other = other or make(mine)
        pair = Pair(mine, _one(number, other, read_peer, asked, runner))
        measured.append(pair)
        on_pair(number, pair)
    return measured


def _one(
    number: int, command: Sequence[str], read: Reader, asked: Asked, runner: Runner
) -> Figures:
    try:
        return read(runner(command), asked)
    except NotFigures as error:
        raise StrataError(
            f"pair {number}: {shlex.join(command)} gave no figures", error.why, error.remedy
        ) from error
