"""How a run ends early: Ctrl-C, a reader that goes away, an output that is full."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from strata_core.cli.progress import TerminalProgress
from strata_core.cli.request import Request
from strata_core.engine.messages import Event, Finished, PromptProgress, Token
from strata_core.sampler import Sampling

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX signals and pipes")

LONG = ("generate", "demo", "In the beginning", "-n", "2000", "--ignore-eos")


def stop(child) -> tuple[bytes, bytes]:
    child.send_signal(signal.SIGINT)
    return child.communicate(timeout=240)


HELD = """
import os, threading, time
from pathlib import Path
from strata_core.cli.entry import run
from strata_core.cli.request import Request
from strata_core.kernels.cpu.executor import CpuExecutor

held, go_on = Path(os.environ["HELD"]), threading.Event()
rounds, compute, take = [], CpuExecutor.run, Request._take

def late(executor, window):
    rounds.append(window)
    if len(rounds) > 9:
        go_on.wait()
    return compute(executor, window)

def taken(request, *event):
    take(request, *event)
    if len(request.token_ids) == 8 and not go_on.is_set():
        try:
            held.touch()
            while held.exists():
                time.sleep(0.01)
        finally:
            go_on.set()

CpuExecutor.run, Request._take = late, taken
run()
"""
"""The command, which stops where it has shown eight tokens, its engine in the tenth round.

It goes on once it is interrupted or the file is gone: however fast either is, it is there when the
test comes to it. The engine runs beside what shows its tokens: rounds would say nothing of those.
"""


@pytest.fixture
def at_eight(process, tmp_path: Path):
    """The command at LONG, held at eight tokens, and the file without which it goes on."""

    def start(*args: str):
        file = tmp_path / "held"
        child = process(*LONG, *args, program=HELD, env={"HELD": str(file)})
        while not file.exists():
            assert child.poll() is None, child.communicate()
            time.sleep(0.01)
        return child, file

    return start


def test_ctrl_c_prints_what_there_is(at_eight) -> None:
    child, _ = at_eight()
    first = child.stdout.read(20)
    rest, err = stop(child)
    assert child.returncode == 130
    assert len(first) == 20
    assert (first + rest).endswith(b"\n")
    assert b"interrupted after 8 tokens" in err
    assert b"Traceback" not in err


def test_ctrl_c_leaves_one_document(at_eight) -> None:
    child, _ = at_eight("--json")
    out, err = stop(child)
    assert child.returncode == 130
    assert err == b""
    document = json.loads(out)
    assert document["reason"] == "cancelled"
    assert len(document["token_ids"]) == 8


def test_closed_pipe_ends_quietly(at_eight) -> None:
    child, file = at_eight()
    assert len(child.stdout.read(5)) == 5
    child.stdout.close()
    file.unlink()
    child.wait(timeout=240)
    assert child.stderr.read() == b""
    assert child.returncode == 0


def test_pipe_closed_before_anything(process) -> None:
    child = process("plugins")
    child.stdout.close()
    child.wait(timeout=240)
    assert child.stderr.read() == b""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full here")
def test_full_output_is_an_error(process) -> None:
    with Path("/dev/full").open("wb") as full:
        child = process("plugins", stdout=full)
        _, err = child.communicate(timeout=240)
    assert child.returncode == 1
    assert len(err.splitlines()) == 3
    assert b"the output cannot be written" in err


@pytest.mark.parametrize(
    ("command", "code", "says"),
    [
        ("generate demo x -n 1 <&-", 0, b"loaded in"),
        ("generate demo <&-", 2, b"PROMPT is missing"),
        ("generate demo - <&-", 2, b"stdin is closed"),
        ("chat demo --raw <&-", 0, b""),
        ("plugins >&-", 1, b"stdout is closed"),
        ("generate demo x -n 1 --json >&-", 1, b""),
        ("generate demo x -n 1 2>&-", 0, b""),
        ("generate demo 2>&-", 2, b""),
    ],
)
def test_streams_that_are_closed(command: str, code: int, says: bytes) -> None:
    done = subprocess.run(
        ["bash", "-c", f"exec {shlex.quote(sys.executable)} -m strata_core {command}"],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        stdin=subprocess.DEVNULL if "<" in command else None,
        capture_output=True,
    )
    assert done.returncode == code, done.stderr
    assert says in done.stderr
    assert b"Traceback" not in done.stderr


# --- the request itself ------------------------------------------------------------------------


def token(number: int, text: str) -> Token:
    return Token("r", number, text, number)


class Events:
    """Test double of a generation: yields events, or raises one that is an exception."""

    def __init__(self, *events: object) -> None:
        self.events = iter(events)
        self.closed = False

    def __iter__(self) -> Iterator[Event]:
        return self

    def __next__(self) -> Event:
        event = next(self.events)
        if isinstance(event, int):
            signal.raise_signal(event)
        if isinstance(event, BaseException):
            raise event
        return event

    def close(self) -> None:
        self.closed = True


def request() -> Request:
    return Request(8, Sampling(), (), ignore_eos=False)


def finished(text: str) -> Finished:
    return Finished(
        request="r", reason="length", text=text, token_ids=(1, 2), prompt_tokens=3,
        first_logits_sha256="", prompt_s=1.0, decode_s=1.0, rounds=1,
    )  # fmt: skip


@pytest.fixture
def _handler() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_handler")
def test_first_interrupt_cancels_and_the_next_kills() -> None:
    shown: list[tuple[int | None, str]] = []
    events = Events(PromptProgress("r", 1, 3), token(1, "a"), signal.SIGINT, token(2, "b"))
    asked = request()
    asked.follow(events, lambda *pair: shown.append(pair), TerminalProgress(shown=False))
    assert asked.interrupted
    assert events.closed
    assert (asked.token_ids, asked.answer) == ([1], "a")
    assert signal.getsignal(signal.SIGINT) is signal.SIG_DFL


@pytest.mark.usefixtures("_handler")
@pytest.mark.parametrize("end", [finished("ab"), RuntimeError("lost")])
def test_the_handler_is_put_back(end) -> None:
    before = signal.getsignal(signal.SIGINT)
    events = Events(token(1, "a"), end)
    asked = request()
    if isinstance(end, RuntimeError):
        with pytest.raises(RuntimeError, match="lost"):
            asked.follow(events, lambda *_: None, TerminalProgress(shown=False))
    else:
        asked.follow(events, lambda *_: None, TerminalProgress(shown=False))
    assert events.closed
    assert signal.getsignal(signal.SIGINT) is before


def test_text_held_back_is_shown_at_the_end() -> None:
    shown: list[tuple[int | None, str]] = []
    events = Events(token(1, "a"), token(2, ""), finished("ab"))
    asked = request()
    asked.follow(events, lambda *pair: shown.append(pair), TerminalProgress(shown=False))
    assert shown == [(1, "a"), (2, ""), (None, "b")]
    assert asked.answer == "ab"


def test_an_ignored_ctrl_c_stays_ignored() -> None:
    ignore = "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    ignore += "os.execv(sys.executable, [sys.executable, '-m', 'strata_core', *sys.argv[1:]])"
    call = ("generate", "demo", "In the", "-n", "40", "--ignore-eos", "-q")
    child = subprocess.Popen(
        [sys.executable, "-c", ignore, *call], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    first = child.stdout.read(2)
    rest, err = stop(child)
    assert (child.returncode, err) == (0, b"")
    assert len(first + rest) > 40


EARLY = """
import sys

class Interrupt:
    def find_spec(self, name, path=None, target=None):
        if name == "click":
            raise KeyboardInterrupt
        return None

sys.meta_path.insert(0, Interrupt())
from strata_core.cli.entry import run
run()
"""


@pytest.mark.parametrize("args", [(), ("--json",), ("--", "--json")])
def test_ctrl_c_while_the_command_is_imported(args: tuple[str, ...]) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EARLY, "generate", "demo", "x", *args], capture_output=True
    )
    assert done.returncode == 130
    if args == ("--json",):
        assert json.loads(done.stdout)["error"]["what"] == "interrupted"
        assert done.stderr == b""
    else:
        assert (done.stdout, done.stderr) == (b"", b"strata: interrupted\n")
