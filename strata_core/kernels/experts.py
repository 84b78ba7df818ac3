"""Reading experts through a source, for kernels that work on dequantised weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from attrs import define, field

from strata_core.checkpoint.scales import check_scales
from strata_core.interfaces import BlobPart, Expert, ExpertFiles, Source
from strata_core.kernels.dequantise import dequantise
from strata_core.kernels.kv import Floats
from strata_core.memory.address import bytes_at


@define(eq=False)
class ExpertReader:
    """Acquires experts from a source and counts what was asked for; used by one thread.

    `served` and `served_bytes` count (expert, token) pairs and the bytes of the blobs behind them:
    one a token and pick, however many tokens share a reading.
    """

    files: ExpertFiles
    source: Source
    _checked: set[Expert] = field(factory=set, init=False)
    served: int = field(default=0, init=False)
    served_bytes: int = field(default=0, init=False)

    def begin_layer(self, layer: int, experts: Sequence[int]) -> None:
        """Tell the source what is needed next."""
        self.source.begin_layer(layer, experts)

    @contextmanager
    def acquire(self, layer: int, index: int, rows: int) -> Iterator[tuple[Floats, ...]]:
        """Gate, up and down of an expert as float32 matrices, wanted for `rows` rows."""
        expert = Expert(layer, index)
        layout = self.files.layouts[layer]
        view = self.source.view(expert)
        try:
            if expert not in self._checked:
                for part, address in zip(layout.parts, view.parts, strict=True):
                    check_scales(part.type, bytes_at(address, part.nbytes), str(expert))
                self._checked.add(expert)
            yield tuple(
                _matrix(part, address)
                for part, address in zip(layout.parts, view.parts, strict=True)
            )
        finally:
            self.source.release(expert)
        self.served += rows
        self.served_bytes += rows * layout.nbytes


def _matrix(part: BlobPart, address: int) -> Floats:
    data = bytes_at(address, part.nbytes)
    return dequantise(part.type, data, (part.rows, part.columns))
