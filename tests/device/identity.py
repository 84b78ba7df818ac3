"""One hash from every place: a model's tokens and logits on a device against `--backend cpu`.

    python tests/device/identity.py --backend NAME MODEL [MODEL ...] [--matrix] [--devices N]
        [--prefill 16,64,512]

For each model the CPU backend computes a short prompt with greedy continuation, a sampled one and
(with --long) a prompt of 1,900 tokens; then the backend does the same over sources, cache sizes and
pinning, and with --prefill over the chunks of prompts. Prints a line for each way: the hash of the
first logits, whether logits and tokens are the CPU's, and who computed how many experts. Leaves
with 1 where one is not equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

import strata_core  # noqa: E402
from strata_core.engine.messages import Finished  # noqa: E402

Way = dict[str, Any]

PLACES: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("arena", "arena", {}),
    ("mmap", "mmap", {}),
    ("path 1", "sliced-pinned", {"STRATA_COMPLEMENT_PIN_GIB": "all"}),
    ("path 2", "sliced-pinned", {"STRATA_TEST_COMPLEMENT_REFUSE": "1"}),
    ("path 2, partly", "sliced-pinned", {"STRATA_COMPLEMENT_PIN_GIB": "0.002"}),
    ("path 3", "sliced-pinned", {"STRATA_COMPLEMENT_PIN_GIB": "0"}),
    ("pinned prefix", "arena",
     {"STRATA_PARTIAL_PIN": "1", "STRATA_PARTIAL_PIN_GIB": "0.002"}),
)  # fmt: skip
"""Where experts that no device holds lie: a name, the source, the variables."""

CACHES = ("0", "1", "half", "auto")


def ways(
    *, all_caches: bool, devices: int, prefills: Sequence[str] = ("auto",)
) -> list[tuple[str, Way, Mapping[str, str]]]:
    """Name, options and variables of every way; "half" stands for half the model's experts.

    With more than one device the others get two experts each as helpers.
    """
    found: list[tuple[str, Way, Mapping[str, str]]] = []
    helpers = {f"expert_cache_device{n}": "2" for n in range(1, devices)}
    for cache in CACHES:
        for place, source, variables in PLACES:
            if not all_caches and cache != "half" and place != "arena":
                continue
            for prefill in prefills:
                options = {"expert_cache": cache, "source": source, "prefill": prefill, **helpers}
                name = f"{place}, cache {cache}" + (f", {devices} devices" if helpers else "")
                name += f", chunks of {prefill}" if prefill != "auto" else ""
                found.append((name, options, variables))
    return found


def run(model: Path, options: Way, prompts: Mapping[str, tuple[int, ...]]) -> Iterator[Any]:
    """(prompt, hash of the first logits, hash of the tokens, seconds) for each prompt."""
    with strata_core.load(model, **options) as loaded:
        for name, ids in prompts.items():
            begin = time.perf_counter()
            temperature = 0.8 if name == "sampled" else 0.0
            events = loaded.generate(
                list(ids), max_tokens=24, temperature=temperature, seed=7, ignore_eos=True
            )
            (done,) = [event for event in events if isinstance(event, Finished)]
            digest = hashlib.sha256(np.array(done.token_ids, "<i4").tobytes()).hexdigest()
            seconds = time.perf_counter() - begin
            yield name, done.first_logits_sha256[:16], digest[:16], seconds
        yield "counters", loaded.counters, [d.what for d in loaded.degradations], 0.0


def experts_of(model: Path) -> int:
    """Routed experts of a model in all."""
    from strata_core.checkpoint.open import open_checkpoint

    checkpoint = open_checkpoint(model)
    return checkpoint.experts.count * len(checkpoint.experts.layouts)


def prompts_of(vocabulary: int, *, long: bool) -> dict[str, tuple[int, ...]]:
    """Prompts of random ids, the same for every way."""
    drawn = np.random.default_rng(5).integers(0, vocabulary, 1900).tolist()
    found = {"short": tuple(drawn[:11]), "sampled": tuple(drawn[11:40]), "64": tuple(drawn[:64])}
    found["150"] = tuple(drawn[64:214])
    return {**found, "1900": tuple(drawn)} if long else found


def check(model: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of one model."""
    from strata_core.checkpoint.open import open_checkpoint

    vocabulary = open_checkpoint(model).hyper.vocabulary
    context = open_checkpoint(model).hyper.context
    prompts = prompts_of(vocabulary, long=asked.long and context > 2000)
    if context < 200:
        prompts.pop("150")
    if context < 100:
        prompts.pop("64")
        prompts["sampled"] = prompts["sampled"][:12]
    expected = {n: (a, b) for n, a, b, _ in run(model, {"backend": "cpu"}, prompts)}
    lines = []
    more = {"sim_devices": asked.devices} if asked.backend == "sim" else {}
    table = ways(all_caches=asked.matrix, devices=asked.devices, prefills=asked.prefill.split(","))
    for name, options, variables in table:
        if asked.only and asked.only not in name:
            continue
        given = {**options, **more, "backend": asked.backend}
        if given["expert_cache"] == "half":
            given["expert_cache"] = str(experts_of(model) // 2)
        os.environ.update(variables)
        try:
            found = list(run(model, given, prompts))
            error = ""
        except Exception as problem:  # told as a line of the table
            found, error = [], " ".join(str(problem).split())
            if asked.debug:
                raise
        finally:
            for variable in variables:
                del os.environ[variable]
        same = {n: expected[n] == (a, b) for n, a, b, _ in found if n != "counters"}
        counters = next((a for n, a, _, _ in found if n == "counters"), {})
        degraded = next((b for n, _, b, _ in found if n == "counters"), [])
        lines.append(
            {
                "model": model.name,
                "way": name,
                "equal": bool(same) and all(same.values()) and not error,
                "same": same,
                "error": error,
                "served": {lane: c["experts"] for lane, c in counters.items() if c["experts"]},
                "degradations": degraded,
                "seconds": round(sum(s for *_, s in found), 2),
                "hash": next((a for n, a, _, _ in found if n == "short"), ""),
            }
        )
        line = lines[-1]
        verdict = "equal" if line["equal"] else f"DIFFERS {same} {error[:300]}"
        print(f"{model.name:18} {name:38} {line['hash']:16} {verdict} {line['served']}", flush=True)
    return lines


def main() -> int:
    """The whole table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--matrix", action="store_true", help="every cache size at every place")
    parser.add_argument("--devices", type=int, default=1, help="the others are helpers")
    parser.add_argument("--prefill", default="auto", help="tokens of a prompt's chunk, a list")
    parser.add_argument("--only")
    parser.add_argument("--debug", action="store_true")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = [line for model in asked.models for line in check(model, asked)]
    if asked.json:
        asked.json.write_text(json.dumps(lines, indent=1))
    wrong = [line for line in lines if not line["equal"]]
    print(f"{len(lines) - len(wrong)} of {len(lines)} ways equal the CPU's bits")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
