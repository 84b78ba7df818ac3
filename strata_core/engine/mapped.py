"""What a started model reads of mapped files while it runs."""

from __future__ import annotations

from pathlib import Path

from strata_core.checkpoint.whole import Need
from strata_core.engine.prepare import Prepared
from strata_core.engine.start.staged import StagedBackend
from strata_core.interfaces import Backend, Expert

MAPPED = ("mmap", "sliced-pinned")
"""Sources that read experts of a mapped file while a model runs."""


def mapped_needs(prepared: Prepared, backend: Backend) -> dict[Path, Need]:
    """The end of what is read of each file, by path.

    Dense weights are read where they are mapped by a backend without devices; experts by the mapped
    file, and by the resident complement those of which it keeps no copy: what its budget leaves out
    and what devices hold, which prompts and experts that change places read again.
    """
    checkpoint = prepared.checkpoint
    needs: dict[Path, Need] = {}

    def take(path: Path, end: int, what: str) -> None:
        if path not in needs or needs[path].end < end:
            needs[path] = Need(end, what)

    if not isinstance(backend, StagedBackend):
        for tensor in checkpoint.tensors.values():
            piece = tensor.piece
            take(piece.file, piece.offset + piece.nbytes, f"tensor {tensor.name}")
    if prepared.source.name in MAPPED:
        for layer in checkpoint.experts.layouts:
            for index in range(checkpoint.experts.count):
                expert = Expert(layer, index)
                for piece in checkpoint.experts.pieces(expert):
                    take(piece.file, piece.offset + piece.nbytes, str(expert))
    return needs
