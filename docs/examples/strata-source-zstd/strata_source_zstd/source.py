"""The source: frames are read and decompressed by several threads, right into their places."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import zstandard

from strata_core.errors import CheckpointError, StrataError, UsageError
from strata_core.interfaces import Expert, ExpertFiles, Source, SourceContext
from strata_core.sources.fetching import FetchingSource
from strata_source_zstd.archive import INDEX, Archive, open_archive, restore

MOST_THREADS = 8


class Frames:
    """Fetches blobs from an archive; implements `strata_core.sources.fetching.Fetcher`."""

    def __init__(self, archive: Archive, experts: ExpertFiles) -> None:
        self._archive, self._experts = archive, experts
        _check(archive, experts)
        self._local = threading.local()

    def groups(self, experts: Sequence[Expert]) -> Iterable[Sequence[Expert]]:
        """Each by itself: frames are decompressed one by one."""
        return [[expert] for expert in experts]

    def fetch(self, experts: Sequence[Expert], buffers: Sequence[memoryview]) -> None:
        """Read and decompress; both release the interpreter lock. Raises StrataError."""
        for expert, buffer in zip(experts, buffers, strict=True):
            self._decompress(expert, self._read(expert), buffer)

    def _read(self, expert: Expert) -> bytes:
        at, size = self._archive.place(expert)
        try:
            with self._archive.path.open("rb", buffering=0) as file:
                file.seek(at)
                data = file.read(size)
        except OSError as error:
            raise self._error(expert, error.strerror or str(error)) from error
        if len(data) != size:
            raise self._error(expert, f"the file ends {size - len(data)} bytes too soon")
        return data

    def _decompress(self, expert: Expert, data: bytes, buffer: memoryview) -> None:
        frames = self._archive.layers[expert.layer]
        moved = self._scratch(frames.size)
        decompressor = zstandard.ZstdDecompressor()
        try:
            with decompressor.stream_reader(data, read_size=len(data)) as reader:
                done = 0
                while done < frames.size and (got := reader.readinto(moved[done:])):
                    done += got
        except zstandard.ZstdError as error:
            raise self._error(expert, str(error)) from error
        if done != frames.size:
            raise self._error(expert, f"the frame holds {done} bytes instead of {frames.size}")
        restore(np.frombuffer(moved, np.uint8), frames.stride, np.frombuffer(buffer, np.uint8))

    def _scratch(self, size: int) -> memoryview:
        """This thread's own buffer."""
        have: bytearray | None = getattr(self._local, "scratch", None)
        if have is None or len(have) != size:
            have = self._local.scratch = bytearray(size)
        return memoryview(have)

    def _error(self, expert: Expert, why: str) -> StrataError:
        at, size = self._archive.place(expert)
        return StrataError(
            f"cannot read {expert} from {self._archive.path}",
            f"bytes {at} to {at + size}: {why}",
            "convert the pack again with `strata-zstd convert`, and check the disk",
        )

    def close(self) -> None:
        """Nothing to free: a file is open only while it is read."""


def pack_folder(experts: ExpertFiles) -> Path:
    """The folder of the pack that experts belong to. Raises UsageError for another form."""
    layer = min(experts.layouts)
    gate, up, down = experts.pieces(Expert(layer, 0))
    folder = gate.file.parent
    if {gate.file, up.file, down.file} != {folder / "experts.bin"}:
        raise UsageError(
            f"{gate.file} is no compressed pack",
            f"the source zstd reads packs with an {INDEX}",
            "convert a pack with `strata-zstd convert PACK OUT`",
        )
    return folder


def _check(archive: Archive, experts: ExpertFiles) -> None:
    for layer, layout in experts.layouts.items():
        frames = archive.layers.get(layer)
        if frames is None or len(frames.places) != experts.count or frames.size < layout.nbytes:
            raise CheckpointError(
                f"{archive.path} is not that of this pack",
                f"layer {layer} has {experts.count} experts of {layout.nbytes} bytes",
                "convert the pack again with `strata-zstd convert`",
            )


def build(context: SourceContext) -> Source:
    """The source of the record `zstd`."""
    frames = Frames(open_archive(pack_folder(context.experts)), context.experts)
    threads = context.options.get("zstd_threads") or min(
        context.machine.physical_cores, MOST_THREADS
    )
    memory = int(context.options.get("zstd_memory", 1.0) * 2**30)
    return FetchingSource(
        context, frames, nbytes=memory, threads=threads, purpose="decompressed experts"
    )
