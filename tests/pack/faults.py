"""What disks, files and kills can do to packing and serving, and what comes of each.

    python tests/pack/faults.py [FOLDER]

Does every fault of the table to small models in FOLDER (default: a folder for temporary files), and
prints what was said, whether requests were answered later, and whether anything half made loads.
Leaves with 1 where an outcome is not the one that is wanted. Linux or macOS.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from attrs import field, frozen

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import strata_core  # noqa: E402
from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.engine.messages import Finished  # noqa: E402
from strata_core.errors import CheckpointError, StrataError  # noqa: E402
from strata_core.interfaces import Expert, Piece  # noqa: E402
from strata_core.memory.platform.direct import PosixDirect  # noqa: E402
from strata_core.pack.reads import in_sample  # noqa: E402
from strata_core.pack.write import partial_folder, write_pack  # noqa: E402
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf  # noqa: E402
from strata_core.verify.identity import subject  # noqa: E402

EXPERTS, CONTEXT = 32, 64
PROMPTS = tuple(random.Random(11).sample(range(3, 290), 24))
"""Requests of one token each: some ask for an expert that others do not."""


class Silent:
    def start(self, label: str, nbytes: int) -> None:
        pass

    def advance(self, nbytes: int) -> None:
        pass

    def done(self) -> None:
        pass


@frozen(kw_only=True)
class Outcome:
    """What came of one fault. `wrong` says in what it is not what is wanted, "" where it is."""

    fault: str
    said: str
    later: str
    wrong: str = ""


@frozen(eq=False)
class Lab:
    """A small GGUF model, its pack, and two requests.

    `asks` needs `expert`, `spares` nothing that lies there or behind it in the pack.
    """

    folder: Path
    model: Path
    pack: Path
    expert: Expert
    asks: int
    spares: int
    expected: dict[int, str] = field(factory=dict)

    @property
    def piece(self) -> Piece:
        """Where the expert's blob lies in the pack."""
        return open_checkpoint(self.pack).experts.blob(self.expert)

    def options(self, **more: Any) -> dict[str, Any]:
        """Settings for a tier that keeps nothing, so that every expert is read when asked for."""
        from strata_core.config import resolve

        settings = resolve({"backend": "cpu", "max_context": CONTEXT}, {})
        beside = subject(self.pack, self.pack, settings).facts.beside
        given = {"backend": "cpu", "threads": 1, "source": "tiered-file", "learn": False}
        given["max_context"] = CONTEXT
        return {**given, "ram_budget": (beside + 1) / 2**30, **more}


def answer(model: Any, prompt: int) -> str:
    """The hash of the logits after a prompt of one token."""
    *_, done = model.generate([prompt], max_tokens=1, ignore_eos=True)
    assert isinstance(done, Finished)
    return done.first_logits_sha256


def make_lab(folder: Path) -> Lab:
    """Models in a folder, and the two requests, found by trying."""
    model = folder / "m.gguf"
    write_tiny_gguf(model, hyper=tiny_hyper(experts=EXPERTS), expert_type="Q4_K")
    pack = write_pack(open_checkpoint(model), folder / "pack", Silent()).path
    asked: dict[int, set[Expert]] = {}
    expected = {}
    options = {"backend": "cpu", "threads": 1, "learn": False}
    with strata_core.load(model, source="arena", **options) as loaded:
        before: dict[Expert, int] = {}
        for prompt in PROMPTS:
            expected[prompt] = answer(loaded, prompt)
            counts = loaded.profile().counts
            now = {Expert(n, i): c for n, row in counts.items() for i, c in enumerate(row)}
            asked[prompt] = {e for e, count in now.items() if count > before.get(e, 0)}
            before = now
    for asks, spares in itertools.permutations(asked, 2):
        last = max(asked[spares], key=_place)
        only = [e for e in asked[asks] if _place(e) > _place(last) and not in_sample(e)]
        if only:
            return Lab(folder, model, pack, min(only, key=_place), asks, spares, expected)
    raise AssertionError("every request asks for the same experts")


def _place(expert: Expert) -> tuple[int, int]:
    """Where its blob comes in experts.bin."""
    return expert.layer, expert.index


# --- serving -----------------------------------------------------------------------------------


def served(
    lab: Lab, fault: str, break_it: Callable[[], Any], mend: Callable[[], Any], **more: Any
) -> Outcome:
    """Break something while a model is loaded, ask, mend it, and ask again."""
    words = more.pop("words", (str(lab.expert), str(lab.pack / "experts.bin")))
    model = more.pop("model", lab.pack)
    rest = more.pop("rest", True)
    said, wrong = "", []

    def again(when: str, *prompts: int) -> None:
        for prompt in prompts:
            if answer(loaded, prompt) != lab.expected[prompt]:
                wrong.append(f"an answer {when} differs")

    with strata_core.load(model, **lab.options(**more)) as loaded:
        break_it()
        try:
            answer(loaded, lab.asks)
            wrong.append("the request was answered")
        except StrataError as error:
            said = f"{error.what}: {error.why}"
            wrong += [f"it does not name {word}" for word in words if word not in said]
        if rest:
            again("meanwhile", lab.spares)
        mend()
        again("after mending", lab.asks, lab.spares)
    later = "all after mending equal"
    if rest:
        later = f"others meanwhile equal, {later}"
    return Outcome(fault=fault, said=said, later=later, wrong="; ".join(wrong))


@contextlib.contextmanager
def reads_that(make: Callable[[Callable[..., int]], Callable[..., int]]) -> Iterator[None]:
    """While this runs, unbuffered reads are what `make` makes of them."""
    real = PosixDirect.read
    PosixDirect.read = make(real)  # type: ignore[method-assign]
    try:
        yield
    finally:
        PosixDirect.read = real  # type: ignore[method-assign]


def io_error(lab: Lab) -> Outcome:
    """The disk fails where the expert lies."""
    piece, broken = lab.piece, [False]

    def make(real: Callable[..., int]) -> Callable[..., int]:
        def read(self: PosixDirect, target: memoryview, offset: int) -> int:
            last = offset + len(target)
            if broken[0] and offset < piece.offset + piece.nbytes and last > piece.offset:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(self, target, offset)

        return read

    def switch(state: bool) -> Callable[[], None]:
        return lambda: broken.__setitem__(0, state)

    with reads_that(make):
        return served(lab, "EIO while serving", switch(True), switch(False))


def short_reads(lab: Lab) -> Outcome:
    """The system gives fewer bytes than asked for, every time."""

    def make(real: Callable[..., int]) -> Callable[..., int]:
        def read(self: PosixDirect, target: memoryview, offset: int) -> int:
            return real(self, target[: max(4096, len(target) // 2 // 4096 * 4096)], offset)

        return read

    with reads_that(make), strata_core.load(lab.pack, **lab.options()) as loaded:
        same = all(answer(loaded, p) == lab.expected[p] for p in (lab.asks, lab.spares))
    said = "nothing: the rest is read with another request"
    later = "equal" if same else "DIFFERS"
    wrong = "" if same else "answers differ"
    return Outcome(fault="short reads while serving", said=said, later=later, wrong=wrong)


def change(lab: Lab) -> Callable[[], None]:
    """Flip a bit in the middle of the expert's blob; twice is as before."""
    piece = lab.piece

    def flip() -> None:
        at = piece.offset + piece.nbytes // 2
        with piece.file.open("r+b") as file:
            file.seek(at)
            value = file.read(1)[0]
            file.seek(at)
            file.write(bytes([value ^ 16]))

    return flip


def corrupted(lab: Lab) -> Outcome:
    """A blob changes on the disk; every read is compared."""
    flip = change(lab)
    return served(lab, "a corrupted blob, --verify-reads all", flip, flip, verify_reads="all")


def corrupted_in_sample(lab: Lab) -> Outcome:
    """A blob of the sample is damaged: loading finds it. One that is not: `strata verify` does."""
    from strata_core.pack.verify import CHECKS, run_checks

    flip, wrong = change(lab), []
    first = open_checkpoint(lab.pack).experts.blob(Expert(0, 0))
    data = first.file.read_bytes()
    said = ""
    try:
        flip()
        with strata_core.load(lab.pack, **lab.options(source="arena", ram_budget=None)):
            pass  # the blob is not in the sample
        checks = run_checks(CHECKS, open_checkpoint(lab.pack), Silent())
        found = [damage.what for outcome in checks for damage in outcome.damage]
        wrong += [] if found == [str(lab.expert)] else [f"strata verify found {found}"]
        at = first.offset
        first.file.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        with strata_core.load(lab.pack, **lab.options(source="arena", ram_budget=None)):
            wrong.append("a damaged blob of the sample was loaded")
    except CheckpointError as error:
        said = f"{error.what}: {error.why}"
        wrong += [] if "expert 0 of layer 0" in said else ["it does not name the expert"]
    finally:
        first.file.write_bytes(data)
    later = "not in the sample: loads, and strata verify names it"
    return Outcome(
        fault="a corrupted blob, sampled", said=said, later=later, wrong="; ".join(wrong)
    )


def _cut(path: Path, at: int) -> tuple[Callable[[], None], Callable[[], None]]:
    """Cut a file short, and put it back; it stays the same file."""
    data = path.read_bytes()

    def mend() -> None:
        with path.open("r+b") as file:
            file.write(data)

    return (lambda: os.truncate(path, at)), mend


def shrinks(lab: Lab) -> Outcome:
    """experts.bin ends in the middle of the blob; experts before it can still be read."""
    piece = lab.piece
    cut, mend = _cut(piece.file, piece.offset + 4096)
    return served(lab, "experts.bin shrinks while serving", cut, mend, words=(
        str(lab.pack / "experts.bin"), "the file ends at byte", "expert "
    ))  # fmt: skip


def mapped_shrinks(lab: Lab) -> Outcome:
    """A GGUF file that is mapped ends earlier: reading it would end the process."""
    size = lab.model.stat().st_size
    cut, mend = _cut(lab.model, size // 2)
    words = (str(lab.model), f"it ends at byte {size // 2}", "ends at byte")
    more = {"source": "mmap", "rest": False, "words": words, "model": lab.model}
    return served(lab, "a mapped GGUF shrinks while serving", cut, mend, **more)


def vanishes(lab: Lab) -> Outcome:
    """Every file of the pack is removed; open files are read on."""
    copy = lab.folder / "copy"
    shutil.copytree(lab.pack, copy)
    with strata_core.load(copy, **lab.options()) as loaded:
        shutil.rmtree(copy)
        same = all(answer(loaded, p) == lab.expected[p] for p in (lab.asks, lab.spares))
    try:
        strata_core.load(copy, **lab.options()).close()
        said = "loaded"
    except StrataError as error:
        said = f"the next start: {error.what}"
    wrong = "" if same and said != "loaded" else "answers differ, or it loads"
    later = "equal" if same else "DIFFERS"
    return Outcome(fault="the files vanish while serving", said=said, later=later, wrong=wrong)


# --- packing -----------------------------------------------------------------------------------


def _packed(lab: Lab, out: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "strata_core", "pack", str(lab.model), str(out), "-q"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
        **more,
    )


def _half(out: Path) -> list[str]:
    """What of a pack that was not finished is there where nothing should be."""
    found = [f"{out.name} is there"] if out.exists() else []
    try:
        open_checkpoint(partial_folder(out))
    except CheckpointError:
        return found
    return [*found, "half a pack loads"]


def full_disk(lab: Lab) -> Outcome:
    """The system lets no file grow as large as experts.bin; then it does, and packing goes on."""
    out = lab.folder / "full"
    limit = (lab.pack / "experts.bin").stat().st_size * 2 // 3

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))

    done = _packed(lab, out, preexec_fn=limited)
    lines = done.stderr.splitlines()
    wrong = _half(out)
    wrong += [] if done.returncode == 1 and len(lines) == 3 else [f"ended {done.returncode}"]
    again = _packed(lab, out)
    same = again.returncode == 0 and _same(lab.pack, out)
    wrong += [] if same else ["the next run did not make the pack"]
    later = "the same command goes on and makes the same pack"
    said = ": ".join(lines[:2])
    return Outcome(
        fault="a full disk while packing", said=said, later=later, wrong="; ".join(wrong)
    )


def killed(lab: Lab) -> Outcome:
    """kill -9 before many of the calls that change a file system."""
    numbers = [*range(1, 8), *random.Random(3).sample(range(8, 60), 8), *range(-14, 0)]
    (lab.folder / "kills").mkdir()
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("crash_lab.py")), str(lab.model),
         str(lab.folder / "kills"), ",".join(map(str, numbers))],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    if done.returncode:
        return Outcome(fault="kill -9 while packing", said="", later="", wrong=done.stderr[-300:])
    found = json.loads(done.stdout)
    runs = [run for run in found["runs"].values() if run["killed"]]
    whole, wrong = found["whole"], []
    for run in runs:
        if run["partial_opens"] and not whole.items() <= run["partial"].items():
            wrong.append("half a pack loads")
        if run["out"] is not None and not whole.items() <= run["out"].items():
            wrong.append("OUT is there and not whole")
        if run["after"] != whole:
            wrong.append("the next run made another pack")
    resumed = sum(run["resumed"] > 0 for run in runs)
    said = f"killed at {len(runs)} of {found['calls']} calls"
    later = f"the next run made the same pack each time, {resumed} times from what was there"
    wrong += [] if runs and resumed else ["nothing was killed, or nothing resumed"]
    text = "; ".join(sorted(set(wrong)))
    return Outcome(fault="kill -9 while packing", said=said, later=later, wrong=text)


def _same(one: Path, other: Path) -> bool:
    names = {path.name for path in one.iterdir()}
    return names == {path.name for path in other.iterdir()} and all(
        (one / name).read_bytes() == (other / name).read_bytes() for name in names
    )


FAULTS: tuple[Callable[[Lab], Outcome], ...] = (
    short_reads,
    io_error,
    corrupted,
    corrupted_in_sample,
    shrinks,
    mapped_shrinks,
    vanishes,
    full_disk,
    killed,
)
"""Every fault, each on a lab that the ones before have left as it was."""


def main() -> int:
    """The table."""
    with contextlib.ExitStack() as stack:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else None
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="strata-faults-")))
        lab = make_lab(folder)
        outcomes = [fault(lab) for fault in FAULTS]
    for outcome in outcomes:
        verdict = f"WRONG: {outcome.wrong}" if outcome.wrong else "as wanted"
        print(f"{outcome.fault}: {verdict}")
        print(f"    said:  {' '.join(outcome.said.split()).replace(str(folder), 'FOLDER')}")
        print(f"    later: {outcome.later}")
    wrong = sum(bool(outcome.wrong) for outcome in outcomes)
    print(f"{len(outcomes) - wrong} of {len(outcomes)} faults end as they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
