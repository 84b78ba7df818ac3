"""Converting a pack, and measuring what came of it."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import zstandard
from attrs import frozen

from strata_core.errors import StrataError, UsageError
from strata_source_zstd.archive import (
    DATA,
    STRIDES,
    Archive,
    Bytes,
    Frames,
    open_archive,
    restore,
    shuffled,
)
from strata_source_zstd.plugin import FORM

MANIFEST = "strata-pack.json"
LEVEL = 3
_SAMPLES = 2


@frozen
class Converted:
    """What a conversion made: bytes before and after, seconds, and the order of each layer."""

    raw: int
    packed: int
    seconds: float
    strides: tuple[int, ...]

    @property
    def ratio(self) -> float:
        """Bytes after by bytes before; the smaller the better."""
        return self.packed / self.raw


def convert(
    pack: Path, out: Path, *, level: int = LEVEL, threads: int = 0, report: Callable[[str], None]
) -> Converted:
    """Write `pack` to the new folder `out` with compressed experts. Raises StrataError.

    The experts are compressed with their hashes left as they are, so that what is read is compared
    with those of the original. Everything goes to a folder beside `out` that takes its name when it
    is complete; where writing fails, that folder is removed.
    """
    layers = _layers(pack)
    if out.exists():
        raise UsageError(f"{out} exists already", "nothing is overwritten", "name another OUT")
    partial = out.with_name(f".{out.name}.partial")
    begin = time.monotonic()
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        archive = _compress(pack, partial, layers, level, threads or os.cpu_count() or 1, report)
        archive.write_index(partial)
        for file in sorted(pack.iterdir()):
            if file.is_file() and file.name != "experts.bin":
                _link(file, partial / file.name)
        (partial / "experts.form").write_text(f"{FORM}\n", "utf-8")
        partial.rename(out)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise StrataError(
            f"cannot write {out}",
            error.strerror or str(error),
            "check the folder and its free space",
        ) from error
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    strides = tuple(frames.stride for frames in archive.layers.values())
    return Converted(archive.raw, archive.nbytes, time.monotonic() - begin, strides)


def _layers(pack: Path) -> list[dict[str, Any]]:
    try:
        document = json.loads((pack / MANIFEST).read_bytes())
        layers: list[dict[str, Any]] = document["experts"]["layers"]
        total = max(item["offset"] + item["stride"] * len(item["blobs"]) for item in layers)
        if (pack / "experts.bin").stat().st_size < total:
            raise ValueError(f"experts.bin is shorter than {total} bytes")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UsageError(
            f"{pack} is not a pack with its experts", str(error), "make one with `strata pack`"
        ) from error
    return layers


def _link(source: Path, target: Path) -> None:
    """The same file under another name, or a copy where the file system has no links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def _compress(
    pack: Path,
    folder: Path,
    layers: list[dict[str, Any]],
    level: int,
    threads: int,
    report: Callable[[str], None],
) -> Archive:
    found: dict[int, Frames] = {}
    at = 0
    with (
        (pack / "experts.bin").open("rb", buffering=0) as source,
        (folder / DATA).open("xb") as target,
        ThreadPoolExecutor(threads) as pool,
    ):
        for layer in layers:
            stride = _best(source, layer, level)
            places = []
            for frame in _frames(pool, threads, source, layer, stride, level):
                target.write(frame)
                places.append((at, len(frame)))
                at += len(frame)
            found[layer["layer"]] = Frames(layer["stride"], stride, tuple(places))
            raw = layer["stride"] * len(places)
            share = sum(size for _, size in places) / raw
            report(f"layer {layer['layer']}: {raw} bytes to {share:.1%}, order {stride}")
        target.flush()
        os.fsync(target.fileno())
    return Archive(folder / DATA, found, at)


def _frames(
    pool: ThreadPoolExecutor,
    threads: int,
    source: BinaryIO,
    layer: dict[str, Any],
    stride: int,
    level: int,
) -> Iterator[bytes]:
    """The frames of a layer in order, a few experts for each thread read at a time."""
    count = len(layer["blobs"])
    for first in range(0, count, 4 * threads):
        blobs = [_blob(source, layer, i) for i in range(first, min(first + 4 * threads, count))]
        yield from pool.map(lambda blob: _frame(blob, stride, level), blobs)


def _frame(blob: Bytes, stride: int, level: int) -> bytes:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    return compressor.compress(shuffled(blob, stride).data)


def _blob(source: BinaryIO, layer: dict[str, Any], index: int) -> Bytes:
    size = layer["stride"]
    source.seek(layer["offset"] + index * size)
    data = source.read(size)
    if len(data) != size:
        raise StrataError(
            f"expert {index} of layer {layer['layer']} is not whole", "experts.bin ends too soon"
        )
    return np.frombuffer(data, np.uint8)


def _best(source: BinaryIO, layer: dict[str, Any], level: int) -> int:
    """The order that makes a few experts of the layer smallest."""
    count = min(_SAMPLES, len(layer["blobs"]))
    blobs = [_blob(source, layer, i) for i in range(count)]
    sizes = {s: sum(len(_frame(blob, s, level)) for blob in blobs) for s in STRIDES}
    return min(sizes, key=lambda stride: (sizes[stride], stride))


@frozen
class Measured:
    """How fast the experts of an archive are decompressed, in bytes of experts a second.

    `processor` is for each second of processor time, which other work on the machine does not
    change as it does the others.
    """

    raw: int
    packed: int
    processor: float
    one_thread: float
    all_threads: float
    threads: int


def measure(pack: Path, threads: int = 0) -> Measured:
    """Decompress every expert once by one thread, and once by all. Raises StrataError."""
    archive = open_archive(pack)
    threads = threads or os.cpu_count() or 1
    jobs = [(frames, place) for frames in archive.layers.values() for place in frames.places]

    def one(job: tuple[Frames, tuple[int, int]]) -> None:
        frames, (at, size) = job
        with archive.path.open("rb", buffering=0) as file:
            file.seek(at)
            data = file.read(size)
        moved = zstandard.ZstdDecompressor().decompress(data, max_output_size=frames.size)
        target = np.empty(frames.size, np.uint8)
        restore(np.frombuffer(moved, np.uint8), frames.stride, target)

    rates = []
    used = time.process_time()
    for count in (1, threads):
        with ThreadPoolExecutor(count) as pool:
            begin = time.monotonic()
            list(pool.map(one, jobs))
            rates.append(archive.raw / (time.monotonic() - begin))
    processor = 2 * archive.raw / (time.process_time() - used)
    return Measured(archive.raw, archive.nbytes, processor, rates[0], rates[1], threads)
