"""The engine over a pipe: the same messages as dictionaries through a `Connection`.

`serve` runs beside the engine; `RemoteEngine` stands for it in the front end's process. Both ends
are a `multiprocessing.connection.Connection` or anything with its `send`, `recv` and `close`.
"""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from threading import Lock, Thread
from typing import Any, Protocol

from attrs import define, field

from strata_core.engine.loop import Engine
from strata_core.engine.messages import (
    AskStatus,
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
from strata_core.errors import EngineError, UsageError

_COMMANDS = (Submit, Cancel, AskStatus, Shutdown)


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

    Blocks the calling thread. When the other end vanishes, or sends what is no command, the engine
    is shut down and the connection closed.
    """
    lock = Lock()

    def reply(event: Event) -> None:
        # A front end that is gone is noticed at the next receive, not here.
        with lock, suppress(OSError, ValueError):
            connection.send(encode(event))

    command: Command | None = None
    while not isinstance(command, Shutdown):
        command = _receive(connection) or Shutdown()
        engine.send(command, reply)
    engine.join()
    connection.close()


def _receive(connection: Connection) -> Command | None:
    """The next command; None when there will be none."""
    try:
        message = decode(connection.recv())
    except Exception:  # noqa: BLE001  what arrives is not ours; whatever it breaks, this ends
        return None
    return message if isinstance(message, _COMMANDS) else None


@define(eq=False)
class RemoteEngine:
    """The front end's side of a pipe to an engine; `send` is as `Engine.send`.

    Sinks are called on a thread of this object's own. When the engine's end vanishes, every open
    request fails with an EngineError, and who waits for the engine's stop is told that it stopped.
    """

    connection: Connection
    _sinks: dict[str, Send] = field(factory=dict)
    _statuses: deque[Send] = field(factory=deque)
    _stops: deque[Send] = field(factory=deque)
    _lock: Lock = field(factory=Lock)
    _gone: bool = False
    _thread: Thread | None = None

    def start(self) -> None:
        """Begin passing events on."""
        self._thread = Thread(target=self._run, name="strata-remote", daemon=True)
        self._thread.start()

    def send(self, command: Command, sink: Send) -> None:
        """Hand over a command; its events come to `sink`. Where the engine is gone, at once."""
        with self._lock:
            refused = self._refusal(command)
            if refused is None:
                self._note(command, sink)
                try:
                    self.connection.send(encode(command))
                except (OSError, ValueError):
                    # The receiving thread sees the same end and answers what was noted.
                    return
        if refused is not None:
            sink(refused)

    def _refusal(self, command: Command) -> Event | None:
        """The answer to a command that is not sent, else None."""
        if isinstance(command, Submit) and command.request in self._sinks:
            return Failed.of(
                command.request,
                UsageError(
                    f"request {command.request} is already there",
                    "the name tells a request's events from those of others",
                    "give every running request a name of its own",
                ),
            )
        if not self._gone:
            return None
        if isinstance(command, Submit):
            return Failed.of(command.request, _ended())
        return Stopped()

    def _note(self, command: Command, sink: Send) -> None:
        if isinstance(command, Submit):
            self._sinks[command.request] = sink
        elif isinstance(command, AskStatus):
            self._statuses.append(sink)
        elif isinstance(command, Shutdown):
            self._stops.append(sink)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the engine has stopped; whether it has."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # --- on this object's thread ---------------------------------------------------------------

    def _run(self) -> None:
        stopped = False
        while not stopped:
            try:
                event = decode(self.connection.recv())
            except Exception:  # noqa: BLE001  closed, or not ours: nothing more can be understood
                break
            stopped = isinstance(event, Stopped)
            if not stopped and not isinstance(event, _COMMANDS):
                self._pass_on(event)
        self._end()

    def _pass_on(self, event: Event) -> None:
        with self._lock:
            sink: Send | None
            if isinstance(event, Status):
                sink = self._statuses.popleft() if self._statuses else None
            elif isinstance(event, Finished | Failed):
                sink = self._sinks.pop(event.request, None)
            else:
                sink = self._sinks.get(getattr(event, "request", ""))
        if sink is not None:
            _deliver(sink, event)

    def _end(self) -> None:
        """Answer everybody who still waits, then let go of the pipe."""
        with self._lock:
            self._gone = True
            sinks = dict(self._sinks)
            waiting = [*self._statuses, *self._stops]
            self._sinks.clear()
            self._statuses.clear()
            self._stops.clear()
        for name, sink in sinks.items():
            _deliver(sink, Failed.of(name, _ended()))
        for sink in waiting:
            _deliver(sink, Stopped())
        self.connection.close()


def _deliver(sink: Send, event: Event) -> None:
    """Call a sink; one that raises is its owner's affair and must not silence the others."""
    with suppress(Exception):
        sink(event)


def _ended() -> EngineError:
    return EngineError(
        "the engine's process has ended",
        "its end of the pipe was closed",
        "look at its log, and start it again",
    )
