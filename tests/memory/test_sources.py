"""The sources on page-locked memory: bytes, reach of devices, budgets, and what is given back."""

from __future__ import annotations

from pathlib import Path

import pytest

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import StrataError
from strata_core.interfaces import Expert, SourceContext, StableSource
from strata_core.memory.address import address_of, bytes_at
from strata_core.memory.host import HostAllocator
from strata_core.memory.ledger import PINNED
from strata_core.plan.lending import lendable
from strata_core.plan.moving import slot_bytes
from strata_core.sources import arena, sliced_pinned
from strata_core.testing.machines import recorded_pc
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

PAGE = 4096
EXPERTS, LAYERS = 7, 4


class Silent:
    def start(self, label: str, nbytes: int) -> None: ...
    def advance(self, nbytes: int) -> None: ...
    def done(self) -> None: ...


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Checkpoint:
    path: Path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=EXPERTS, layers=LAYERS), expert_type="Q5_K")
    return open_checkpoint(path)


def context(checkpoint: Checkpoint, allocator, **more) -> SourceContext:
    options = {key: more.pop(key) for key in list(more) if key == "resident_budget_gib"}
    return SourceContext(
        machine=recorded_pc(),
        options=options,
        degrade=lambda item: None,
        experts=checkpoint.experts,
        allocator=allocator,
        progress=Silent(),
        **more,
    )


def everything(checkpoint: Checkpoint) -> list[Expert]:
    return [Expert(layer, i) for layer in checkpoint.experts.layouts for i in range(EXPERTS)]


def blob(checkpoint: Checkpoint, expert: Expert) -> bytes:
    return b"".join(
        piece.file.read_bytes()[piece.offset : piece.offset + piece.nbytes]
        for piece in checkpoint.experts.pieces(expert)
    )


def check(checkpoint: Checkpoint, source, runtime) -> dict[Expert, str]:
    """Every expert's bytes, and where they are: "dma", "ram" or "file". Aliases lead to them."""
    assert isinstance(source, StableSource)
    where = {}
    for expert in everything(checkpoint):
        view = source.view(expert)
        layout = checkpoint.experts.layouts[expert.layer]
        pairs = list(zip(view.parts, layout.parts, strict=True))
        seen = b"".join(bytes_at(at, part.nbytes).tobytes() for at, part in pairs)
        assert seen == blob(checkpoint, expert)
        assert tuple(source.addresses(expert.layer)[expert.index]) == view.parts
        if view.alias is not None:
            assert view.dma
            through = runtime.reach(0, view.alias, layout.nbytes)
            assert through.tobytes() == seen
        if not view.in_ram:
            mapped = checkpoint.experts.mapped(expert)
            assert view.parts == tuple(address_of(part) for part in mapped)
        where[expert] = "dma" if view.dma else "ram" if view.in_ram else "file"
        buffer = bytearray(layout.nbytes + 2 * PAGE)
        pad = source.read_into(expert, memoryview(buffer))
        assert bytes(buffer[pad : pad + layout.nbytes]) == seen
        source.release(expert)
    return where


PATHS = {
    "path 1": {"complement": "all"},
    "path 2": {"complement": "all", "refuse_one": True},
    "path 3": {"complement": 0},
    "mid-expert": {"complement": 400_000},
    "prefix": {"partial": True, "partial_most": 900_000},
    "pageable": {"complement": 0, "prepare": lambda s: setattr(s, "lock_most", 0)},
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("build", [arena.build, sliced_pinned.build])
def test_bytes_are_the_files_on_every_path(bench, checkpoint, path: str, build) -> None:
    b = bench(**PATHS[path])
    source = build(context(checkpoint, b.allocator))
    where = check(checkpoint, source, b.runtime)
    assert "file" not in where.values()
    if build is sliced_pinned.build:
        whole = {"path 1": 1, "path 2": 1, "path 3": 0, "pageable": 0}.get(path)
        if whole is not None:
            assert set(where.values()) == {"dma" if whole else "ram"}
        else:
            assert set(where.values()) == {"dma", "ram"}
    source.close()
    source.close()
    assert b.ledger.outstanding() == ()


@pytest.mark.parametrize("n", range(1, LAYERS + 1))
def test_a_refusal_leaves_later_layers_to_the_cpu(bench, checkpoint, n: int) -> None:
    b = bench(refuse={"register": n, "host_alloc": 1})
    source = sliced_pinned.build(context(checkpoint, b.allocator))
    where = check(checkpoint, source, b.runtime)
    layers = sorted(checkpoint.experts.layouts)
    dma = {expert.layer for expert, place in where.items() if place == "dma"}
    assert dma == set(layers[: n - 1]), "each layer is a slice, and no expert lies in two"
    source.close()


def test_prompts_borrow_no_more_than_the_plan_has_room_for(bench, checkpoint) -> None:
    excluded = frozenset(everything(checkpoint)[::3])
    kept = EXPERTS * LAYERS - len(excluded)
    each = slot_bytes(checkpoint.experts.layouts[0])
    for more in (0, 1, 2):
        b = bench()
        budget = (kept + more) * each
        source = sliced_pinned.build(
            context(checkpoint, b.allocator, excluded=excluded, budget=budget)
        )
        assert set(check(checkpoint, source, b.runtime).values()) == {"dma", "file"}
        assert len(source._arena.places._free) == more
        source.close()


def test_what_devices_hold_is_not_kept_twice(bench, checkpoint) -> None:
    b = bench()
    excluded = frozenset(everything(checkpoint)[::3])
    source = sliced_pinned.build(context(checkpoint, b.allocator, excluded=excluded))
    where = check(checkpoint, source, b.runtime)
    assert {expert for expert, place in where.items() if place == "file"} == excluded
    assert len(b.runtime.registered) == LAYERS + 1, "the last is for what prompts borrow"
    empty = source._arena.places._free
    assert len(empty) == lendable(len(excluded), EXPERTS * LAYERS, LAYERS) > 0
    source.close()
    nothing = sliced_pinned.build(
        context(checkpoint, b.allocator, excluded=frozenset(everything(checkpoint)))
    )
    assert b.ledger.used(PINNED) == 0, "where devices hold everything, nothing is lent"
    assert set(check(checkpoint, nothing, b.runtime).values()) == {"file"}
    nothing.close()


@pytest.mark.parametrize("count", [0, 1, 5, EXPERTS * LAYERS])
def test_a_budget_keeps_the_first_of_the_ranking(bench, checkpoint, count: int) -> None:
    b = bench()
    ranking = tuple(reversed(everything(checkpoint)))
    layout = checkpoint.experts.layouts[0]
    source = sliced_pinned.build(
        context(
            checkpoint,
            b.allocator,
            ranking=ranking,
            excluded=frozenset(ranking[1:2]),
            resident_budget_gib=(count * arena.stride(layout) + 1) / 2**30,
        )
    )
    where = check(checkpoint, source, b.runtime)
    wanted = [expert for expert in ranking if expert != ranking[1]][:count]
    assert [expert for expert in ranking if where[expert] == "dma"] == wanted
    source.close()


def test_without_a_ranking_a_budget_spreads_over_the_layers(bench, checkpoint) -> None:
    layout = checkpoint.experts.layouts[0]
    budget = LAYERS * arena.stride(layout) / 2**30
    source = sliced_pinned.build(context(checkpoint, HostAllocator(), resident_budget_gib=budget))
    where = check(checkpoint, source, None)
    assert {e for e, place in where.items() if place == "ram"} == {
        Expert(layer, 0) for layer in checkpoint.experts.layouts
    }
    source.close()


def test_a_source_that_fails_to_read_leaves_nothing(bench, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=EXPERTS, layers=LAYERS))
    checkpoint = open_checkpoint(path)
    piece = checkpoint.experts.pieces(Expert(2, 4))[2]
    with path.open("r+b") as file:
        file.truncate(piece.offset + piece.nbytes - 1)
    for build in (arena.build, sliced_pinned.build):
        b = bench()
        with pytest.raises(StrataError, match="of layer 2"):
            build(context(checkpoint, b.allocator))
        assert b.ledger.outstanding() == ()
