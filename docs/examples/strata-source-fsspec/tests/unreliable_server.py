"""A real HTTP server with ranges, which can drop, delay, cut short, spoil and refuse answers."""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from attrs import define, field


@define(eq=False)
class Serving:
    """A running server. `faults` are used up one by one by requests with a range, in their order:

    "drop" closes the connection, "slow" waits until `patient` is set, "cut" sends half of the body
    it announced, "spoil" changes a byte, "short" answers with fewer bytes, "whole" ignores the
    range, a number is an HTTP status. `always` is the fault of every request for which there is no
    other.
    """

    url: str = ""
    faults: deque[object] = field(factory=deque)
    always: object = None
    patient: threading.Event = field(factory=threading.Event)
    ranges: list[tuple[int, int]] = field(factory=list)
    lock: threading.Lock = field(factory=threading.Lock)

    def next_fault(self) -> object:
        with self.lock:
            return self.faults.popleft() if self.faults else self.always


def handler(folder: Path, state: Serving) -> type[BaseHTTPRequestHandler]:
    """The class that answers requests for the files of a folder."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def do_GET(self) -> None:
            self._answer(body=True)

        def _answer(self, *, body: bool) -> None:
            file = folder / Path(self.path).name
            if not file.is_file():
                self.send_error(404)
                return
            size = file.stat().st_size
            found = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            start, end = (int(found[1]), int(found[2]) + 1) if found else (0, size)
            fault = None
            if found and body:
                state.ranges.append((start, end))
                fault = state.next_fault()
            if isinstance(fault, int):
                self.send_error(fault)
                return
            if fault == "drop":
                self.close_connection = True
                self.connection.close()
                return
            if fault == "slow":
                state.patient.wait(600)
            if fault == "whole":
                start, end, found = 0, size, None
            self._send(_bytes(file, start, end, fault), start, size, bool(found), body, fault)

        def _send(
            self, data: bytes, start: int, size: int, partial: bool, body: bool, fault: object
        ) -> None:
            self.send_response(206 if partial else 200)
            self.send_header("Accept-Ranges", "bytes")
            self.send_header("Content-Length", str(len(data)))
            if partial:
                self.send_header("Content-Range", f"bytes {start}-{start + len(data) - 1}/{size}")
            self.end_headers()
            if body:
                self.wfile.write(data[: len(data) // 2] if fault == "cut" else data)
            if fault == "cut":
                self.wfile.flush()
                self.close_connection = True

    return Handler


def _bytes(file: Path, start: int, end: int, fault: object) -> bytes:
    with file.open("rb") as stream:
        stream.seek(start)
        data = bytearray(stream.read(end - start))
    if fault == "spoil":
        data[len(data) // 2] ^= 1
    return bytes(data[:-1] if fault == "short" else data)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request, client_address) -> None:
        """A client that went away, or a connection that was dropped, is no news here."""


@contextmanager
def serving(folder: Path) -> Iterator[Serving]:
    """Serve the files of a folder on a free port of this computer."""
    state = Serving()
    server = _Server(("127.0.0.1", 0), handler(folder, state))
    state.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield state
    finally:
        state.patient.set()
        server.shutdown()
        server.server_close()
        thread.join()
