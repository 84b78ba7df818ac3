"""Strata's side of a table: a process with the model loaded, driven over a pipe."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from typing import Any, Self

WORKER = Path(__file__).with_name("worker.py")


class Failed(Exception):
    """What went wrong in a process of a cell."""


class Strata:
    """A worker process; usable as a context manager, gone after it. One thread.

    `about` is what it said when the model was loaded. What it writes to its standard error goes to
    the file `log`.
    """

    def __init__(
        self,
        model: Path,
        options: dict[str, Any],
        environment: dict[str, str],
        log: Path,
        patience: float,
    ) -> None:
        self._patience, self._log = patience, log
        self.command = [sys.executable, str(WORKER), str(model), json.dumps(options)]
        self._errors = log.open("a")
        self._process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment,
        )
        self._lines: Queue[str] = Queue()
        Thread(target=self._read, daemon=True).start()
        try:
            self.about = self._answer()
        except Failed:
            self.close()
            raise

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _answer(self) -> dict[str, Any]:
        try:
            line = self._lines.get(timeout=self._patience)
        except Empty:
            raise Failed(f"Strata did not answer within {self._patience:g} s") from None
        if not line:
            said = self._log.read_text(errors="replace").strip().splitlines()
            raise Failed(f"Strata's process ended: {' '.join(said[-3:])[-400:]}")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Failed(f"Strata: {answer['error']}")
        return answer

    def ask(self, do: str, **more: Any) -> dict[str, Any]:
        """Have something done; its answer. Raises Failed."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # the answer that does not come tells why
            print(json.dumps({"do": do, **more}), file=self._process.stdin, flush=True)
        return self._answer()

    def run(self, kind: str, tokens: int, number: int, seed: int = 0) -> dict[str, Any]:
        """One run of a kind."""
        return self.ask("run", kind=kind, tokens=tokens, number=number, seed=seed)

    def close(self) -> None:
        """End the process: asked first, then made to."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
