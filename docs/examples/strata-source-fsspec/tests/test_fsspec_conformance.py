"""The suite for sources, over HTTP: a server that behaves, one that does not, and little room."""

from __future__ import annotations

from collections import deque
from itertools import cycle, islice
from pathlib import Path

import pytest

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.interfaces import Expert, Source, SourceContext
from strata_core.testing.conformance import SourceSuite


class OverHttp(SourceSuite):
    memory = 1.0

    @pytest.fixture(autouse=True)
    def _places(self, pack: Path, mirrored: Path, server) -> None:
        self.pack, self.mirrored, self.server = pack, mirrored, server

    def checkpoint(self, folder: Path) -> Checkpoint:
        return open_checkpoint(self.mirrored)

    def raw(self, checkpoint: Checkpoint, expert: Expert) -> bytes:
        gate, _, down = checkpoint.experts.pieces(expert)
        with (self.pack / "experts.bin").open("rb") as file:
            file.seek(gate.offset)
            return file.read(down.offset + down.nbytes - gate.offset)

    def options(self) -> dict[str, object]:
        return {
            "fsspec_url": f"{self.server.url}/experts.bin",
            "fsspec_memory": self.memory,
            "fsspec_retries": 5,
        }

    def make(self, context: SourceContext) -> Source:
        from strata_source_fsspec.source import build

        return build(context)


class TestOverHttp(OverHttp):
    pass


class TestOverHttpWithLittleRoom(OverHttp):
    memory = 1e-4


class TestOverABadConnection(OverHttp):
    """Every third request fails in one way or another, for as long as the suite asks."""

    def make(self, context: SourceContext) -> Source:
        faults = cycle(["drop", None, None, "cut", None, None, 503, None, None, "spoil", None])
        self.server.faults = deque(islice(faults, 2000))
        return super().make(context)
