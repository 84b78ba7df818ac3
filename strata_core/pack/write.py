"""Writing a pack: streamed, resumable, and there only when it is whole.

Everything is written into `.OUT.partial` beside OUT. A unit (the model's own tensors, or one layer)
is noted in the journal after its bytes are flushed; the manifest, without which nothing opens the
folder, comes last; then the folder takes OUT's name. A crash at any moment leaves OUT absent or
whole, and the next run goes on after checking the hashes of what is there.
"""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from attrs import frozen

from strata_core.checkpoint.mapping import exists, read_small
from strata_core.checkpoint.open import Checkpoint
from strata_core.checkpoint.pack_format import (
    DENSE,
    EXPERTS,
    JOURNAL,
    KEPT,
    MANIFEST,
    METADATA,
    VERSION,
    KeptFile,
    Manifest,
    digest_of,
)
from strata_core.checkpoint.packed import open_pack
from strata_core.checkpoint.positioned import Reader
from strata_core.checkpoint.scales import check_numbers
from strata_core.checkpoint.types import WeightType
from strata_core.errors import CheckpointError, StrataError, UsageError
from strata_core.interfaces import Piece, Progress
from strata_core.pack.files import Target, Unwritable, flush_folder, taken, write_whole
from strata_core.pack.journal import Journal
from strata_core.pack.layout import Arrangement, Item, Unit, arrange
from strata_core.pack.workers import CHUNK, Workers

_GIB = 1 << 30


@frozen(kw_only=True)
class Packed:
    """A finished pack. `resumed` bytes were there from an earlier run; `already`: all of it was."""

    path: Path
    manifest: Manifest
    resumed: int
    already: bool = False


def write_pack(checkpoint: Checkpoint, out: Path, progress: Progress) -> Packed:
    """Write `checkpoint` as a pack named `out`. Raises StrataError; then there is no `out`.

    What was written before a failure stays in `.OUT.partial` for the next run. Memory: a few
    buffers of 4 MiB; the model is streamed, not held.
    """
    _check_request(checkpoint, out)
    if exists(out):
        return _finished(checkpoint, out)
    partial = partial_folder(out)
    identity = _identity(checkpoint)
    try:
        partial.mkdir(exist_ok=True)
        journal = Journal.open(partial / JOURNAL, identity)
    except OSError as error:
        raise _unwritten(error, out, partial) from error
    try:
        with journal:
            resumed = _fill(checkpoint, partial, journal, progress)
            if sys.platform == "win32":
                journal.close()  # an open file keeps its folder from being renamed there
            flush_folder(partial)
            partial.rename(out)
            flush_folder(out.parent)
    except (Unwritable, OSError) as error:
        raise _unwritten(error, out, partial) from error
    (out / JOURNAL).unlink(missing_ok=True)
    return Packed(path=out, manifest=open_pack(out).manifest, resumed=resumed)


def partial_folder(out: Path) -> Path:
    """Where the pack `out` is while it is not finished."""
    return out.with_name(f".{out.name}.partial")


# --- before anything is written ----------------------------------------------------------------


def _check_request(checkpoint: Checkpoint, out: Path) -> None:
    if checkpoint.pack is not None:
        raise UsageError(
            f"{checkpoint.path} is a pack already",
            "packing changes the form of a GGUF file or a hub folder",
            "copy the folder if another copy is wanted",
        )
    if not out.name or out.name == "..":
        raise UsageError(
            f"{str(out)!r} cannot be the name of a pack",
            "the pack is made under a name of its own in a folder that exists",
            "give the path of a folder that does not exist yet",
        )
    if not out.parent.is_dir():
        raise UsageError(
            f"{out} cannot be made", f"there is no folder {out.parent}", "make that folder first"
        )


def _finished(checkpoint: Checkpoint, out: Path) -> Packed:
    """What is at OUT if it is this model's finished pack. Raises UsageError for anything else."""
    refusal = UsageError(
        f"{out} exists already",
        "it is not a finished pack of this model, and nothing is overwritten",
        "name another OUT, or remove it",
    )
    if not exists(out / MANIFEST):
        raise refusal
    try:
        found = open_pack(out).manifest
    except CheckpointError as error:
        raise refusal from error
    if found.source_hash != checkpoint.model_hash:
        raise refusal
    (out / JOURNAL).unlink(missing_ok=True)
    resumed = found.experts_bytes + found.dense_bytes
    return Packed(path=out, manifest=found, resumed=resumed, already=True)


def _identity(checkpoint: Checkpoint) -> dict[str, Any]:
    """What must be the same for a run to go on: version, model, and its files' sizes and times."""
    facts = [path.stat() for path in checkpoint.files]
    return {
        "version": VERSION,
        "model_hash": checkpoint.model_hash,
        "files": [[item.st_size, item.st_mtime_ns] for item in facts],
    }


def _check_room(arrangement: Arrangement, partial: Path) -> None:
    total = sum(arrangement.lengths.values())
    there = sum(min(taken(partial / name), size) for name, size in arrangement.lengths.items())
    free = shutil.disk_usage(partial).free
    if free < total - there:
        raise Unwritable(
            f"the disk has no room for {partial}",
            f"the pack takes {total / _GIB:.2f} GiB, of which {there / _GIB:.2f} are there; "
            f"{free / _GIB:.2f} GiB are free",
            errno.ENOSPC,
        )


def _unwritten(error: Exception, out: Path, partial: Path) -> StrataError:
    """The error with the way on."""
    if not isinstance(error, Unwritable):
        number = getattr(error, "errno", None)
        why = getattr(error, "strerror", None) or str(error)
        error = Unwritable(f"cannot write {partial}", f"the system says: {why}", number)
    return StrataError(
        error.what,
        error.why,
        f"{error.remedy}, then give the same command again: it goes on where it stopped "
        f"(to give up, remove {partial}); there is no {out.name}",
    )


# --- writing -----------------------------------------------------------------------------------


def _fill(checkpoint: Checkpoint, partial: Path, journal: Journal, progress: Progress) -> int:
    """Write all that is missing and the manifest; returns the bytes that were there already."""
    arrangement = arrange(checkpoint)
    (partial / MANIFEST).unlink(missing_ok=True)
    _check_room(arrangement, partial)
    fresh = not journal.done
    lengths = arrangement.lengths
    with (
        Target(partial / EXPERTS, lengths[EXPERTS], fresh=fresh) as experts,
        Target(partial / DENSE, lengths[DENSE], fresh=fresh) as dense,
        Reader() as reader,
        Workers("pack") as workers,
    ):
        work = _Work({EXPERTS: experts, DENSE: dense}, reader, workers, progress, str(partial))
        resumed = work.keep_what_holds(arrangement, journal)
        work.write_rest(arrangement, journal)
    kept = _keep_files(checkpoint, partial)
    document = arrangement.manifest(journal.done, kept).as_json()
    write_whole(partial / MANIFEST, json.dumps(document, indent=1).encode() + b"\n")
    return resumed


@frozen(eq=False)
class _Work:
    targets: dict[str, Target]
    reader: Reader
    workers: Workers
    progress: Progress
    folder: str

    def keep_what_holds(self, arrangement: Arrangement, journal: Journal) -> int:
        """Forget the units whose bytes are not those that the journal names; bytes of the rest."""
        units = [unit for unit in arrangement.units if unit.name in journal.done]
        kept = 0
        if not units:
            return kept
        self.progress.start("checking what is there", sum(unit.nbytes for unit in units))
        try:
            for unit in units:
                if (
                    tuple(self.workers.map(self._hash_written, unit.items))
                    == journal.done[unit.name]
                ):
                    kept += unit.nbytes
                else:
                    journal.forget(unit.name)
        finally:
            self.progress.done()
        return kept

    def write_rest(self, arrangement: Arrangement, journal: Journal) -> None:
        """Write every unit that the journal does not have, each noted when it is on the disk.

        The disk takes one unit in while the next is read and hashed.
        """
        units = [unit for unit in arrangement.units if unit.name not in journal.done]
        self.progress.start("packing", sum(unit.nbytes for unit in units))
        try:
            with ThreadPoolExecutor(1, "strata-flush") as flusher:
                before: _Flushing | None = None
                for unit in units:
                    hashes = tuple(self.workers.map(self._copy, unit.items))
                    if before is not None:
                        before.note(journal)
                    before = _Flushing(unit.name, hashes, flusher.submit(self._flush, unit))
                if before is not None:
                    before.note(journal)
        finally:
            self.progress.done()

    def _flush(self, unit: Unit) -> None:
        for name in {item.file for item in unit.items}:
            self.targets[name].flush()

    def _copy(self, item: Item) -> str:
        """Copy one item into its file, with its zeros; the hash of its bytes."""
        target = self.targets[item.file]
        digest = hashlib.sha256()
        at = item.offset
        buffer = memoryview(bytearray(min(CHUNK, item.nbytes)))
        for piece, kind in _chunks(item):
            self.workers.check()
            data = buffer[: piece.nbytes]
            self.reader.read(piece, data, item.what)
            where = f"{piece.file}: {item.what}, from byte {piece.offset} on"
            check_numbers(kind.name, np.frombuffer(data, np.uint8), where)
            digest.update(data)
            target.write(data, at)
            at += piece.nbytes
            self.progress.advance(piece.nbytes)
        target.write(memoryview(bytes(item.end - at)), at)
        return digest.hexdigest()

    def _hash_written(self, item: Item) -> str:
        """The hash of what the pack's own file has where the item should be."""
        path = self.targets[item.file].path
        digest = hashlib.sha256()
        buffer = memoryview(bytearray(min(CHUNK, item.nbytes)))
        for start in range(0, item.nbytes, CHUNK):
            self.workers.check()
            size = min(CHUNK, item.nbytes - start)
            self.reader.read(Piece(path, item.offset + start, size), buffer[:size], item.what)
            digest.update(buffer[:size])
            self.progress.advance(size)
        return digest.hexdigest()


@frozen(eq=False)
class _Flushing:
    """A unit whose bytes are on their way to the disk."""

    unit: str
    hashes: tuple[str, ...]
    flushed: Future[None]

    def note(self, journal: Journal) -> None:
        """Wait until they are there, and note it. Raises StrataError, OSError."""
        self.flushed.result()
        journal.add(self.unit, self.hashes)


def _chunks(item: Item) -> Iterator[tuple[Piece, WeightType]]:
    """An item's bytes in runs of at most CHUNK that hold whole blocks."""
    for piece, kind in item.parts:
        step = CHUNK // kind.block_bytes * kind.block_bytes
        for start in range(0, piece.nbytes, step):
            size = min(step, piece.nbytes - start)
            yield Piece(piece.file, piece.offset + start, size), kind


def _keep_files(checkpoint: Checkpoint, partial: Path) -> tuple[KeptFile, ...]:
    """Copy the small files, so that a prompt becomes the same ids from the pack."""
    contents: dict[str, bytes] = {}
    if checkpoint.gguf is not None:
        contents[METADATA] = checkpoint.gguf.without_tensors()
    else:
        for name in KEPT:
            if name != METADATA and exists(checkpoint.path / name):
                contents[name] = read_small(checkpoint.path / name)
    for name in KEPT:
        (partial / f"{name}.tmp").unlink(missing_ok=True)
        if name not in contents:
            (partial / name).unlink(missing_ok=True)
    for name, content in contents.items():
        write_whole(partial / name, content)
    return tuple(KeptFile(name, len(data), digest_of(data)) for name, data in contents.items())
