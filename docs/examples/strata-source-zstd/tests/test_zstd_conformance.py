"""The suite for sources, on compressed packs of several weight types, with room and without."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.interfaces import Expert, Source, SourceContext
from strata_core.testing.conformance import SourceSuite


class Compressed(SourceSuite):
    memory = 1.0

    @pytest.fixture(autouse=True)
    def _packs(self, make_pack) -> None:
        self.make_pack = make_pack

    def checkpoint(self, folder: Path) -> Checkpoint:
        self.plain, packed = self.make_pack()
        return open_checkpoint(packed)

    def raw(self, checkpoint: Checkpoint, expert: Expert) -> bytes:
        gate, _, down = open_checkpoint(self.plain).experts.pieces(expert)
        with gate.file.open("rb") as file:
            file.seek(gate.offset)
            return file.read(down.offset + down.nbytes - gate.offset)

    def options(self) -> dict[str, object]:
        return {"zstd_memory": self.memory, "zstd_threads": 2, "verify_reads": "all"}

    def make(self, context: SourceContext) -> Source:
        from strata_source_zstd.source import build

        return build(context)


class TestWithRoom(Compressed):
    pass


class TestWithoutRoom(Compressed):
    memory = 0.0
