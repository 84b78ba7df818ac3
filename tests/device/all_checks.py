"""Every check of a device in one call, each bounded in time, with a line each at the end.

    python tests/device/all_checks.py MODELS [--backend cuda] [--seconds 560] [--jobs 3]
        [--only NAME ...] [--matrix] [--out FOLDER]

MODELS is the folder of the reference models (kjv-moe/, tiny/). The checks, by name: `verbs` (the
suite of a runtime), `kernels` (compiled, then every kernel's bits), `memory` (page-locking),
`identity MODEL` (every place of experts against the CPU's bits, with --matrix every size of the
cache too), `closeness` (logits against the given oracle), `refusals` (memory that runs out at each
allocation, and the settings that refuse), `golden` (the self-test's rows of every type), `helper`
(the device as its own helper), `paths` (a driver that pins little, in both orders), `memcheck` and
`racecheck` (compute-sanitizer over a tiny model in `stepped` mode), `hip` (the HIP plugin on this
device, where hip-python is installed), and behind the others, alone, `failures` (interrupts, traps,
memory that goes in mid-prompt), `memory` and `hip`.
Several run at once. What each says goes to FOLDER/NAME.log; the summary has its last line. A check
of a model that is not in MODELS is skipped, one of several leaves it out, and both say so. Begins
nothing after --seconds, and ends what still runs. Leaves with 1 where anything failed or was left,
or nothing ran.

`--backend sim` tries all of it that needs no device.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT)]

from entry_points import environment  # noqa: E402
from reference_models import kjv, missing, there, tiny  # noqa: E402

from strata_core.setting_table import BY_KEY  # noqa: E402

CHECKED = "qwen3_moe"
"""The tiny model that the sanitizer watches."""

PYTEST = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "-n0")
THREADS = 4
"""Threads of the CPU backend in each check, several of which run at once."""


@frozen(kw_only=True)
class Check:
    """A command, the seconds that it may take, and why it cannot be run ("": it can).

    `alone`: it takes or measures the whole device, so that nothing may run beside it. `left_out`
    are models that are not there and that the command therefore does not name ("": none).
    """

    name: str
    command: tuple[str, ...]
    limit: float = 300.0
    missing: str = ""
    left_out: str = ""
    alone: bool = False


@frozen
class Result:
    """What became of a check: a word, seconds, the last line that it printed."""

    check: Check
    word: str
    seconds: float
    last: str

    @property
    def good(self) -> bool:
        """Whether nothing speaks against it."""
        return self.word in ("ok", "skipped")

    def __str__(self) -> str:
        return f"{self.check.name:28} {self.word:12} {self.seconds:6.1f} s  {self.last[:240]}"


def checks(asked: argparse.Namespace) -> Iterator[Check]:
    """All of them, the ones that tell most first."""
    python, backend = sys.executable, asked.backend
    no_device = "" if backend not in ("sim", "cpu") else f"{backend} is no device"
    cache = ("--cache", str(Path(tempfile.gettempdir()) / "strata-check"))
    yield Check(
        name="verbs",
        command=(python, *PYTEST, str(HERE / "check_runtime.py")),
        limit=120,
        missing=no_device,
    )
    on = ("--on", "host", "--only", "add") if no_device else ()
    yield Check(name="kernels", command=(python, str(HERE / "check_kernels.py"), *cache, *on))
    matrix = ("--matrix",) if asked.matrix else ()
    for model in (*kjv(asked.models), *tiny(asked.models)):
        command = (python, str(HERE / "identity.py"), "--backend", backend, str(model), *matrix)
        limit = 400.0 if asked.matrix else 150.0
        more = ("--seconds", f"{limit - 10:g}")
        yield Check(
            name=f"identity {model.name}",
            command=(*command, *more),
            limit=limit,
            missing=missing(model),
        )
    yield from _tools(asked, no_device)
    yield _closeness(asked)
    small = asked.models / "tiny" / CHECKED
    refusals = (python, str(HERE / "device_refusals.py"), str(small), "--backend", backend)
    yield Check(name="refusals", command=refusals, limit=240, missing=missing(small))
    yield from _ends(asked, cache)
    memory = (python, str(HERE / "check_memory.py"), "--gib", "4")
    yield Check(name="memory", command=memory, limit=120, missing=no_device, alone=True)
    hip = (python, str(HERE / "check_hip.py"), "quick", str(asked.models))
    found = find_spec("rocm") or find_spec("hip")
    none = no_device or ("" if found else "hip-python is not installed")
    present, left_out = there([*kjv(asked.models), *tiny(asked.models)])
    none = none or ("" if present else left_out)
    yield Check(name="hip", command=hip, limit=150, missing=none, left_out=left_out, alone=True)


def _closeness(asked: argparse.Namespace) -> Check:
    """Logits of the kjv-moe models that are there against the oracle beside them."""
    present, left_out = there(kjv(asked.models))
    oracle = asked.models / "kjv-moe" / "reference.npz"
    none = "" if oracle.is_file() else f"{oracle.parent.name}/{oracle.name} is not there"
    return Check(
        name="closeness",
        command=(
            *(sys.executable, str(ROOT / "tests/model/closeness.py"), *map(str, present)),
            *("--given", "--kv", "fp16", "--backend", asked.backend),
        ),
        limit=200,
        missing=none or ("" if present else left_out),
        left_out=left_out,
    )


def _ends(asked: argparse.Namespace, cache: tuple[str, ...]) -> Iterator[Check]:
    """Golden rows, the device as its own helper, what goes wrong, and what is not page-locked."""
    on = ("--backend", asked.backend)
    used = asked.models / "kjv-moe" / "kjv-Q4_0.gguf"
    model = str(used)
    programs = {
        "golden": ("check_golden.py", "--on", asked.backend, *cache),
        "helper": ("two_logical.py", model, *on),
        "failures": ("failures.py", model, *on, "--bound", "60"),
        "paths": ("refusals.py", model, *on, *cache),
    }
    for name, (program, *arguments) in programs.items():
        command = (sys.executable, str(HERE / program), *arguments)
        none = missing(used) if model in arguments else ""
        yield Check(name=name, command=command, limit=240, missing=none, alone=name == "failures")


def _tools(asked: argparse.Namespace, no_device: str) -> Iterator[Check]:
    """compute-sanitizer over a few rounds that all lanes take part in, launched by segments."""
    tool = shutil.which("compute-sanitizer") or "/usr/local/cuda/bin/compute-sanitizer"
    none = no_device or ("" if Path(tool).exists() else "compute-sanitizer is not installed")
    none = none or missing(asked.models / "tiny" / CHECKED)
    stepped = ("--dispatch", "stepped") if "dispatch" in BY_KEY else ()
    rounds = (
        *(sys.executable, "-m", "strata_core", "generate", str(asked.models / "tiny" / CHECKED)),
        *("--backend", asked.backend, "--prompt-ids", "5,9,3,7,11", "-n", "6", "--ignore-eos"),
        *("--expert-cache", "8", "--pcie-frac", "0.5", "--source", "arena", "--adapt-every", "1"),
        *stepped,
    )
    for name in ("memcheck", "racecheck"):
        command = (tool, "--tool", name, "--error-exitcode", "9", *rounds)
        yield Check(name=name, command=command, limit=240, missing=none)


def run(check: Check, until: float, folder: Path, given: dict[str, str]) -> Result:
    """Run one, in a process group of its own that ends with it."""
    if check.missing:
        return Result(check, "skipped", 0.0, check.missing)
    left = min(check.limit, until - time.monotonic())
    if left <= 0:
        return Result(check, "left", 0.0, "the time was over before its turn")
    log = folder / f"{check.name.replace(' ', '-')}.log"
    began = time.monotonic()
    with log.open("w") as out:
        process = subprocess.Popen(
            check.command, stdout=out, stderr=subprocess.STDOUT, env=given, start_new_session=True
        )
        try:
            code = process.wait(timeout=left)
            word = "ok" if code == 0 else f"FAILED {code}"
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            word = "OUT OF TIME"
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = "; ".join(filter(None, (_last(lines), check.left_out)))
    result = Result(check, word, time.monotonic() - began, said)
    print(result, flush=True)
    return result


def _last(lines: Sequence[str]) -> str:
    """What a program said last; of the sanitizer its summary."""
    summaries = [line for line in lines if "SUMMARY" in line]
    return (summaries or list(lines) or [""])[-1].strip()


def summed(results: Sequence[Result]) -> Iterator[str]:
    """How many went well, did not, and were skipped or saw no more than some of the models."""
    bad = [result.check.name for result in results if not result.good]
    skipped = [result.check.name for result in results if result.word == "skipped"]
    partly = [r.check.name for r in results if r.check.left_out and r.word != "skipped"]
    ran = len(results) - len(skipped)
    yield f"{ran - len(bad)} of {ran} good; not: {', '.join(bad) or 'none'}"
    yield f"{len(skipped)} skipped: {', '.join(skipped) or 'none'}"
    if partly:
        yield f"models left out of: {', '.join(partly)}"


def main() -> int:
    """Run what is asked for, and sum up."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", type=Path, help="the folder of kjv-moe/ and tiny/")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--seconds", type=float, default=560.0)
    parser.add_argument("--jobs", type=int, default=3, help="checks at once")
    parser.add_argument("--only", nargs="+", help="checks whose name begins so")
    parser.add_argument("--matrix", action="store_true", help="every cache size at every place")
    parser.add_argument("--out", type=Path, help="a folder for what they print")
    asked = parser.parse_args()
    until = time.monotonic() + asked.seconds
    folder = asked.out or Path(tempfile.mkdtemp())
    folder.mkdir(parents=True, exist_ok=True)
    given = environment(Path(tempfile.gettempdir()) / "strata-checks-site")
    given.setdefault("STRATA_THREADS", str(THREADS))
    wanted = [c for c in checks(asked) if not asked.only or c.name.startswith(tuple(asked.only))]
    print(f"{len(wanted)} checks, {asked.jobs} at once; what they print is in {folder}", flush=True)
    with ThreadPoolExecutor(asked.jobs) as pool:
        beside = [check for check in wanted if not check.alone]
        results = list(pool.map(lambda check: run(check, until, folder, given), beside))
    results += [run(check, until, folder, given) for check in wanted if check.alone]
    print("\n## Summary", *results, sep="\n")
    print(*summed(results), sep="\n")
    ran = any(result.word == "ok" for result in results)
    return 0 if ran and all(result.good for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
