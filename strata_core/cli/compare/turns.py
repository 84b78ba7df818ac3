"""Running two programs in turn, A B A B, each process alone on the machine.

A machine that slows down then slows both. Nothing is kept of a pair that was not whole.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from threading import Thread
from typing import IO

from strata_core.cli.compare.figures import Asked, Figures, Pair
from strata_core.cli.compare.reading import NotFigures
from strata_core.errors import StrataError

Runner = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints. Raises StrataError."""

Reader = Callable[[str, Asked], Figures]


MOST_PRINTED = 16 << 20
"""Bytes that a process may print on its standard output: figures take a few thousand."""

MOST_SAID = 64 << 10
"""Bytes that are kept of the end of its standard error."""

STEP = 0.2
"""Seconds after which a wait looks around."""


class _Stream(Thread):
    """Reads a stream to its end: keeps its first `most` bytes and ends at more, or the last ones.

    `over` says that there was more than was to be kept of the beginning.
    """

    def __init__(self, stream: IO[bytes], most: int, *, last: bool) -> None:
        super().__init__(daemon=True)
        self._stream, self._most, self._last = stream, most, last
        self._kept = bytearray()
        self.over = False
        self.start()

    @property
    def text(self) -> str:
        """What was kept."""
        return self._kept.decode("utf-8", "replace")

    def run(self) -> None:
        """Read; the stream is closed then."""
        with self._stream, suppress(OSError):
            while piece := os.read(self._stream.fileno(), 1 << 16):
                self._kept += piece
                if len(self._kept) > self._most:
                    self.over = True
                    if not self._last:
                        return
                    del self._kept[: -self._most]


def run(command: Sequence[str], timeout: float) -> str:
    """What a command prints that ends with exit code 0. Raises StrataError.

    It has a process group of its own, which ends with it where this call does not return.
    """
    until = time.monotonic() + timeout
    try:
        process = subprocess.Popen(  # noqa: S603 - the program that the user named
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
    except OSError as error:
        raise _failed(command, f"it cannot be run: {error.strerror or error}") from None
    try:
        return _answer(command, process, until, timeout)
    except BaseException:
        _end(process)
        raise


def _answer(
    command: Sequence[str], process: subprocess.Popen[bytes], until: float, timeout: float
) -> str:
    assert process.stdout is not None, "it was asked for"
    assert process.stderr is not None, "it was asked for"
    out = _Stream(process.stdout, MOST_PRINTED, last=False)
    said = _Stream(process.stderr, MOST_SAID, last=True)
    late = _failed(command, f"it ran for more than {timeout:g} s")
    for reader in (out, said):
        while True:
            left = until - time.monotonic()  # read first: who has ended by now is not late
            if not reader.is_alive():
                break
            if left <= 0:
                raise late
            reader.join(min(left, STEP))  # a longer wait would hold up Ctrl-C on some systems
        if out.over:
            raise _failed(command, f"it printed more than {MOST_PRINTED >> 20} MiB")
    try:
        code = process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise late from None
    if code != 0:
        words = (said.text.strip() or out.text.strip())[-1000:]
        raise _failed(command, f"it left with exit code {code}: {words or 'without a word'}")
    return out.text


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a process and, where the system has groups, all that it started."""
    if process.returncode is not None:
        return  # it was waited for: its number may be another's by now
    if sys.platform != "win32":
        with suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.wait()


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
