"""The engine's thread: many requests, cancelling, failures, and the same over a pipe."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from multiprocessing import Pipe
from queue import SimpleQueue
from threading import Event as Flag
from threading import Thread

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.engine.loop import Engine
from strata_core.engine.messages import (
    AskStatus,
    Cancel,
    Event,
    Failed,
    Finished,
    Logits,
    PromptProgress,
    Shutdown,
    Status,
    Stopped,
    Submit,
    Token,
    decode,
    encode,
)
from strata_core.engine.pipe import RemoteEngine, serve
from strata_core.errors import EngineError
from strata_core.interfaces import Limits, Window
from strata_core.sampler import Sampling
from strata_core.testing.arithmetic_executor import ArithmeticExecutor, continuation

LIMITS = Limits(tokens=16, logits=4, context=200, kv_type="fp32")
WAIT = 120
"""Seconds after which something counts as hanging; nothing is waited for that long."""


class Client:
    """Sends commands and collects events by request."""

    def __init__(self, engine: Engine | RemoteEngine) -> None:
        self.engine = engine
        self.queue: SimpleQueue[Event] = SimpleQueue()

    def send(self, command: object) -> None:
        self.engine.send(command, self.queue.put)

    def until(self, done: Callable[[Event], bool]) -> list[Event]:
        events = []
        while True:
            event = self.queue.get(timeout=WAIT)
            events.append(event)
            if done(event):
                return events

    def run(self, submit: Submit) -> list[Event]:
        self.send(submit)
        return self.until(lambda e: isinstance(e, Finished | Failed))


def make_engine(executor: ArithmeticExecutor, *, max_running: int = 4, eos: int = -1) -> Engine:
    return Engine(
        executor=executor,
        limits=LIMITS,
        vocabulary=97,
        eos=frozenset({eos}),
        tokenizer=None,
        max_running=max_running,
    )


@pytest.fixture(params=["in process", "pipe"])
def client(request: pytest.FixtureRequest) -> Iterator[Client]:
    engine = make_engine(ArithmeticExecutor())
    engine.start()
    front: Engine | RemoteEngine = engine
    server = None
    if request.param == "pipe":
        here, there = Pipe()
        server = Thread(target=serve, args=(engine, there))
        server.start()
        front = RemoteEngine(here)
        front.start()
    client = Client(front)
    yield client
    client.send(Shutdown())
    client.until(lambda e: isinstance(e, Stopped))
    assert front.join(WAIT)
    assert engine.join(WAIT)
    if server is not None:
        server.join(WAIT)
        assert not server.is_alive()


def submit(name: str, prompt: tuple[int, ...], n: int, **more: object) -> Submit:
    return Submit(request=name, prompt=prompt, max_tokens=n, **more)


@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 65, 150])
def test_a_request_is_prompt_progress_then_tokens_then_finished(
    client: Client, length: int
) -> None:
    prompt = tuple(i % 97 for i in range(length))
    events = client.run(submit("a", prompt, 9))
    progress = [e for e in events if isinstance(e, PromptProgress)]
    tokens = [e for e in events if isinstance(e, Token)]
    last = events[-1]
    assert isinstance(last, Finished)
    assert [p.done for p in progress] == [*range(16, length, 16), length]
    assert tuple(t.id for t in tokens) == last.token_ids == continuation(prompt, 9)
    assert [t.position for t in tokens] == list(range(length, length + 9))
    assert (last.reason, last.prompt_tokens, last.rounds) == ("length", length, 8)


def test_requests_share_rounds_without_mixing(client: Client) -> None:
    prompts = {f"r{i}": tuple(range(i + 1, 2 * i + 2)) for i in range(7)}
    for name, prompt in prompts.items():
        client.send(submit(name, prompt, 20))
    finished: dict[str, Finished] = {}
    while len(finished) < len(prompts):
        (event,) = client.until(lambda e: True)
        if isinstance(event, Finished):
            finished[event.request] = event
    for name, prompt in prompts.items():
        assert finished[name].token_ids == continuation(prompt, 20)


def test_prompt_logits_cover_every_position(client: Client) -> None:
    events = client.run(submit("a", tuple(range(11)), 0, logits="prompt"))
    chunks = [e for e in events if isinstance(e, Logits)]
    assert [c.start for c in chunks] == [0, 4, 8]
    rows = np.concatenate([c.logits for c in chunks])
    assert rows.shape == (11, 97)
    assert [int(r.argmax()) for r in rows] == [
        continuation(tuple(range(n)), 1)[0] for n in range(1, 12)
    ]


def test_first_logits_are_one_row(client: Client) -> None:
    events = client.run(submit("a", tuple(range(20)), 3, logits="first"))
    (chunk,) = [e for e in events if isinstance(e, Logits)]
    assert chunk.start == 19
    assert chunk.logits.shape == (1, 97)


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (submit("a", (), 1), "prompt is empty"),
        (submit("a", (97,), 1), "not in the vocabulary"),
        (submit("a", (-1,), 1), "not in the vocabulary"),
        (submit("a", (1,) * 201, 1), "too long"),
        (submit("a", (1,), -1), "-1 tokens"),
        (submit("a", (1,), 1, stop=("x",)), "--stop"),
    ],
)
def test_a_bad_request_fails_and_the_engine_goes_on(client: Client, bad: Submit, text: str) -> None:
    (event,) = client.run(bad)
    assert isinstance(event, Failed)
    assert text in event.what
    assert event.exit_code == 2
    assert isinstance(client.run(submit("b", (1, 2), 3))[-1], Finished)


def test_the_context_ends_a_request(client: Client) -> None:
    last = client.run(submit("a", (1,) * 198, 50))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "context"
    assert len(last.token_ids) == 3  # positions 198 and 199, and one that needs no state


def test_as_many_tokens_as_asked_is_not_the_contexts_end(client: Client) -> None:
    last = client.run(submit("a", (1,) * 198, 3))[-1]
    assert isinstance(last, Finished)
    assert last.reason == "length"


def test_status_is_answered(client: Client) -> None:
    client.run(submit("a", (1, 2, 3), 5))
    client.send(AskStatus())
    (status,) = client.until(lambda e: isinstance(e, Status))
    assert status.prompt_tokens == 3
    assert status.running == status.waiting == ()


def test_cancel_finishes_a_running_request() -> None:
    executor = ArithmeticExecutor()
    reached, go_on = Flag(), Flag()

    def hold(window: object) -> None:
        if len(executor.windows) == 3:
            reached.set()
            assert go_on.wait(WAIT)

    executor.before_run = hold
    engine = make_engine(executor, max_running=1)
    engine.start()
    client = Client(engine)
    client.send(submit("a", (1, 2), 1000))
    client.send(submit("b", (3,), 5))
    assert reached.wait(WAIT)
    client.send(Cancel("b"))
    client.send(Cancel("a"))
    go_on.set()
    ends = {}
    while len(ends) < 2:
        (event,) = client.until(lambda e: True)
        if isinstance(event, Finished):
            ends[event.request] = event
    assert ends["b"].reason == "cancelled"
    assert ends["b"].token_ids == ()
    assert ends["a"].reason == "cancelled"
    assert ends["a"].token_ids == continuation((1, 2), len(ends["a"].token_ids))
    assert executor.stored == {}
    client.send(Shutdown())
    assert engine.join(WAIT)


def test_end_of_text_ends_unless_ignored() -> None:
    eos = continuation((1, 2), 4)[3]
    engine = make_engine(ArithmeticExecutor(), eos=eos)
    engine.start()
    client = Client(engine)
    last = client.run(submit("a", (1, 2), 50))[-1]
    assert last.reason == "eos"
    assert last.token_ids == continuation((1, 2), 4)
    last = client.run(submit("b", (1, 2), 6, ignore_eos=True))[-1]
    assert last.token_ids == continuation((1, 2), 6)
    client.send(Shutdown())
    assert engine.join(WAIT)


def test_a_failing_round_fails_its_requests_and_frees_their_slots() -> None:
    executor = ArithmeticExecutor()

    def fail(_window: object) -> None:
        if len(executor.windows) == 2:
            executor.before_run = lambda _window: None
            raise RuntimeError("device fell off")

    executor.before_run = fail
    engine = make_engine(executor)
    engine.start()
    client = Client(engine)
    last = client.run(submit("a", (1, 2), 10))[-1]
    assert isinstance(last, Failed)
    assert "device fell off" in last.why
    assert "RuntimeError" in last.trace
    assert isinstance(last.as_error(), EngineError)
    assert executor.stored == {}
    assert isinstance(client.run(submit("b", (1, 2), 3))[-1], Finished)
    client.send(Shutdown())
    assert engine.join(WAIT)


def raising(_event: Event) -> None:
    raise RuntimeError("sink")


@pytest.mark.parametrize(
    "command", [AskStatus(), submit("bad", (1, 2), 9), submit("bad", (), 1), Cancel("nobody")]
)
def test_a_sink_that_raises_ends_its_own_request_alone(command: object) -> None:
    executor = ArithmeticExecutor()
    engine = make_engine(executor)
    engine.start()
    engine.send(command, raising)
    client = Client(engine)
    assert isinstance(client.run(submit("good", (1, 2), 9))[-1], Finished)
    client.send(AskStatus())
    (status,) = client.until(lambda e: isinstance(e, Status))
    assert status.running == status.waiting == ()
    assert executor.stored == {}
    engine.send(Shutdown(), raising)
    assert engine.join(WAIT)


def test_what_comes_behind_a_shutdown_is_answered() -> None:
    executor = ArithmeticExecutor()
    engine = make_engine(executor)
    client = Client(engine)
    first, second = SimpleQueue(), SimpleQueue()
    engine.send(Shutdown(), first.put)
    client.send(submit("late", (1,), 5))
    engine.send(Shutdown(), second.put)
    engine.start()
    (event,) = client.until(lambda e: isinstance(e, Failed))
    assert "stopped" in event.what
    assert isinstance(first.get(timeout=WAIT), Stopped)
    assert isinstance(second.get(timeout=WAIT), Stopped)
    assert engine.join(WAIT)
    assert executor.stored == {}


def test_bad_logits_fail_one_request_of_a_round() -> None:
    class Poisoned(ArithmeticExecutor):
        def run(self, window: Window) -> np.ndarray:
            out = super().run(window)
            out[window.slots[window.logits_rows] == 0] = np.nan
            return out

    engine = make_engine(Poisoned())
    client = Client(engine)
    client.send(submit("a", (1, 2), 9))
    client.send(submit("b", (3, 4), 9))
    engine.start()
    ends = {}
    while len(ends) < 2:
        (event,) = client.until(lambda e: True)
        if isinstance(event, Finished | Failed):
            ends[event.request] = event
    assert isinstance(ends["a"], Failed)
    assert "not finite" in ends["a"].what
    assert isinstance(ends["b"], Finished)
    assert ends["b"].token_ids == continuation((3, 4), 9)
    client.send(Shutdown())
    assert engine.join(WAIT)


def test_a_vanished_engine_fails_open_requests() -> None:
    here, there = Pipe()
    remote = RemoteEngine(here)
    remote.start()
    client = Client(remote)
    client.send(submit("a", (1,), 5))
    there.recv()
    there.close()
    (event,) = client.until(lambda e: True)
    assert isinstance(event, Failed)
    assert remote.join(WAIT)
    here.close()


def test_a_vanished_front_end_shuts_the_engine_down() -> None:
    here, there = Pipe()
    engine = make_engine(ArithmeticExecutor())
    engine.start()
    server = Thread(target=serve, args=(engine, there))
    server.start()
    here.close()
    server.join(WAIT)
    assert not server.is_alive()
    assert engine.join(WAIT)


SAMPLING = st.builds(
    Sampling,
    temperature=st.floats(0, 10),
    top_k=st.integers(0, 100),
    seed=st.integers(0, 2**64 - 1),
)
MESSAGES = st.one_of(
    st.builds(
        Submit,
        request=st.text(),
        prompt=st.lists(st.integers(0, 2**31 - 1)).map(tuple),
        max_tokens=st.integers(0, 10**6),
        sampling=SAMPLING,
        stop=st.lists(st.text(min_size=1)).map(tuple),
        ignore_eos=st.booleans(),
        logits=st.sampled_from(["none", "first", "prompt"]),
    ),
    st.builds(Cancel, st.text()),
    st.just(AskStatus()),
    st.just(Shutdown()),
    st.builds(PromptProgress, st.text(), st.integers(0), st.integers(0)),
    st.builds(Token, st.text(), st.integers(0), st.text(), st.integers(0)),
    st.just(Stopped()),
)


@given(MESSAGES)
def test_messages_survive_json(message: object) -> None:
    assert decode(json.loads(json.dumps(encode(message)))) == message


def test_logits_survive_json() -> None:
    rows = np.array([[1.5, -np.inf], [np.float32(1) / 3, 0]], np.float32)
    back = decode(json.loads(json.dumps(encode(Logits("a", 7, rows)))))
    assert isinstance(back, Logits)
    assert (back.request, back.start) == ("a", 7)
    assert np.array_equal(back.logits, rows)


@pytest.mark.parametrize("body", [{}, {"kind": "Nonsense"}, {"kind": "Cancel", "who": 1}])
def test_what_is_no_message_is_refused(body: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="message"):
        decode(body)
