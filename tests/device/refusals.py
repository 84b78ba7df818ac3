"""Page-locking that is refused: every path of the resident experts on a device, with one hash.

    python tests/device/refusals.py MODEL [--backend cuda|hip|sim] [--only NAME] [--seconds N]
        [--exact-prompt]

Each case is a start of the model with its resident experts (`--resident-experts auto`) and half of
its experts in slots, under STRATA_TEST_COMPLEMENT_REFUSE, STRATA_COMPLEMENT_PIN_GIB at `all`, a
number and 0, or a driver that pins 1 GiB in all, in the plain order and in that of strata-wsl; and
the two at once. A line for each: the path that was taken, the hashes of a short and of a long
prompt, or the error. Leaves with 1 where an answer is not the CPU backend's, a path is another than
its case is about, an error lacks a line, or anything is left. A long prompt that the backend sums
in an order of its own is compared with the first case's; with --exact-prompt, with the CPU's.
Nothing is begun after --seconds; what is left out is counted.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent))

from attrs import field, frozen
from failures import left_of
from harness import MIB, PinsLittle, installed, own_order_of

from strata_core import api
from strata_core.checkpoint.open import open_checkpoint
from strata_core.errors import StrataError
from strata_core.verify.answers import Answer, Expected, Prompt, in_own_order

IDS = tuple((7 * n + 5) % 200 + 3 for n in range(150))
PROMPTS = (Prompt(name="short", ids=IDS[:40]), Prompt(name="long", ids=IDS))
TOKENS = 16
GIB = 1 << 30


@frozen(kw_only=True)
class Case:
    """One start: its environment, what the driver pins (None: anything), the order of the start.

    `path` is what the path's name must have in it, "" for any; `refused`: it may end in an error.
    """

    name: str
    environment: Mapping[str, str] = field(factory=dict)
    pins: int | None = None
    wsl: bool = False
    path: str = ""
    refused: bool = False


@frozen(kw_only=True)
class End:
    """What came of it; `others` are bytes of pins besides those of the experts.

    `own_order` names the prompts whose bits are the backend's own.
    """

    answers: Mapping[str, Answer] = field(factory=dict)
    own_order: frozenset[str] = frozenset()
    paths: tuple[str, ...] = ()
    degraded: int = 0
    error: StrataError | None = None
    left: tuple[str, ...] = ()
    others: int = 0
    allocator: str = ""
    seconds: float = 0.0


FIRST = Case(name="as ever", pins=1 << 50, path="sliced")
"""A driver that pins all that is asked for; what it is asked for, the others begin from."""


def cases(nbytes: int, layers: int, others: int) -> Iterator[Case]:
    """The further cases for a complement of `nbytes`; contexts and small buffers take `others`."""
    some = f"{nbytes / 2 / GIB:.6f}"
    layer = nbytes // max(1, layers)
    refuse = {"STRATA_TEST_COMPLEMENT_REFUSE": "1"}
    yield Case(name="all", environment={"STRATA_COMPLEMENT_PIN_GIB": "all"}, path="pinned")
    yield Case(
        name="all, one allocation refused",
        environment={"STRATA_COMPLEMENT_PIN_GIB": "all", **refuse},
        path="sliced",
    )
    yield Case(name="one allocation refused", environment=refuse, path="sliced")
    yield Case(name="a number", environment={"STRATA_COMPLEMENT_PIN_GIB": some})
    yield Case(name="a number, refused", environment={"STRATA_COMPLEMENT_PIN_GIB": some, **refuse})
    yield Case(name="none", environment={"STRATA_COMPLEMENT_PIN_GIB": "0"}, path="locked")
    for wsl in (False, True):
        order = "contexts first" if wsl else "plain order"
        yield Case(name=f"1 GiB of pins, {order}", pins=GIB, wsl=wsl)
        yield Case(
            name=f"1 GiB of pins, all, {order}",
            environment={"STRATA_COMPLEMENT_PIN_GIB": "all"},
            pins=GIB,
            wsl=wsl,
        )
        yield Case(
            name=f"pins for half of them, {order}", pins=others + nbytes // 2, wsl=wsl, refused=wsl
        )
        yield Case(name=f"pins for a layer, {order}", pins=others + layer, wsl=wsl, refused=True)
        yield Case(name=f"no pins at all, {order}", pins=others // 2, wsl=wsl, refused=True)


@contextmanager
def environment(values: Mapping[str, str]) -> Iterator[None]:
    """With these variables and no others of the kind."""
    known = ("STRATA_TEST_COMPLEMENT_REFUSE", "STRATA_COMPLEMENT_PIN_GIB", "STRATA_PIN_LIMIT_GIB")
    kept = {key: value for key, value in os.environ.items() if key not in known}
    with mock.patch.dict(os.environ, {**kept, **values}, clear=True):
        yield


def answers_of(model: Any) -> dict[str, Answer]:
    """What a model answers to each prompt."""
    ends = (list(model.generate(p.ids, max_tokens=TOKENS, ignore_eos=True))[-1] for p in PROMPTS)
    return {prompt.name: Answer.of(end) for prompt, end in zip(PROMPTS, ends, strict=True)}


def start(asked: argparse.Namespace, case: Case, experts: int, folder: Path) -> End:
    """One start, and what it answers."""
    lenses: list[PinsLittle] = []

    def wrap(runtime: Any) -> Any:
        if case.pins is None:
            return runtime
        lenses.append(PinsLittle(runtime, case.pins))
        return lenses[-1]

    began = time.monotonic()
    options = {
        "backend": asked.backend,
        "cache_dir": folder,
        "source": "sliced-pinned",
        "expert_cache": experts // 2,
        "max_context": 256,
        "adapt_every": 0,
        "exact_prompt": asked.exact_prompt,
    }
    for remembered in folder.glob("pins-*.json"):
        remembered.unlink()  # what another case's driver pinned
    found: dict[str, Any] = {}
    with environment(case.environment), installed(asked.backend, wrap, wsl=case.wsl) as made:
        try:
            with api.load(asked.model, **options) as model:
                found["answers"] = answers_of(model)
                found["own_order"] = in_own_order(
                    PROMPTS, model.capabilities, exact_prompt=asked.exact_prompt
                )
                found["allocator"] = next(s.name for s in model.selections if s.role == "allocator")
                found["paths"] = model.beside.actual.paths
                found["degraded"] = len(model.degradations)
                pinned = model.beside.actual.pinned
                found["others"] = lenses[-1].taken - pinned if lenses else 0
        except StrataError as error:
            found["error"] = error
        left = tuple(left_of(made))
    return End(**found, left=left, seconds=time.monotonic() - began)


def judged(case: Case, end: End, wanted: Expected) -> list[str]:
    """What is otherwise than it should be."""
    wrong = list(end.left)
    if end.error is not None:
        if not case.refused:
            wrong.append("it did not start")
        if not (end.error.what and end.error.why and end.error.remedy):
            wrong.append("an error that lacks a line")
        return wrong
    for name in wanted.wrong(end.answers, end.own_order):
        whose = "the first case's" if name in end.own_order else "the CPU's"
        wrong.append(f"another answer than {whose} for the {name} prompt")
    if (end.allocator == "wsl") != case.wsl:
        wrong.append(f"the allocator is {end.allocator}")
    if not end.paths:
        wrong.append("the path is not named")
    if case.path and not any(case.path in path for path in end.paths):
        wrong.append(f"the path is not {case.path!r}")
    return wrong


def shown(answers: Mapping[str, Answer]) -> str:
    """The hashes of the first logits, prompt by prompt."""
    text = ", ".join(f"{name} {answer.logits[:16]}" for name, answer in answers.items())
    return f"{text or 'refused':40}"


def main() -> int:
    """Every case in turn."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--exact-prompt", action="store_true", help="as the CPU, whatever length")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/strata-check")
    asked = parser.parse_args()
    asked.cache.mkdir(parents=True, exist_ok=True)
    checkpoint = open_checkpoint(asked.model)
    layouts, count = checkpoint.experts.layouts, checkpoint.experts.count
    nbytes = sum(count * layout.nbytes for layout in layouts.values()) // 2
    checkpoint.close()
    with api.load(asked.model, backend="cpu", max_context=256) as model:
        answers = answers_of(model)
    wanted, own = Expected(answers), list[frozenset[str]]()
    print(f"{'--backend cpu':38} {shown(answers)}")
    print(f"about {nbytes / MIB:.1f} MiB of experts stay in host memory", flush=True)
    until, failed, skipped = time.monotonic() + asked.seconds, 0, 0
    queue = [FIRST]
    while queue:
        case = queue.pop(0)
        if time.monotonic() > until:
            skipped += 1
            continue
        end = start(asked, case, count * len(layouts), asked.cache)
        if case is FIRST:
            further = cases(nbytes, len(layouts), end.others)
            queue += [each for each in further if asked.only in each.name]
        wrong = judged(case, end, wanted)
        failed += bool(wrong)
        own += [end.own_order] if end.answers else []
        what = " | ".join(str(end.error).splitlines()) if end.error else "; ".join(end.paths)
        say = "; ".join(wrong) if wrong else "as it should be"
        print(f"{case.name:38} {shown(end.answers)} {end.seconds:5.1f} s {say}\n    {what}",
              flush=True)  # fmt: skip
    print(
        f"{failed} cases ended otherwise than they should, {skipped} were left out"
        f"{own_order_of([own], 'the first case')}"
    )
    return 1 if failed or skipped else 0


if __name__ == "__main__":
    sys.exit(main())
