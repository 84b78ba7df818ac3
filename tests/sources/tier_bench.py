"""Files that fail on demand, and a tiered source over them."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from attrs import define, field

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import Expert, Region, View
from strata_core.memory.address import bytes_at
from strata_core.memory.host import HostAllocator
from strata_core.memory.ledger import Claim, Ledger
from strata_core.memory.platform.direct import DirectFile, open_direct
from strata_core.sources.reading import ExpertReader
from strata_core.sources.tier_sizes import placings, tier_order
from strata_core.sources.tiered_file import TieredFile, TierRequest
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf


class Silent:
    """Progress that nobody watches."""

    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@define(eq=False)
class Faults:
    """What goes wrong with reads of the files opened through `open`; None: nothing.

    "short": half of what was asked for arrives, once a read; "end": the file has ended; "eio".
    """

    kind: str | None = None
    reads: list[tuple[int, int]] = field(factory=list)

    def open(self, path: Path) -> DirectFile:
        return Faulty(open_direct(path), self)


@define(eq=False)
class Faulty:
    _file: DirectFile
    _faults: Faults

    @property
    def refusal(self) -> str:
        return self._file.refusal

    def read(self, target: memoryview, offset: int) -> int:
        kind = self._faults.kind
        self._faults.reads.append((offset, len(target)))
        assert offset % 4096 == len(target) % 4096 == 0, "unbuffered reads must be aligned"
        if kind == "eio":
            raise OSError(errno.EIO, "Input/output error")
        if kind == "end":
            return 0
        if kind == "short" and len(target) > 4096:
            return self._file.read(target[: len(target) // 8192 * 4096], offset)
        return self._file.read(target, offset)

    def size(self) -> int:
        return 100 if self._faults.kind == "end" else self._file.size()

    def close(self) -> None:
        self._file.close()


class Claiming(HostAllocator):
    """Host memory claimed in a ledger; the `refuse`-th call for some is refused (0: none)."""

    def __init__(self, refuse: int = 0) -> None:
        super().__init__()
        self.ledger, self.refuse, self.calls = Ledger(), refuse, 0
        self._claims: dict[int, Claim] = {}

    def reserve(self, nbytes: int, cuts: Sequence[int], purpose: str) -> Region:
        self.calls += 1
        if self.calls == self.refuse:
            raise StrataError(f"no memory for {purpose}", "this test refuses it", "cope with it")
        claim = self.ledger.take("ram", nbytes, purpose)
        region = super().reserve(nbytes, cuts, purpose)
        self._claims[region.address] = claim
        return region

    def release(self, region: Region) -> None:
        super().release(region)
        self._claims.pop(region.address).release()


def tiny(folder: Path, **changes: Any) -> Checkpoint:
    """A tiny GGUF model; its parts begin anywhere in their blocks."""
    path = folder / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(**{"experts": 6, "layers": 3, **changes}))
    return open_checkpoint(path)


def everything(checkpoint: Checkpoint) -> list[Expert]:
    experts = checkpoint.experts
    return [Expert(layer, i) for layer in experts.layouts for i in range(experts.count)]


def raw(checkpoint: Checkpoint, expert: Expert) -> tuple[bytes, ...]:
    """The expert's three parts, read plainly."""
    found = []
    for piece in checkpoint.experts.pieces(expert):
        with piece.file.open("rb") as file:
            file.seek(piece.offset)
            found.append(file.read(piece.nbytes))
    return tuple(found)


def seen(checkpoint: Checkpoint, expert: Expert, view: View) -> tuple[bytes, ...]:
    """The bytes that a view shows."""
    parts = checkpoint.experts.layouts[expert.layer].parts
    return tuple(
        bytes_at(address, part.nbytes).tobytes()
        for address, part in zip(view.parts, parts, strict=True)
    )


def make(
    checkpoint: Checkpoint,
    kept: int,
    *,
    allocator: HostAllocator | None = None,
    opener: Callable[[Path], DirectFile] = open_direct,
    ranking: Sequence[Expert] | None = None,
    excluded: Sequence[Expert] = (),
    degrade: Callable[[Degradation], None] = lambda _: None,
    **more: Any,
) -> TieredFile:
    """A source that keeps the first `kept` experts of its order."""
    experts = checkpoint.experts
    order = tier_order(ranking, frozenset(excluded), experts)
    placed = placings(experts)
    budget = sum(placed[expert].nbytes for expert in order[:kept])
    request = TierRequest(
        order=order, budget=budget, spares=more.pop("spares", 0), moving=bool(excluded)
    )
    reader = ExpertReader.open(checkpoint.files, degrade, opener=opener, threads=3)
    return TieredFile(experts, allocator or HostAllocator(), Silent(), reader, request, **more)
