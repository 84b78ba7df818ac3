"""The engine over a pipe: the same messages as dictionaries through a `Connection`.

`serve` runs beside the engine; `RemoteEngine` stands for it in the front end's process. Both ends
are a `multiprocessing.connection.Connection` or anything with its `send`, `recv` and `close`.
"""

from __future__ import annotations

from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Protocol, cast

from attrs import define, field

from strata_core.engine.loop import Engine
from strata_core.engine.messages import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Shutdown,
    Status,
    Stopped,
    Submit,
    decode,
    encode,
)
from strata_core.engine.request import Send
from strata_core.errors import EngineError


class Connection(Protocol):
    """One end of a duplex pipe that carries objects."""

    def send(self, obj: Any) -> None:
        """Send one object."""

    def recv(self) -> Any:
        """The next object; EOFError when the other end is gone."""

    def close(self) -> None:
        """Close this end."""


def serve(engine: Engine, connection: Connection) -> None:
    """Pass commands in and events out until `Shutdown`, or until the other end is gone.

    Blocks the calling thread. When the other end vanishes the engine is shut down too.
    """
    lock = Lock()

    def reply(event: Event) -> None:
        # A front end that is gone is noticed at the next receive, not here.
        with lock, suppress(OSError):
            connection.send(encode(event))

    command: Command = Shutdown()
    while True:
        try:
            command = cast("Command", decode(connection.recv()))
        except (EOFError, OSError):
            command = Shutdown()
        engine.send(command, reply)
        if isinstance(command, Shutdown):
            break
    engine.join()
    connection.close()


@define(eq=False)
class RemoteEngine:
    """The front end's side of a pipe to an engine; `send` is as `Engine.send`.

    Sinks are called on a thread of this object's own. When the engine's end vanishes, every open
    request fails with an EngineError.
    """

    connection: Connection
    _sinks: dict[str, Send] = field(factory=dict)
    _answers: list[Send] = field(factory=list)
    _lock: Lock = field(factory=Lock)
    _thread: Thread | None = None

    def start(self) -> None:
        """Begin passing events on."""
        self._thread = Thread(target=self._receive, name="strata-remote", daemon=True)
        self._thread.start()

    def send(self, command: Command, sink: Send) -> None:
        """Hand over a command; its events come to `sink`. OSError when the pipe is closed."""
        with self._lock:
            if isinstance(command, Submit):
                self._sinks[command.request] = sink
            elif not isinstance(command, Cancel):
                self._answers.append(sink)
            self.connection.send(encode(command))

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the engine has stopped; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _receive(self) -> None:
        while True:
            try:
                event = cast("Event", decode(self.connection.recv()))
            except (EOFError, OSError):
                self._fail_all()
                return
            self._pass_on(event)
            if isinstance(event, Stopped):
                self.connection.close()
                return

    def _pass_on(self, event: Event) -> None:
        with self._lock:
            if isinstance(event, Status | Stopped):
                sink = self._answers.pop(0)
            elif isinstance(event, Finished | Failed):
                sink = self._sinks.pop(event.request)
            else:
                sink = self._sinks[event.request]
        sink(event)

    def _fail_all(self) -> None:
        error = EngineError(
            "the engine's process has ended",
            "its end of the pipe was closed",
            "look at its log, and start it again",
        )
        with self._lock:
            sinks, self._sinks = self._sinks, {}
        for name, sink in sinks.items():
            sink(Failed.of(name, error))
