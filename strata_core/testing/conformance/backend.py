"""The suite for backends: close to the reference, and exact where they say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.checkpoint.open import Checkpoint, open_checkpoint
from strata_core.errors import Degradation
from strata_core.interfaces import Backend, BackendContext, Executor, Limits, Source, Window
from strata_core.kernels.exact_kernels import EXACT_KERNELS, matrices
from strata_core.kernels.interpreter import Interpreter
from strata_core.kernels.reference_backend import ReferenceBackend
from strata_core.machine import read_machine
from strata_core.memory.host import HostAllocator
from strata_core.model.build import build_program
from strata_core.sources.arena import Arena
from strata_core.sources.mmap import MappedFile
from strata_core.testing.conformance.comparing import Logits, same_values
from strata_core.testing.conformance.memory import Silent
from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

IDS = (np.arange(20) * 37 % 290 + 3).astype(np.int32)


def window_of(ids: NDArray[np.int32], start: int, slot: int) -> Window:
    """Tokens of one sequence, all of whose logits are wanted."""
    count = len(ids)
    return Window(
        ids=ids,
        positions=np.arange(start, start + count, dtype=np.int32),
        slots=np.full(count, slot, np.int32),
        logits_rows=np.arange(count, dtype=np.int32),
        kernel_class="window",
    )


def run_in(executor: Executor, size: int) -> Logits:
    """The logits of IDS at every position, computed in windows of `size` tokens."""
    slot = executor.open_sequence()
    parts = [
        executor.run(window_of(IDS[at : at + size], at, slot)).copy()
        for at in range(0, len(IDS), size)
    ]
    executor.close_sequence(slot)
    return np.concatenate(parts)


class BackendSuite:
    """Subclass it and supply `make`; `checkpoint` to test with other models."""

    def make(self, context: BackendContext) -> Backend:
        """Build the backend under test."""
        raise NotImplementedError("a subclass of BackendSuite supplies make(context)")

    def checkpoint(self, folder: Path) -> Checkpoint:
        """A model, written into an empty folder: by default one in the hub layout."""
        write_tiny_hub(folder / "model", hyper=tiny_hyper(experts=6, top_k=3))
        return open_checkpoint(folder / "model")

    def options(self) -> dict[str, object]:
        """Settings to build with, by key; those not named have their defaults."""
        return {}

    @pytest.fixture
    def model(self, tmp_path: Path) -> Checkpoint:
        """The model that `checkpoint` wrote."""
        return self.checkpoint(tmp_path)

    @pytest.fixture
    def backend(self) -> Iterator[Backend]:
        """A built backend; it is closed afterwards."""
        from strata_core.config import resolve_arguments

        degradations: list[Degradation] = []
        context = BackendContext(
            machine=read_machine(),
            options={**resolve_arguments({}, {}).options(), **self.options()},
            degrade=degradations.append,
        )
        made = self.make(context)
        yield made
        made.close()

    def bind(self, backend: Backend, model: Checkpoint, source: Source | None = None) -> Executor:
        """The model's program bound with float32 keys and values where the backend has them."""
        kinds = backend.capabilities.kv_types
        limits = Limits(len(IDS), len(IDS), 64, "fp32" if "fp32" in kinds else kinds[0])
        return backend.bind(
            build_program(model.hyper),
            model,
            model.experts,
            source or MappedFile(model.experts),
            limits,
            Silent(),
        )

    def test_it_says_what_it_can(self, backend: Backend) -> None:
        """At least one KV type, and the same answer at every look."""
        assert backend.capabilities.kv_types, "a backend keeps keys and values as something"
        assert backend.capabilities == backend.capabilities, "capabilities change"

    def test_logits_are_close_to_the_references(self, backend: Backend, model: Checkpoint) -> None:
        """KL(reference || backend) of every position at most 1e-3, the same likeliest token."""
        with closing(self.bind(backend, model)) as executor:
            have = run_in(executor, len(IDS))
        with closing(self.bind(ReferenceBackend(), model)) as executor:
            want = run_in(executor, len(IDS))
        assert have.dtype == np.float32, f"logits are float32, not {have.dtype}"
        assert have.shape == want.shape, f"logits have the shape {have.shape}, not {want.shape}"
        worst = divergence(want, have)
        at = int(worst.argmax())
        assert worst[at] <= 1e-3, f"position {at} diverges from the reference by {worst[at]:.2g}"

    def test_rows_are_added_in_router_order(self, backend: Backend, model: Checkpoint) -> None:
        """An exact backend has every bit of the written arithmetic."""
        self.need_exact(backend)
        program = build_program(model.hyper)
        with closing(self.bind(backend, model)) as executor:
            have = run_in(executor, len(IDS))
            kv = "fp32" if "fp32" in backend.capabilities.kv_types else "fp16"
        limits = Limits(len(IDS), len(IDS), 64, kv)
        source = MappedFile(model.experts)
        dense: Any = matrices(program, model)
        exact = Interpreter(program, EXACT_KERNELS, dense, model.experts, source, limits)
        want = run_in(exact, len(IDS))
        same_values(have, want, "logits differ from the exact arithmetic")

    @pytest.mark.parametrize("size", [1, 2, 3, 8])
    def test_a_token_does_not_depend_on_its_window(
        self, backend: Backend, model: Checkpoint, size: int
    ) -> None:
        """Guarantee L: windows of any size give each token the bits it gets alone."""
        self.need_exact(backend)
        with closing(self.bind(backend, model)) as executor:
            whole = run_in(executor, len(IDS))
            parts = run_in(executor, size)
        same_values(parts, whole, f"windows of {size} tokens change bits")

    def test_a_token_does_not_depend_on_its_source(
        self, backend: Backend, model: Checkpoint
    ) -> None:
        """Guarantee P: the arena and the mapped file give the same bits."""
        self.need_exact(backend)
        allocator = HostAllocator()
        arena = Arena(model.experts, allocator, Silent())
        with closing(self.bind(backend, model, arena)) as executor:
            copied = run_in(executor, len(IDS))
        with closing(self.bind(backend, model)) as executor:
            mapped = run_in(executor, len(IDS))
        arena.close()
        allocator.close()
        same_values(copied, mapped, "the arena gives other bits than the file")

    def test_sequences_do_not_see_each_other(self, backend: Backend, model: Checkpoint) -> None:
        """Two in one window against each alone."""
        with closing(self.bind(backend, model)) as executor:
            alone = [run_in(executor, len(IDS))[:6]]
            slots = [executor.open_sequence() for _ in range(2)]
            ids = np.concatenate([IDS[:6], IDS[:6]])
            joined = Window(
                ids=ids,
                positions=np.tile(np.arange(6, dtype=np.int32), 2),
                slots=np.repeat(np.array(slots, np.int32), 6),
                logits_rows=np.arange(12, dtype=np.int32),
                kernel_class="window",
            )
            both = executor.run(joined).copy()
        for number, part in enumerate(np.split(both, 2)):
            assert np.allclose(part, alone[0], rtol=1e-4, atol=1e-4), (
                f"sequence {number} of two has other logits than alone"
            )

    def test_a_restored_sequence_goes_on_as_before(
        self, backend: Backend, model: Checkpoint
    ) -> None:
        """Save, run on, restore, run on again."""
        with closing(self.bind(backend, model)) as executor:
            slot = executor.open_sequence()
            executor.run(window_of(IDS[:7], 0, slot))
            snapshot = executor.save(slot, 7)
            first = executor.run(window_of(IDS[7:10], 7, slot)).copy()
            executor.run(window_of(IDS[3:9], 10, slot))
            executor.restore(slot, snapshot)
            again = executor.run(window_of(IDS[7:10], 7, slot)).copy()
            executor.close_sequence(slot)
        same_values(again, first, "a restored sequence goes on differently")

    def test_experts_are_counted(self, backend: Backend, model: Checkpoint) -> None:
        """As many as were asked for, by lane, with their bytes."""
        with closing(self.bind(backend, model)) as executor:
            run_in(executor, 1)
            served = executor.counters()
        asked = len(IDS) * model.hyper.top_k * len(model.experts.layouts)
        counted = sum(lane["experts"] for lane in served.values())
        assert counted == asked, f"{counted} experts are counted, {asked} were asked for"

    def test_closing_twice_is_harmless(self, backend: Backend) -> None:
        """The suite closes it a third time."""
        backend.close()
        backend.close()

    def need_exact(self, backend: Backend) -> None:
        """Skip where the backend does not claim to keep the written arithmetic."""
        if not backend.capabilities.exact:
            pytest.skip("the backend does not say that it is exact")


def divergence(want: Logits, have: Logits) -> NDArray[np.float64]:
    """KL(want || have) of each row of logits."""
    p, q = (_log_softmax(x.astype(np.float64)) for x in (want, have))
    result: NDArray[np.float64] = (np.exp(p) * (p - q)).sum(axis=-1)
    return result


def _log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    shifted = x - x.max(axis=-1, keepdims=True)
    result: NDArray[np.float64] = shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return result
