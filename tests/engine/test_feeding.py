"""What a request feeds and by which kernels: given continuations, --exact-prompt, the sampler."""

from __future__ import annotations

from queue import SimpleQueue
from typing import Any

import pytest

import strata_core
from strata_core.engine.loop import Engine
from strata_core.engine.messages import Event, Failed, Finished, Shutdown, Submit, decode, encode
from strata_core.interfaces import Limits
from strata_core.testing.arithmetic_executor import ArithmeticExecutor, continuation, follow

LIMITS = Limits(tokens=16, logits=4, context=200, kv_type="fp32")
PROMPT = (5, 7, 11)


def run(submit: Submit, **more: Any) -> tuple[ArithmeticExecutor, Finished | Failed]:
    """The executor after a request, and the request's last event."""
    executor = ArithmeticExecutor()
    engine = Engine(
        executor=executor,
        limits=LIMITS,
        vocabulary=97,
        eos=frozenset(),
        tokenizer=None,
        **more,
    )
    engine.start()
    events: SimpleQueue[Event] = SimpleQueue()
    engine.send(submit, events.put)
    while not isinstance(event := events.get(timeout=120), Finished | Failed):
        pass
    engine.send(Shutdown(), events.put)
    assert engine.join(120)
    return executor, event


def asked(tokens: int, **more: Any) -> Submit:
    return Submit(request="a", prompt=PROMPT, max_tokens=tokens, **more)


def fed(executor: ArithmeticExecutor) -> list[int]:
    return [int(i) for window in executor.windows for i in window.ids]


@pytest.mark.parametrize("given", [(), (1,), (1, 2, 3, 1)])
def test_a_given_continuation_is_fed_and_the_rest_is_drawn(given: tuple[int, ...]) -> None:
    executor, done = run(asked(5, continuation=given))
    assert isinstance(done, Finished)
    assert done.token_ids[: len(given)] == given
    ids = list(PROMPT + given)
    for _ in range(5 - len(given)):
        ids.append(follow(ids, 97))
    assert done.token_ids == tuple(ids[3:])
    assert fed(executor) == ids[:-1], "the last token is not fed"
    assert done.rounds == 4


def test_a_given_continuation_does_not_lengthen_a_request() -> None:
    executor, done = run(asked(2, continuation=(9, 8, 7, 6)))
    assert isinstance(done, Finished)
    assert done.token_ids == (9, 8)
    assert fed(executor) == [*PROMPT, 9]


@pytest.mark.parametrize("bad", [97, -1])
def test_an_id_outside_the_vocabulary_is_refused(bad: int) -> None:
    _, done = run(asked(3, continuation=(1, bad)))
    assert isinstance(done, Failed)
    assert f"token of the continuation 1 is {bad}" in done.what
    assert done.exit_code == 2


def test_a_continuation_travels() -> None:
    submit = asked(3, continuation=(4, 5))
    assert decode(encode(submit)) == submit


@pytest.mark.parametrize(
    ("length", "exact", "wanted"),
    [(64, False, "window"), (65, False, "prompt"), (65, True, "window"), (64, True, "window")],
)
def test_exact_prompt_gives_a_prompt_to_window_kernels(
    length: int, exact: bool, wanted: str
) -> None:
    submit = Submit(request="a", prompt=tuple(range(length)), max_tokens=3)
    executor, done = run(submit, exact_prompt=exact)
    assert isinstance(done, Finished)
    assert done.token_ids == continuation(submit.prompt, 3)
    classes = [window.kernel_class for window in executor.windows]
    chunks = -(-length // LIMITS.tokens)
    assert classes == [wanted] * chunks + ["window"] * 2


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_exact_prompt_changes_no_bit_on_the_cpu(backend: str) -> None:
    ids = [i * 37 % 4000 for i in range(70)]
    rows = []
    for exact in (False, True):
        with strata_core.load("demo", backend=backend, exact_prompt=exact) as model:
            rows.append(model.logits(ids).tobytes())
    assert rows[0] == rows[1]


def test_tokens_come_from_the_engines_sampler() -> None:
    calls = []

    def third(logits, sampling, history, position):
        calls.append((len(logits), list(history), position))
        return 3

    _, done = run(asked(2), sampler=third)
    assert isinstance(done, Finished)
    assert done.token_ids == (3, 3)
    assert calls == [(97, [5, 7, 11], 3), (97, [5, 7, 11, 3], 4)]


def test_a_loaded_model_draws_with_the_compiled_sampler() -> None:
    from strata_core.sampler import sample

    with strata_core.load("demo", max_context=64) as model:
        assert model._running.engine.sampler is not sample
        hot = {"max_tokens": 12, "temperature": 1.5, "top_k": 50, "seed": 5, "ignore_eos": True}
        drawn = [list(model.generate([1, 2, 3], **hot))[-1].token_ids for _ in range(2)]
        model._running.engine.sampler = sample
        plain = list(model.generate([1, 2, 3], **hot))[-1].token_ids
    assert drawn == [plain, plain]
    assert len(set(plain)) > 1
