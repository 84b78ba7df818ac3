"""The processes of a comparison: how they fail, what is kept of their words, and how they end."""

from __future__ import annotations

import os
import shlex
import sys
import threading
import time
from pathlib import Path

import pytest

from strata_core.cli.compare.figures import Asked
from strata_core.cli.compare.reading import read_llama_bench, read_strata
from strata_core.cli.compare.turns import run, take_turns
from strata_core.errors import StrataError

ASKED = Asked(prompt=32, decode=8, repeats=3, threads=2, named=True)


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


@pytest.mark.parametrize(
    ("command", "seconds", "says"),
    [
        (python("import sys; print('figures'); sys.exit('the cause')"), 240, "code 1: the cause"),
        (python("print('{}'); raise SystemExit(2)"), 240, "exit code 2: {}"),
        (python("raise SystemExit(3)"), 240, "exit code 3: without a word"),
        (python("print('no figures')"), 240, "no figures in what it printed: no figures"),
        (python("import time; time.sleep(3600)"), 0.5, "more than 0.5 s"),
        (["/no/such/program"], 240, "cannot be run"),
    ],
)
def test_a_process_that_fails(command: list[str], seconds: float, says: str) -> None:
    def never(number: int, pair: object) -> None:
        pytest.fail("a pair without figures")

    with pytest.raises(StrataError, match=says) as error:
        take_turns(
            (command, read_strata),
            (lambda first: python(""), read_llama_bench),
            ASKED,
            2,
            lambda given: run(given, seconds),
            never,
        )
    assert shlex.join(command) in error.value.what
    assert error.value.remedy


BABBLE = "import sys\nwhile True: sys.{}.write('x' * 65536)"


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (BABBLE.format("stdout"), "printed more than 16 MiB"),
        ("import sys; sys.stderr.write('x' * (40 << 20)); sys.exit('the cause')", "the cause"),
    ],
)
def test_only_so_much_is_kept_of_what_is_printed(source: str, says: str) -> None:
    with pytest.raises(StrataError, match=says) as error:
        run(python(source), 240)
    assert len(error.value.why) < 2000


def gone(number: int) -> bool:
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    state = Path(f"/proc/{number}/stat")  # one that nobody waits for stays as a zombie
    return state.exists() and state.read_text("ascii").rpartition(")")[2].split()[0] == "Z"


@pytest.mark.skipif(sys.platform == "win32", reason="there are no process groups")
@pytest.mark.parametrize("ends", ["timeout", "interrupt"])
def test_what_a_process_started_ends_with_it(
    ends: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pids"
    source = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(3600)'])\n"
        f"open({str(file)!r} + '.new', 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        f"os.rename({str(file)!r} + '.new', {str(file)!r})\n"
        "time.sleep(3600)\n"
    )

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        until = time.monotonic() + 240
        while not file.exists() and time.monotonic() < until:
            time.sleep(0.01)
        if ends == "interrupt":
            raise KeyboardInterrupt
        time.sleep(0.05)

    monkeypatch.setattr("strata_core.cli.compare.turns._Stream.join", join)
    kind = KeyboardInterrupt if ends == "interrupt" else StrataError
    with pytest.raises(kind):
        run(python(source), 1)
    numbers = [int(number) for number in file.read_text("ascii").split()]
    assert len(numbers) == 2
    until = time.monotonic() + 240
    while not all(map(gone, numbers)) and time.monotonic() < until:
        time.sleep(0.01)
    assert all(map(gone, numbers))
