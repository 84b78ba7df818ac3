"""What goes wrong on a device as a model starts or runs: a clear error, its memory free, the end.

    python tests/device/failures.py MODEL [--backend cuda|hip|sim] [--only NAME] [--bound SECONDS]

Each case runs in a child process that is given so many seconds and no more:

- eaten: all of the device's memory is taken in mid-prompt; the request ends as ever or in a clear
  error, one more sequence is refused in so many words.
- interrupt: SIGINT while tokens come; the command leaves with 130.
- interrupt-prompt: the same while a long prompt is computed.
- trap-round, trap-prompt, trap-start: a kernel of a round, of a prompt, of the start's self-test
  traps, so that the context is lost; the command leaves with 1 and says what the driver said.
- budget: the device's memory ends at each allocation of a start in turn; each start ends in a clear
  error or gives the same tokens.
- vram-budget: --vram-budget is too small for anything; the command leaves with 2 or 1 and says so.

After each child the device has as much memory free as before it, and on `sim` nothing is left of
what was taken. Leaves with 1 where anything is otherwise.
"""

from __future__ import annotations

import argparse
import json
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attrs import evolve, frozen
from harness import MIB, Bounded, installed

from strata_core.engine.messages import Finished, PromptProgress
from strata_core.errors import StrataError
from strata_core.kernels.device.sources import Source, source_of
from strata_core.runtime import KernelKey

IDS = tuple((7 * n + 5) % 200 + 3 for n in range(400))
TRAPS = {"trap-round": "signal", "trap-prompt": "prompt_group", "trap-start": "down"}
SLACK = 64 * MIB
"""What the driver itself may keep between two looks at the memory."""

PATIENCE = 10.0
"""Seconds that the driver has to clear up behind a child."""

TRAP = """
#if defined(__HIP__)
  __builtin_trap();
#else
  __trap();
#endif
"""


def lines_of(error: StrataError) -> list[str]:
    """What, why and what to do."""
    return [error.what, error.why, error.remedy]


# --- children ----------------------------------------------------------------------------------


@contextmanager
def trapping(backend: str, kernel: str) -> Iterator[None]:
    """While this runs, a kernel traps whenever it is launched."""
    if backend == "sim":
        from strata_core.testing.sim.host_kernels import HostKernels
        from strata_core.testing.sim.runtime import SimRuntime

        real = HostKernels.mapping

        def trap(runtime: SimRuntime, _device: int, _launch: object) -> None:
            runtime.lost = True
            raise RuntimeError(f"{kernel} traps")

        def mapping(self: HostKernels) -> dict[str, Any]:
            return {**real(self), kernel: trap}

        with mock.patch.object(HostKernels, "mapping", mapping):
            yield
        return

    def changed(key: KernelKey) -> Source:
        source = source_of(key)
        if key.name != kernel:
            return source
        text, count = re.subn(rf"(\n{source.entry}\([^)]*\) \{{)", rf"\1{TRAP}", source.text)
        assert count == 1, f"{kernel} begins once"
        return evolve(source, text=text)

    with mock.patch(f"strata_{backend}.compiler.source_of", changed):
        yield


def options_of(asked: argparse.Namespace, **more: Any) -> dict[str, Any]:
    """Options of a model that has some experts in slots, and prompts in short chunks."""
    return {
        "backend": asked.backend,
        "expert_cache": 4,
        "max_context": 512,
        "prefill": 64,
        "adapt_every": 0,
        **more,
    }


def ids_of(count: int) -> list[str]:
    """A prompt of so many ids, as arguments."""
    return ["--prompt-ids", ",".join(map(str, (IDS * 5)[:count]))]


def arguments_of(asked: argparse.Namespace, *more: str) -> list[str]:
    """The same as a command line of `strata generate`."""
    fixed = ["--backend", asked.backend, "--expert-cache", "4", "--prefill", "64"]
    return ["generate", str(asked.model), *fixed, "--ignore-eos", *more]


def eat(runtime: Any) -> list[int]:
    """Take all of the first device's memory; the addresses."""
    taken, size = [], 1 << 34
    while size >= 4096:
        try:
            taken.append(runtime.alloc(0, size))
        except StrataError:
            runtime.take_error()
            size //= 2
    return taken


def eaten(asked: argparse.Namespace) -> dict[str, Any]:
    """Memory goes while a prompt is computed; one more sequence finds none."""
    from strata_core import api

    found: dict[str, Any] = {}
    with installed(asked.backend) as made:
        with api.load(asked.model, **options_of(asked)) as model:
            clean = list(model.generate(IDS, max_tokens=8, ignore_eos=True))[-1]
            runtime, taken = made[0].runtime, []
            try:
                for event in model.generate(IDS, max_tokens=8, ignore_eos=True):
                    if isinstance(event, PromptProgress) and event.done and not taken:
                        taken = eat(runtime)
                        found["free_mib"] = runtime.memory(0).free / MIB
                    if isinstance(event, Finished):
                        found["same"] = event.token_ids == clean.token_ids
            except StrataError as error:
                found["error"] = lines_of(error)
            executor = model._running.executor
            slots: list[int] = []
            try:
                slots += [executor.open_sequence() for _ in range(4)]
            except StrataError as error:
                found["refused"] = lines_of(error)
            finally:
                runtime.take_error()
            for address in taken:
                runtime.free(0, address)
            found["eaten"] = len(taken)
        found["left"] = left_of(made)
    return found


def left_of(made: list[Any], *, lost: bool = False) -> list[str]:
    """Claims that were not given back, and what a simulated driver still holds.

    Of a `lost` device the driver takes nothing back: what is page-locked stays so until the process
    ends, and is still claimed.
    """
    found = []
    for backend in made:
        inner = getattr(backend.runtime, "inner", backend.runtime)
        claims = backend.ledger.outstanding()
        found += [str(claim) for claim in claims if not lost or claim.pool.startswith("vram")]
        if hasattr(inner, "leaks") and not lost:
            found += inner.leaks()
    return found


def budget(asked: argparse.Namespace) -> dict[str, Any]:
    """The memory ends at each allocation of a start."""
    from strata_core import api

    lenses: list[Bounded] = []
    state: dict[str, Any] = {"most": None, "wrong": [], "errors": 0, "degraded": 0}

    def wrap(runtime: Any) -> Bounded:
        lenses.append(Bounded(runtime, state["most"]))
        return lenses[-1]

    def start() -> tuple[int, ...]:
        with api.load(asked.model, **options_of(asked)) as model:
            return list(model.generate(IDS[:80], max_tokens=4, ignore_eos=True))[-1].token_ids

    with installed(asked.backend, wrap) as made:
        wanted = start()
        points = list(dict.fromkeys(lenses[0].peaks))
        for point in points:
            state["most"] = point - 1
            try:
                tokens = start()
                state["degraded"] += 1
                if tokens != wanted:
                    state["wrong"].append(f"{point - 1} bytes: other tokens")
            except StrataError as error:
                state["errors"] += 1
                state["last"] = lines_of(error)
                if not all(lines_of(error)):
                    state["wrong"].append(f"{point - 1} bytes: {lines_of(error)}")
            if lenses[-1].held:
                state["wrong"].append(f"{point - 1} bytes: {lenses[-1].held} are held")
        state["left"] = left_of(made)
    return {**state, "points": len(points)}


def command(asked: argparse.Namespace, *more: str) -> int:
    """`strata` in this process, over a backend that need not be installed; its exit code."""
    from strata_core.cli.main import main

    with installed(asked.backend) as made:
        code = main(arguments_of(asked, *more))
        left = left_of(made, lost=asked.child in TRAPS)
    if left:
        print(f"left: {left}", file=sys.stderr)
        return 99
    return code


def child(asked: argparse.Namespace) -> int:
    """What a child process does."""
    if asked.child in ("eaten", "budget"):
        work: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
            "eaten": eaten,
            "budget": budget,
        }
        print(json.dumps(work[asked.child](asked)))
        return 0
    with ExitStack() as stack:
        if asked.child in TRAPS:
            stack.enter_context(trapping(asked.backend, TRAPS[asked.child]))
        if asked.child == "vram-budget":
            return command(asked, *ids_of(80), "-n", "4", "--vram-budget", "0.0001")
        if asked.child == "interrupt-prompt":
            interrupt_soon()
            return command(asked, *ids_of(1500), "-n", "200")
        return command(asked, *ids_of(80), "-n", "400")


def interrupt_soon() -> None:
    """SIGINT for this process once a prompt's second chunk has begun."""
    from strata_core.kernels.device.prompt import PromptPath

    real, calls = PromptPath.run, []

    def run(self: PromptPath, *args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            threading.Timer(0.001, signal.raise_signal, (signal.SIGINT,)).start()
        return real(self, *args)

    PromptPath.run = run  # type: ignore[method-assign]


# --- the parent --------------------------------------------------------------------------------


@frozen(kw_only=True)
class Ended:
    """How a child ended."""

    code: int
    out: str
    err: str
    seconds: float


def run_child(asked: argparse.Namespace, name: str, folder: Path) -> Ended:
    """One child, killed where it takes too long (then the code is -9)."""
    line = [sys.executable, __file__, str(asked.model), "--backend", asked.backend]
    line += ["--child", name]
    began = time.monotonic()
    out, err = folder / "out", folder / "err"
    with out.open("wb") as stdout, err.open("wb") as stderr:
        process = subprocess.Popen(line, stdout=stdout, stderr=stderr)
        try:
            if name == "interrupt":
                while out.stat().st_size < 8 and process.poll() is None:
                    if time.monotonic() - began > asked.bound:
                        break
                    time.sleep(0.005)
                process.send_signal(signal.SIGINT)
            code = process.wait(max(1.0, asked.bound - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
    texts = (path.read_text("utf-8", errors="replace") for path in (out, err))
    out_text, err_text = texts
    return Ended(code=code, out=out_text, err=err_text, seconds=time.monotonic() - began)


def judged(name: str, end: Ended) -> list[str]:
    """What is otherwise than it should be."""
    wrong = []
    if "Traceback" in end.err:
        wrong.append("a stack trace")
    if name in ("eaten", "budget"):
        if end.code != 0:
            return [*wrong, f"leaves with {end.code}"]
        found = json.loads(end.out.splitlines()[-1])
        wrong += [str(item) for item in (*found["left"], *found.get("wrong", ()))]
        if name == "eaten":
            wrong += [] if found["eaten"] else ["no memory could be eaten"]
            wrong += [] if found.get("same") or all(found.get("error", [""])) else ["other tokens"]
            refused = found.get("refused", [""])
            wrong += [] if all(refused) else ["one more sequence was not refused"]
        elif found["points"] < 4 or not found["errors"]:
            wrong.append("no allocation ended a start")
        return wrong
    codes = {"interrupt": (130,), "interrupt-prompt": (130,), "vram-budget": (1, 2)}
    if end.code not in codes.get(name, (1,)):
        wrong.append(f"leaves with {end.code}")
    said = {
        "interrupt": "interrupted",
        "interrupt-prompt": "interrupted",
        "trap-round": "a round stopped at",
        "trap-start": "testing the kernels of",
        "vram-budget": "vram",
    }
    if said.get(name, "").lower() not in end.err.lower():
        wrong.append(f"does not say {said[name]!r}")
    if name in TRAPS and "the driver says: nothing" in end.err:
        wrong.append("does not say what the driver said")
    return wrong


NAMES = ("eaten", "interrupt", "interrupt-prompt", *TRAPS, "budget", "vram-budget")


class Watch:
    """The device's free memory, seen from this process; of the simulated one there is none."""

    def __init__(self, backend: str, folder: Path) -> None:
        self.runtime: Any = None
        if backend != "sim":
            from check_golden import runtime_on

            self.runtime = runtime_on(backend, folder, [])
            self.runtime.open_context(0)

    def free(self) -> int:
        """Bytes."""
        return int(self.runtime.memory(0).free) if self.runtime is not None else 0

    def gone(self, before: int) -> int:
        """Bytes that are missing; a driver may need a moment to clear up behind a process."""
        until = time.monotonic() + PATIENCE
        while before - self.free() > SLACK and time.monotonic() < until:
            time.sleep(0.1)
        return before - self.free()


def main() -> int:
    """Every case, each in a child."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--bound", type=float, default=120.0, help="seconds of a child")
    parser.add_argument("--child", choices=NAMES, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.child:
        return child(asked)
    failed = 0
    with tempfile.TemporaryDirectory() as kept:
        watch = Watch(asked.backend, Path(kept))
        for name in (name for name in NAMES if asked.only in name):
            before = watch.free()
            end = run_child(asked, name, Path(kept))
            wrong = judged(name, end)
            gone = watch.gone(before)
            if gone > SLACK:
                wrong.append(f"{gone / MIB:.0f} MiB of the device's memory are gone")
            failed += bool(wrong)
            say = "; ".join(wrong) or "as it should be"
            print(f"{name:17} code {end.code:4} in {end.seconds:5.1f} s: {say}", flush=True)
            last = [line for line in end.err.splitlines() if line.strip()][-3:]
            print(*(f"    {line}" for line in last or end.out.splitlines()[-1:]), sep="\n")
    print(f"{failed} cases ended otherwise than they should")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
