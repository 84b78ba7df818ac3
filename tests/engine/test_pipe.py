"""What can go wrong on a pipe: nobody is left waiting, and nobody else is hurt."""

from __future__ import annotations

from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread

import pytest

from strata_core.engine.loop import Engine
from strata_core.engine.messages import (
    AskStatus,
    Cancel,
    Event,
    Failed,
    Finished,
    Shutdown,
    Status,
    Stopped,
    Submit,
    encode,
)
from strata_core.engine.pipe import RemoteEngine, serve
from strata_core.interfaces import Limits
from strata_core.testing.arithmetic_executor import ArithmeticExecutor, continuation

WAIT = 120
"""Seconds after which something counts as hanging; nothing is waited for that long."""


def submit(name: str, n: int = 5) -> Submit:
    return Submit(request=name, prompt=(1, 2, 3), max_tokens=n)


def last_of(queue: SimpleQueue[Event]) -> Event:
    while not isinstance(event := queue.get(timeout=WAIT), Finished | Failed | Status | Stopped):
        pass
    return event


@pytest.fixture
def served() -> Iterator[tuple[RemoteEngine, Engine]]:
    here, there = Pipe()
    engine = Engine(
        executor=ArithmeticExecutor(),
        limits=Limits(tokens=16, logits=4, context=200, kv_type="fp32"),
        vocabulary=97,
        eos=frozenset(),
        tokenizer=None,
    )
    engine.start()
    server = Thread(target=serve, args=(engine, there))
    server.start()
    remote = RemoteEngine(here)
    remote.start()
    yield remote, engine
    remote.send(Shutdown(), lambda _event: None)
    assert remote.join(WAIT)
    server.join(WAIT)
    assert not server.is_alive()
    assert engine.join(WAIT)


def test_a_name_in_use_is_refused_and_the_first_goes_on(
    served: tuple[RemoteEngine, Engine],
) -> None:
    remote, _ = served
    first: SimpleQueue[Event] = SimpleQueue()
    second: SimpleQueue[Event] = SimpleQueue()
    remote.send(submit("a", 100), first.put)
    remote.send(submit("a"), second.put)
    refused = last_of(second)
    assert isinstance(refused, Failed)
    assert (refused.exit_code, "already there" in refused.what) == (2, True)
    finished = last_of(first)
    assert isinstance(finished, Finished)
    assert finished.token_ids == continuation((1, 2, 3), 100)


def test_a_sink_that_raises_hurts_nobody_else(served: tuple[RemoteEngine, Engine]) -> None:
    remote, _ = served

    def bad(_event: Event) -> None:
        raise RuntimeError("sink")

    queue: SimpleQueue[Event] = SimpleQueue()
    remote.send(AskStatus(), bad)
    remote.send(submit("bad"), bad)
    remote.send(submit("good"), queue.put)
    assert isinstance(last_of(queue), Finished)
    remote.send(AskStatus(), queue.put)
    assert isinstance(last_of(queue), Status)


@pytest.mark.parametrize(
    "junk", [None, 7, {"kind": "Cancel"}, {"kind": "Stopped"}, {"kind": "Nobody"}, b"x", []]
)
def test_what_is_no_command_ends_the_service(
    served: tuple[RemoteEngine, Engine], junk: object
) -> None:
    remote, engine = served
    queue: SimpleQueue[Event] = SimpleQueue()
    remote.connection.send(junk)
    assert remote.join(WAIT)
    assert engine.join(WAIT)
    for command in (submit("late"), AskStatus(), Shutdown()):
        remote.send(command, queue.put)
        assert isinstance(last_of(queue), Failed | Stopped)


def remote_to_nobody() -> tuple[RemoteEngine, Connection]:
    here, there = Pipe()
    remote = RemoteEngine(here)
    remote.start()
    return remote, there


def test_everybody_is_answered_when_the_engine_vanishes() -> None:
    remote, there = remote_to_nobody()
    queues = [SimpleQueue[Event]() for _ in range(3)]
    for command, queue in zip((submit("a"), AskStatus(), Shutdown()), queues, strict=True):
        remote.send(command, queue.put)
    remote.send(Cancel("a"), lambda _event: None)
    there.close()
    answers = [last_of(queue) for queue in queues]
    assert isinstance(answers[0], Failed)
    assert isinstance(answers[1], Stopped)
    assert isinstance(answers[2], Stopped)
    assert remote.join(WAIT)


@pytest.mark.parametrize("junk", [None, {"kind": "Token"}, encode(submit("x")), b"", [1]])
def test_junk_from_the_engine_leaves_nobody_waiting(junk: object) -> None:
    remote, there = remote_to_nobody()
    queue: SimpleQueue[Event] = SimpleQueue()
    remote.send(submit("a"), queue.put)
    there.send(junk)
    there.close()
    assert isinstance(last_of(queue), Failed)
    assert remote.join(WAIT)
