"""Reading experts from their files unbuffered: aligned ranges, many at once, by own threads.

A read must begin and end at multiples of 4 KiB, in the file and in memory, so a blob's bytes begin
`pad` bytes into its first block. Parts that follow each other in a file are one range; an expert of
a GGUF file or a hub folder has up to three.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from attrs import define, field, frozen

from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import Expert, Piece
from strata_core.memory.platform.direct import BLOCK, DirectFile, open_direct

THREADS = 8
"""Reads on their way at once; a disk reaches its rate with a few of CHUNK bytes."""

CHUNK = 1 << 20
"""Longer ranges are read in parts of this size, at the same time."""


@frozen
class Range:
    """`nbytes` of a file from `offset`, both aligned, that go `at` bytes into the buffer.

    Of them the first `wanted` must be there; the rest fills the last block up, which the file may
    end in.
    """

    file: Path
    offset: int
    nbytes: int
    at: int
    wanted: int


@frozen
class Placing:
    """How a blob's parts come to lie in an aligned buffer of `nbytes`.

    `parts` are the offsets of gate, up and down in it. `whole`: they follow each other without a
    gap, so that the blob lies there in one piece.
    """

    ranges: tuple[Range, ...]
    parts: tuple[int, int, int]
    nbytes: int

    @property
    def whole(self) -> bool:
        """Whether it is one range."""
        return len(self.ranges) == 1


def place(pieces: tuple[Piece, Piece, Piece]) -> Placing:
    """The aligned ranges that hold three pieces, one after the other in a buffer."""
    runs: list[list[Piece]] = []
    for piece in pieces:
        last = runs[-1][-1] if runs else None
        if last and last.file == piece.file and last.offset + last.nbytes == piece.offset:
            runs[-1].append(piece)
        else:
            runs.append([piece])
    ranges: list[Range] = []
    parts: list[int] = []
    at = 0
    for run in runs:
        start = run[0].offset // BLOCK * BLOCK
        wanted = run[-1].offset + run[-1].nbytes - start
        nbytes = -(-wanted // BLOCK) * BLOCK
        ranges.append(Range(run[0].file, start, nbytes, at, wanted))
        parts += [at + piece.offset - start for piece in run]
        at += nbytes
    return Placing(tuple(ranges), (parts[0], parts[1], parts[2]), at)


@define(eq=False)
class Reading:
    """One expert's bytes on their way into a buffer."""

    _jobs: tuple[Future[None], ...]

    @property
    def done(self) -> bool:
        """Whether nothing is on its way any more."""
        return all(job.done() for job in self._jobs)

    @property
    def failed(self) -> bool:
        """Whether it has ended without all bytes."""
        return self.done and any(job.exception() for job in self._jobs)

    def wait(self) -> None:
        """Return when all bytes are there. Raises the StrataError of the read that failed.

        Nothing is written to the buffer any more afterwards, failed or not.
        """
        errors = [job.exception() for job in self._jobs]
        for error in errors:
            if error is not None:
                raise error

    def settle(self) -> None:
        """Wait, whatever came of it."""
        for job in self._jobs:
            job.exception()


@define(eq=False)
class _Clock:
    """Bytes and experts read, and the time in which at least one read was on its way."""

    experts: int = 0
    nbytes: int = 0
    busy: float = 0.0
    _running: int = 0
    _since: float = 0.0
    _lock: threading.Lock = field(factory=threading.Lock)

    def begin(self, reads: int, nbytes: int) -> None:
        with self._lock:
            if not self._running:
                self._since = time.perf_counter()
            self._running += reads
            self.experts += 1
            self.nbytes += nbytes

    def end(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._running:
                self.busy += time.perf_counter() - self._since


@define(eq=False)
class ExpertReader:
    """Files opened once, and the threads that read them. Any thread may call it until `close`.

    A file that is renamed or removed meanwhile can still be read. `clock` counts what was asked
    for, failed reads included.
    """

    _files: dict[Path, DirectFile]
    _pool: ThreadPoolExecutor
    clock: _Clock = field(factory=_Clock)

    @classmethod
    def open(
        cls,
        paths: Iterable[Path],
        degrade: Callable[[Degradation], None],
        *,
        opener: Callable[[Path], DirectFile] = open_direct,
        threads: int = THREADS,
    ) -> ExpertReader:
        """Open the files. Raises StrataError naming the one that cannot be; then none stays open.

        A file system without unbuffered reads is reported to `degrade`.
        """
        files: dict[Path, DirectFile] = {}
        try:
            for path in dict.fromkeys(paths):
                files[path] = opener(path)
        except OSError as error:
            for file in files.values():
                file.close()
            raise StrataError(
                f"cannot open {path} to read experts from it",
                error.strerror or str(error),
                "check that the file is still there and may be read",
            ) from error
        for path, file in files.items():
            if file.refusal:
                degrade(_buffered(path, file.refusal))
                break
        return cls(files, ThreadPoolExecutor(threads, "strata-read"))

    def start(self, expert: Expert, placing: Placing, buffer: memoryview) -> Reading:
        """Begin to read an expert into `buffer`, which is aligned and `placing.nbytes` long.

        The buffer must stay until the reading has been waited for.
        """
        jobs = [
            (part, buffer[part.at : part.at + part.nbytes])
            for whole in placing.ranges
            for part in _chunks(whole)
        ]
        self.clock.begin(len(jobs), placing.nbytes)
        return Reading(tuple(self._pool.submit(self._read, expert, *job) for job in jobs))

    def _read(self, expert: Expert, part: Range, target: memoryview) -> None:
        try:
            file = self._files[part.file]
            done = 0
            while done < part.wanted:
                # What follows a short read begins at its last whole block.
                done = done // BLOCK * BLOCK
                got = file.read(target[done:], part.offset + done)
                if done + got < part.wanted and got < BLOCK:
                    raise OSError(_short(file, part.offset + done, got))
                done += got
        except (OSError, ValueError) as error:
            end = part.offset + part.wanted
            raise StrataError(
                f"cannot read {expert} from {part.file}",
                f"bytes {part.offset} to {end}: {error}",
                "check that the file is complete and was not changed while it was in use",
            ) from error
        finally:
            self.clock.end()

    def close(self) -> None:
        """Wait for what is on its way and close the files. Calling it again does nothing."""
        self._pool.shutdown(wait=True)
        while self._files:
            self._files.popitem()[1].close()


def _chunks(whole: Range) -> Iterable[Range]:
    """A range in parts of CHUNK bytes; what only fills the last block up is in the last part."""
    for start in range(0, whole.nbytes, CHUNK):
        nbytes = min(CHUNK, whole.nbytes - start)
        wanted = min(nbytes, whole.wanted - start)
        yield Range(whole.file, whole.offset + start, nbytes, whole.at + start, wanted)


def _short(file: DirectFile, offset: int, got: int) -> str:
    size = file.size()
    if size <= offset + got:
        return f"the file ends at byte {size}"
    return f"the system gave {got} bytes at byte {offset}"


def _buffered(path: Path, refusal: str) -> Degradation:
    return Degradation(
        what="experts are read through the system's file cache",
        why=f"{path}: {refusal}",
        cost="other programs' files may be pushed out of it, and reading takes more processor time",
        remedy="put the model on a local disk with a file system such as ext4, xfs or NTFS",
    )
