"""Nobody waits for ever: every request is answered, whatever is given and whatever breaks."""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread
from typing import Any

import pytest

import strata_core
from strata_core.engine.loop import Engine
from strata_core.engine.messages import AskStatus, Event, Failed, Finished, Shutdown, Status, Submit
from strata_core.errors import CheckpointError, EngineError, StrataError, UsageError
from strata_core.interfaces import Limits
from strata_core.testing.arithmetic_executor import ArithmeticExecutor

LIMITS = Limits(tokens=16, logits=4, context=200, kv_type="fp32")
WAIT = 120
"""Seconds after which something counts as hanging; nothing is waited for that long."""


def make_engine(executor: ArithmeticExecutor, **fields: Any) -> Engine:
    given = {
        "executor": executor,
        "limits": LIMITS,
        "vocabulary": 97,
        "eos": frozenset(),
        "tokenizer": None,
    }
    engine = Engine(**{**given, **fields})
    engine.start()
    return engine


def answer(engine: Engine, command: Any) -> Event:
    """The last event that a command is answered with."""
    queue: SimpleQueue[Event] = SimpleQueue()
    engine.send(command, queue.put)
    while True:
        event = queue.get(timeout=WAIT)
        if isinstance(event, Finished | Failed | Status):
            return event


def submit(name: str = "a", n: Any = 3, **fields: Any) -> Submit:
    return Submit(**{"request": name, "prompt": (1, 2), "max_tokens": n, **fields})


@pytest.fixture(scope="module")
def model() -> Iterator[strata_core.Model]:
    with strata_core.load("demo") as model:
        yield model


BAD_ARGUMENTS: list[dict[str, Any]] = [
    {"max_tokens": "5"},
    {"max_tokens": None},
    {"max_tokens": 2.5},
    {"max_tokens": -1},
    {"stop": [""]},
    {"stop": [1]},
    {"stop": [None]},
    {"stop": ["x" * 70_000]},
    {"temperature": "hot"},
    {"temperature": None},
    {"seed": 1.5},
    {"top_k": 2.5},
    {"prompt": ""},
    {"prompt": []},
    {"prompt": None},
    {"prompt": b"abc"},
    {"prompt": [1.5]},
    {"prompt": ["a"]},
    {"prompt": [2**70]},
    {"prompt": "\udcff"},
]


@pytest.mark.parametrize("bad", BAD_ARGUMENTS, ids=[str(bad)[:40] for bad in BAD_ARGUMENTS])
def test_a_bad_argument_is_a_usage_error_and_the_model_goes_on(
    model: strata_core.Model, bad: dict[str, Any]
) -> None:
    with pytest.raises(UsageError) as caught:
        list(model.generate(**{"prompt": "In the", "max_tokens": 2, **bad}))
    assert caught.value.what
    assert caught.value.why
    assert caught.value.remedy
    assert list(model.generate("In the", max_tokens=1))[-1].reason == "length"


def test_one_stop_text_may_be_given_as_it_is(model: strata_core.Model) -> None:
    one, listed = (
        list(model.generate("In the beginning", max_tokens=8, stop=stop))[-1].text
        for stop in (" of", [" of"])
    )
    assert one == listed


def test_what_comes_after_the_end_is_answered() -> None:
    engine = make_engine(ArithmeticExecutor())
    engine.send(Shutdown(), lambda _: None)
    assert engine.join(WAIT)
    failed = answer(engine, submit())
    assert isinstance(failed, Failed)
    assert "stopped" in failed.what
    assert isinstance(answer(engine, AskStatus()), Status)


def test_what_stands_behind_a_shutdown_in_the_queue_is_answered() -> None:
    executor = ArithmeticExecutor()
    reached, go_on = Flag(), Flag()

    def hold(_window: object) -> None:
        reached.set()
        assert go_on.wait(WAIT)

    executor.before_run = hold
    engine = make_engine(executor)
    engine.send(submit("a", 50), lambda _: None)
    assert reached.wait(WAIT)
    queue: SimpleQueue[Event] = SimpleQueue()
    engine.send(Shutdown(), lambda _: None)
    engine.send(submit("b"), queue.put)
    go_on.set()
    assert isinstance(queue.get(timeout=WAIT), Failed)
    assert engine.join(WAIT)


class Breaking(ArithmeticExecutor):
    """Raises `error` from one of its methods, once."""

    def __init__(self, method: str, error: BaseException) -> None:
        super().__init__()
        self._method, self._error = method, error

    def _break(self, method: str) -> None:
        if method == self._method:
            self._method = ""
            raise self._error

    def open_sequence(self) -> int:
        self._break("open_sequence")
        return super().open_sequence()

    def run(self, window: Any) -> Any:
        self._break("run")
        return super().run(window)

    def close_sequence(self, slot: int) -> None:
        self._break("close_sequence")
        super().close_sequence(slot)


@pytest.mark.parametrize("error", [RuntimeError("boom"), SystemExit(3), MemoryError()], ids=repr)
@pytest.mark.parametrize("method", ["open_sequence", "run", "close_sequence"])
def test_an_executor_that_breaks_fails_its_request(method: str, error: BaseException) -> None:
    engine = make_engine(Breaking(method, error))
    assert isinstance(answer(engine, submit("a")), Failed)
    # The next one is answered as well, even where the thread could not go on.
    assert isinstance(answer(engine, submit("b")), Finished | Failed)
    engine.send(Shutdown(), lambda _: None)
    assert engine.join(WAIT)


def test_a_generator_collected_on_the_engines_thread_does_not_wait_for_it() -> None:
    with strata_core.load("demo") as model:
        events = model.generate("In the", max_tokens=400)
        next(events)
        circle: list[Any] = [events]
        circle.append(circle)
        gc.disable()  # so that the circle is not collected here
        try:
            del circle, events
            collected = Flag()
            engine = model._running.engine

            def collect(_event: Event) -> None:
                gc.collect()
                collected.set()

            engine.send(AskStatus(), collect)
            assert collected.wait(WAIT)
        finally:
            gc.enable()
        assert list(model.generate("In the", max_tokens=1))[-1].reason == "length"


@pytest.mark.parametrize(
    "left",
    ["next(events)", "keep = events; next(events)", "next(events); del model", "del model, events"],
)
def test_a_program_ends_with_a_generator_half_consumed(left: str) -> None:
    program = (
        "import strata_core\n"
        "model = strata_core.load('demo')\n"
        "events = model.generate('In the', max_tokens=1000)\n"
        f"{left}\n"
        "print('end')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, timeout=240, check=False
    )
    assert (done.returncode, done.stdout.split(), done.stderr) == (0, [b"end"], b"")


def test_a_dropped_model_ends_its_thread() -> None:
    model = strata_core.load("demo")
    thread = model._running.engine._thread
    assert thread is not None
    del model
    gc.collect()
    thread.join(WAIT)
    assert not thread.is_alive()


def test_closing_while_another_thread_generates_ends_both() -> None:
    model = strata_core.load("demo")
    began = Flag()
    ends: list[object] = []

    def generate() -> None:
        try:
            events = model.generate("In the", max_tokens=1000)
            seen = [next(events)]
            began.set()
            seen += events
            ends.append(seen[-1])
        except StrataError as error:
            ends.append(error)

    threads = [Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    assert began.wait(WAIT)
    model.close()
    for thread in threads:
        thread.join(WAIT)
        assert not thread.is_alive()
    assert len(ends) == 3
    with pytest.raises(StrataError, match="closed"):
        next(model.generate("In the"))


@pytest.mark.parametrize(
    "error",
    [
        StrataError("a", "b", "c"),
        UsageError("a", "b", "c"),
        CheckpointError("a", "b", "c"),
        EngineError("a", "b", "c"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_keeps_its_class_through_the_engine(error: StrataError) -> None:
    back = Failed.of("r", error).as_error()
    assert type(back) is type(error)
    assert back.as_json() == error.as_json()
    assert back.exit_code == error.exit_code


def test_an_error_of_no_known_class_is_an_engine_error() -> None:
    class Own(UsageError):
        pass

    back = Failed.of("r", Own("a", "b", "c")).as_error()
    assert type(back) is EngineError
    assert back.exit_code == 2
