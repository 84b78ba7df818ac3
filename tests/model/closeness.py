"""How close a backend comes to the float32 oracle: KL and NLL over a passage, per variant.

    python tests/model/closeness.py MODEL... [--backend cpu] [--kv fp32,fp16,int8] [--tokens 512]
        [--against BACKEND] [--given]

Needs models of the kjv-moe folder, whose `reference.json` holds the passage; prints one row for
each model and KV type: KL(reference || backend) over every position as mean, median and 95th
percentile in nats, the difference of the NLL, and whether the bits are equal. With `--against cpu`
the CPU backend with the same keys and values takes the oracle's place, which is what section 11 of
docs/arithmetic.md asks of prompts that a backend sums in an order of its own. With --given the
oracle is not computed here, but that of `reference.npz`: KL after each of its prompts, how many of
the greedy tokens are the same, the difference of the passage's NLL, and whether the logits are the
CPU backend's bit for bit (its prompts are short, so that windows compute them). Models that are not
there are left out, and the last line names them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np

import strata_core


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities in float64 over the last axis."""
    scores = logits.astype(np.float64)
    scores -= scores.max(axis=-1, keepdims=True)
    return scores - np.log(np.exp(scores).sum(axis=-1, keepdims=True))


def passage_of(model: Path) -> list[int]:
    """The ids of the passage beside the model."""
    folder = model if model.is_dir() else model.parent
    return [int(i) for i in json.loads((folder / "reference.json").read_text())["passage_ids"]]


def logs(model: Path, ids: list[int], **options: object) -> np.ndarray:
    """Log-probabilities of every position with a backend and a KV type."""
    with strata_core.load(model, max_context=len(ids), **options) as loaded:
        return log_softmax(loaded.logits(ids))


def row_of(model: Path, kv: str, ids: list[int], oracle: np.ndarray, ours: np.ndarray) -> str:
    """A row of the table: both are log-probabilities of every position."""
    kl = (np.exp(oracle) * (oracle - ours)).sum(axis=-1)
    row = [kl.mean(), np.median(kl), np.percentile(kl, 95), kl.max()]
    row.append(nll(ours, ids) - nll(oracle, ids))
    equal = " yes |" if oracle.tobytes() == ours.tobytes() else " no |"
    return f"| {model.name} | {kv} | " + " | ".join(f"{v:.1e}" for v in row) + " |" + equal


def nll(log_probabilities: np.ndarray, ids: list[int]) -> float:
    """Mean negative log-likelihood of the tokens from the second on."""
    return -float(log_probabilities[np.arange(len(ids) - 1), ids[1:]].mean())


def variant_of(model: Path) -> str:
    """The name that `reference.json` has for a file of the folder, or for the folder itself."""
    return "bf16" if model.is_dir() else model.stem.partition("-")[2]


def given(model: Path, backend: str, kv: str) -> tuple[str, bool]:
    """A row of the table against the oracle beside the model, and whether the bits are equal."""
    folder = model if model.is_dir() else model.parent
    known, variant = json.loads((folder / "reference.json").read_text()), variant_of(model)
    oracle = np.load(folder / "reference.npz")
    wanted, ids = known["variants"][variant], passage_of(model)
    kl, same, asked = [], 0, 0
    bits: dict[str, list[bytes]] = {}
    for name in dict.fromkeys((backend, "cpu")):
        with strata_core.load(model, backend=name, kv=kv, learn=False) as loaded:
            bits[name] = []
            for i, prompt in enumerate(known["prompt_ids"]):
                logits = loaded.logits(prompt)[-1]
                bits[name].append(logits.tobytes())
                if name != backend:
                    continue
                expected = log_softmax(oracle[f"{variant}/logits{i}"])
                kl.append(float((np.exp(expected) * (expected - log_softmax(logits))).sum()))
                greedy = wanted["greedy"][i]
                *_, done = loaded.generate(prompt, max_tokens=len(greedy), ignore_eos=True)
                pairs = zip(done.token_ids, greedy, strict=False)
                same, asked = same + sum(a == b for a, b in pairs), asked + len(greedy)
            if name == backend:
                apart = loaded.perplexity(ids, len(ids)).nll - wanted["passage_nll"]
    equal = bits[backend] == bits["cpu"]
    row = (
        f"| {model.name} | {kv} | {np.mean(kl):.1e} | {max(kl):.1e} | {same} of {asked} | "
        f"{apart:+.1e} | {'yes' if equal else 'NO'} |"
    )
    return row, equal


def main() -> int:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--kv", default="fp32,fp16,int8")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--against", default="reference", help="the backend that is the oracle")
    parser.add_argument("--given", action="store_true", help="against the oracle beside the model")
    asked = parser.parse_args()
    models = [model for model in asked.models if model.exists()]
    gone = ", ".join(model.name for model in asked.models if model not in models)
    left_out = f"; not there, left out: {gone}" if gone else ""
    if asked.given:
        print("| model | kv | KL mean | largest | greedy tokens | NLL apart | the CPU's bits |")
        print("|---|---|---|---|---|---|---|")
        equal = []
        for model in models:
            for kv in asked.kv.split(","):
                row, same = given(model, asked.backend, kv)
                print(row, flush=True)
                equal.append(same)
        print(f"{sum(equal)} of {len(equal)} rows have the CPU's bits{left_out}")
        return 0 if equal and all(equal) else 1
    print("| model | kv | KL mean | median | 95 % | largest | NLL difference | equal bits |")
    print("|---|---|---|---|---|---|---|---|")
    for model in models:
        ids = passage_of(model)[: asked.tokens]
        for kv in asked.kv.split(","):
            more = {} if asked.against == "reference" else {"kv": kv}
            oracle = logs(model, ids, backend=asked.against, **more)
            ours = logs(model, ids, backend=asked.backend, kv=kv)
            print(row_of(model, kv, ids, oracle, ours), flush=True)
    print(f"{len(models)} models{left_out}")
    return 0 if models else 1


if __name__ == "__main__":
    sys.exit(main())
