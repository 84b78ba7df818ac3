"""Ctrl-C in a prompt or between tokens, and memory that goes meanwhile: nothing is left behind."""

from __future__ import annotations

import threading

import pytest

from strata_core.engine.messages import Finished, PromptProgress, Token
from strata_core.errors import Refused

IDS = tuple((7 * n + 5) % 200 + 3 for n in range(200))
OPTIONS = {"expert_cache": 4, "prefill": 64, "max_context": 256}
MIB = 1 << 20


def left(backend) -> list[str]:
    runtime = backend.runtime
    claims = [str(claim) for claim in backend.ledger.outstanding()]
    return [*claims, *runtime.leaks(), *runtime.breaches, *([] if runtime.closed else ["open"])]


@pytest.mark.parametrize("kind", [PromptProgress, Token])
@pytest.mark.parametrize(
    "helpers",
    [
        {},
        {"sim_devices": 2, "expert_cache_device1": 2},
        {"source": "arena", "pcie_frac": 0.5, "dispatch": "doorbell"},
    ],
)
def test_ctrl_c_leaves_nothing(run, kind, helpers) -> None:
    seen = []
    before = threading.active_count()

    def during(model, backend):
        seen.append(backend)
        for event in model.generate(IDS, max_tokens=50, ignore_eos=True):
            if isinstance(event, kind):
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(during=during, **OPTIONS, **helpers)
    (backend,) = seen
    assert left(backend) == []
    assert threading.active_count() <= before


def eat(runtime) -> int:
    """All of the device's memory, without a refusal: its error would be the engine's as well."""
    return runtime.alloc(0, runtime.memory(0).free // 256 * 256)


def test_a_prompt_needs_no_memory_that_others_could_take_meanwhile(run) -> None:
    answers = []

    def during(model, backend):
        for hungry in (False, True):
            taken = 0
            for event in model.generate(IDS, max_tokens=6, ignore_eos=True):
                if hungry and isinstance(event, PromptProgress) and not taken:
                    taken = eat(backend.runtime)
                    assert backend.runtime.memory(0).free < MIB // 1024
                if isinstance(event, Finished):
                    answers.append((event.token_ids, event.first_logits_sha256))
            executor = model._running.executor
            if hungry:
                slots = [executor.open_sequence()]  # the one that the request gave back
                with pytest.raises(Refused, match="for the keys and values of 256 positions"):
                    executor.open_sequence()
                executor.close_sequence(slots[0])
                backend.runtime.free(0, taken)

    end = run(during=during, **OPTIONS)
    assert end.error is None
    assert answers[0] == answers[1]
    assert end.left() == []
