"""The suite for expert sources."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from attrs import define

from strata_core.abilities import PartlyStableSource
from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import Degradation, StrataError
from strata_core.interfaces import Expert, Source, SourceContext, StableSource, View
from strata_core.machine import read_machine
from strata_core.memory.address import bytes_at
from strata_core.testing.conformance.adaptive_source import AdaptiveSourceTests
from strata_core.testing.conformance.comparing import same_bytes
from strata_core.testing.conformance.memory import Silent, WatchedAllocator
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

PAGE = 4096


@define(eq=False)
class Case:
    """A built source with everything that it was built from."""

    source: Source
    checkpoint: Checkpoint
    allocator: WatchedAllocator
    degradations: list[Degradation]

    def experts(self) -> list[Expert]:
        """Every routed expert of the model."""
        files = self.checkpoint.experts
        return [Expert(layer, i) for layer in files.layouts for i in range(files.count)]

    def picks(self, layer: int) -> list[Expert]:
        """A few experts of a layer, not in ascending order."""
        count = self.checkpoint.experts.count
        return [Expert(layer, (layer - i) % count) for i in range(min(4, count))]

    def acquire(self, experts: list[Expert]) -> list[View]:
        """Announce and acquire experts of one layer, as the engine does."""
        self.source.begin_layer(experts[0].layer, [e.index for e in experts])
        return [self.source.view(e) for e in experts]

    def blob_size(self, expert: Expert) -> int:
        """Bytes of an expert's blob."""
        return self.checkpoint.experts.layouts[expert.layer].nbytes


class SourceSuite(AdaptiveSourceTests):
    """Subclass it and supply `make`; `raw` and `checkpoint` where the defaults do not serve."""

    # what a subclass supplies

    def make(self, context: SourceContext) -> Source:
        """Build the source under test."""
        raise NotImplementedError("a subclass of SourceSuite supplies make(context)")

    def checkpoint(self, folder: Path) -> Checkpoint:
        """The model to serve, written into an empty folder: by default one in the hub layout."""
        hyper = tiny_hyper(experts=7, layers=3, hidden=96, expert_ffn=64, head_dim=24)
        write_tiny_hub(folder / "model", hyper=hyper)
        return open_checkpoint(folder / "model")

    def raw(self, checkpoint: Checkpoint, expert: Expert) -> bytes:
        """An expert's blob, read past the source: by default from the model's own files."""
        blob = bytearray(checkpoint.experts.layouts[expert.layer].nbytes)
        layout = checkpoint.experts.layouts[expert.layer]
        for part, piece in zip(layout.parts, checkpoint.experts.pieces(expert), strict=True):
            with piece.file.open("rb") as file:
                file.seek(piece.offset)
                blob[part.offset : part.offset + part.nbytes] = file.read(piece.nbytes)
        return bytes(blob)

    def options(self) -> dict[str, object]:
        """Settings to build with, by key; those not named have their defaults."""
        return {}

    # fixtures

    @pytest.fixture
    def model(self, tmp_path: Path) -> Checkpoint:
        """The model that `checkpoint` wrote."""
        return self.checkpoint(tmp_path)

    @pytest.fixture
    def case(self, model: Checkpoint) -> Iterator[Case]:
        """A built source; it is closed afterwards."""
        case = self.build(model)
        yield case
        case.source.close()
        case.allocator.close()

    def build(
        self,
        model: Checkpoint,
        *,
        refuse: int | None = None,
        pinned: bool = True,
        excluded: frozenset[Expert] = frozenset(),
    ) -> Case:
        """Build a source with an allocator of its own, closed again where that fails.

        Devices hold the experts that are `excluded`.
        """
        from strata_core.config import resolve_arguments

        allocator = WatchedAllocator(refuse=refuse, pinned=pinned)
        degradations: list[Degradation] = []
        options = {**resolve_arguments({}, {}).options(), **self.options()}
        context = SourceContext(
            machine=read_machine(),
            options=options,
            degrade=degradations.append,
            experts=model.experts,
            allocator=allocator,
            progress=Silent(),
            excluded=excluded,
        )
        try:
            source = self.make(context)
        except BaseException:
            left = list(allocator.outstanding.values())
            assert not left, f"a failed build kept {[r.purpose for r in left]}"
            raise
        return Case(source, model, allocator, degradations)

    def compare(self, case: Case, expert: Expert, view: View, when: str) -> None:
        """The bytes behind a view against the file's."""
        blob = self.raw(case.checkpoint, expert)
        layout = case.checkpoint.experts.layouts[expert.layer]
        for part, address in zip(layout.parts, view.parts, strict=True):
            have = bytes_at(address, part.nbytes)
            want = blob[part.offset : part.offset + part.nbytes]
            same_bytes(have, want, f"{part.name} of {expert} has wrong bytes {when}")

    # views

    def test_a_view_has_the_files_bytes(self, case: Case) -> None:
        """Every expert, asked for one by one."""
        for expert in case.experts():
            (view,) = case.acquire([expert])
            self.compare(case, expert, view, "in a view")
            case.source.release(expert)

    def test_experts_of_a_layer_hold_their_bytes_together(self, case: Case) -> None:
        """No address is used again before its release."""
        for layer in case.checkpoint.experts.layouts:
            picks = case.picks(layer)
            views = case.acquire(picks)
            for expert, view in zip(picks, views, strict=True):
                self.compare(case, expert, view, "while others of its layer are held")
            for expert in picks:
                case.source.release(expert)

    def test_a_held_expert_outlives_other_layers(self, case: Case) -> None:
        """What is held stays as it is while the round goes through other layers."""
        layers = list(case.checkpoint.experts.layouts)
        held = case.picks(layers[0])[0]
        (view,) = case.acquire([held])
        for layer in [*layers[1:], *layers]:
            others = [e for e in case.picks(layer) if e != held]
            case.acquire(others)
            for expert in others:
                case.source.release(expert)
        if view.stable:
            self.compare(case, held, view, "after other layers were served")
        case.source.release(held)

    def test_acquiring_twice_needs_two_releases(self, case: Case) -> None:
        """A second `view` counts."""
        expert = case.experts()[0]
        (first,) = case.acquire([expert])
        second = case.source.view(expert)
        case.source.release(expert)
        for other in case.picks(expert.layer)[1:]:
            case.acquire([other])
            case.source.release(other)
        self.compare(case, expert, second, "after the first of two releases")
        assert first.parts == second.parts, "an expert that is held moved at its second view"
        case.source.release(expert)

    def test_experts_need_not_be_announced(self, case: Case) -> None:
        """`begin_layer` is a hint, its experts need not be asked for, nor those asked for named."""
        layer = next(iter(case.checkpoint.experts.layouts))
        case.source.begin_layer(layer, [0])
        expert = Expert(layer, case.checkpoint.experts.count - 1)
        view = case.source.view(expert)
        self.compare(case, expert, view, "without having been announced")
        case.source.release(expert)

    def test_an_unknown_expert_is_refused_by_name(self, case: Case) -> None:
        """And the source goes on."""
        layer = next(iter(case.checkpoint.experts.layouts))
        unknown = Expert(layer, case.checkpoint.experts.count)
        with pytest.raises(StrataError) as caught:
            case.source.view(unknown)
        assert str(unknown.index) in str(caught.value), "the error does not name the expert"
        expert = case.experts()[0]
        self.compare(case, expert, case.source.view(expert), "after a refused view")
        case.source.release(expert)

    # copies

    def test_a_copy_has_the_files_bytes_behind_its_pad(self, case: Case) -> None:
        """Into buffers that are aligned and buffers that are not."""
        for number, expert in enumerate(case.experts()):
            size = case.blob_size(expert)
            room = -(-size // PAGE) * PAGE + PAGE
            whole = np.full(room + PAGE, 0xA5, np.uint8)
            start = (-whole.ctypes.data) % PAGE + (number % 3) * 8
            buffer = whole[start : start + room]
            pad = case.source.read_into(expert, buffer.data)
            assert 0 <= pad <= room - size, f"pad {pad} of {expert} leaves no room for the blob"
            have = buffer[pad : pad + size]
            same_bytes(have, self.raw(case.checkpoint, expert), f"a copy of {expert} is wrong")
            outside = np.concatenate([whole[:start], whole[start + room :]])
            assert (outside == 0xA5).all(), f"a copy of {expert} was written beside its buffer"

    def test_copies_from_many_threads_are_right(self, case: Case) -> None:
        """`read_into` is called by any thread at any time."""
        wanted = case.experts() * 4
        begin = threading.Barrier(4)

        def copy(number: int) -> list[Expert]:
            wrong = []
            begin.wait()
            for expert in wanted[number::4]:
                size = case.blob_size(expert)
                buffer = bytearray(-(-size // PAGE) * PAGE + PAGE)
                pad = case.source.read_into(expert, memoryview(buffer))
                if bytes(buffer[pad : pad + size]) != self.raw(case.checkpoint, expert):
                    wrong.append(expert)
            return wrong

        with ThreadPoolExecutor(4) as pool:
            wrong = [e for part in pool.map(copy, range(4)) for e in part]
        assert not wrong, f"copies made at the same time are wrong: {', '.join(map(str, wrong))}"

    # memory

    def test_addresses_hold_until_close(self, case: Case) -> None:
        """Of a source that says that its experts never move."""
        if not isinstance(case.source, StableSource):
            pytest.skip("the source has no `addresses`: its experts may move")
        files = case.checkpoint.experts
        for layer, layout in files.layouts.items():
            table = case.source.addresses(layer)
            assert table.shape == (files.count, 3), "addresses are [experts, 3]"
            assert table.dtype == np.uint64, "addresses are uint64"
            for index in range(files.count):
                expert = Expert(layer, index)
                gate, up, down = (int(address) for address in table[index])
                view = View((gate, up, down), in_ram=True)
                self.compare(case, expert, view, "at its stable address")
            case.acquire(case.picks(layer))
            assert (case.source.addresses(layer) == table).all(), "stable addresses moved"
            assert layout.nbytes > 0

    def test_published_addresses_hold_while_their_version_does(self, case: Case) -> None:
        """Of a source that says of some experts where they are from one round to the next."""
        if not isinstance(case.source, PartlyStableSource):
            pytest.skip("the source publishes no addresses of some of its experts")
        files, version = case.checkpoint.experts, case.source.stable_version
        for layer in files.layouts:
            table = case.source.stable_addresses(layer)
            assert table.shape == (files.count, 3), "addresses are [experts, 3]"
            assert table.dtype == np.uint64, "addresses are uint64"
            published = table.all(axis=1)
            assert (published == table.any(axis=1)).all(), "an expert has three addresses or none"
            case.acquire(case.picks(layer))
            assert case.source.stable_version == version, "addresses change between rounds only"
            assert (case.source.stable_addresses(layer) == table).all(), "published addresses moved"
            for index in np.flatnonzero(published).tolist():
                gate, up, down = (int(address) for address in table[index])
                view = View((gate, up, down), in_ram=True)
                self.compare(case, Expert(layer, index), view, "at its published address")
            for expert in case.picks(layer):
                case.source.release(expert)

    def test_an_alias_lies_in_one_span(self, case: Case) -> None:
        """A blob that two registrations share has no alias, and no DMA may read it."""
        spans = [s for region in case.allocator.given for s in region.spans]
        for expert in case.experts():
            (view,) = case.acquire([expert])
            parts = case.checkpoint.experts.layouts[expert.layer].parts
            first = min(view.parts)
            last = max(at + part.nbytes for at, part in zip(view.parts, parts, strict=True))
            home = [s for s in spans if s.address <= first and last <= s.address + s.nbytes]
            if view.alias is not None:
                assert home, f"{expert} has an alias, but no single span holds it whole"
                alias = (home[0].alias or 0) - home[0].address + view.parts[0]
                assert view.alias == alias, f"the alias of {expert} is another span's"
            if view.dma:
                assert any(s.pinned for s in home), (
                    f"{expert} is said to be readable by DMA, but no page-locked piece holds it"
                )
            case.source.release(expert)

    def test_everything_is_given_back(self, model: Checkpoint) -> None:
        """After `close`, which may be called twice, nothing is held and nothing is served."""
        case = self.build(model)
        expert = case.experts()[0]
        case.acquire([expert])
        case.source.release(expert)
        case.source.close()
        left = [r.purpose for r in case.allocator.outstanding.values()]
        assert not left, f"a closed source keeps {left}"
        case.source.close()
        case.allocator.close()

    def test_nothing_leaks_where_memory_is_refused(self, model: Checkpoint) -> None:
        """Each `reserve` refused in turn: a StrataError or a source that works, and no leak."""
        counted = self.build(model)
        calls = counted.allocator.calls
        counted.source.close()
        counted.allocator.close()
        for number in range(1, calls + 1):
            try:
                case = self.build(model, refuse=number)
            except StrataError:
                continue
            expert = case.experts()[0]
            self.compare(case, expert, case.acquire([expert])[0], "after a refused reserve")
            case.source.release(expert)
            case.source.close()
            left = [r.purpose for r in case.allocator.outstanding.values()]
            assert not left, f"after a refused reserve a closed source keeps {left}"

    def test_it_works_without_pinned_memory(self, model: Checkpoint) -> None:
        """Pageable memory: right bytes, no alias, no DMA."""
        case = self.build(model, pinned=False)
        for expert in case.experts():
            (view,) = case.acquire([expert])
            self.compare(case, expert, view, "in pageable memory")
            assert view.alias is None, f"{expert} has an alias in memory that nobody registered"
            case.source.release(expert)
        case.source.close()
        case.allocator.close()

    def test_any_order_of_calls_is_served(self, model: Checkpoint) -> None:
        """A state machine over acquire, announce, copy and release."""
        from strata_core.testing.conformance.source_machine import run_machine

        run_machine(self, model)
