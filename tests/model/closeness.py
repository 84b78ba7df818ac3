"""How close the cpu backend comes to the float32 oracle: KL and NLL over a passage, per variant.

    python tests/model/closeness.py MODEL... [--kv fp32,fp16,int8] [--tokens 512]

Needs models of one vocabulary each with a tokenizer, or of the kjv-moe folder, whose
`reference.json` holds the passage; prints one row for each model and KV type: KL(reference || cpu)
over every position as mean, median and 95th percentile in nats, and the difference of the NLL.
"""

from __future__ import annotations

import argparse
import json
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


def nll(log_probabilities: np.ndarray, ids: list[int]) -> float:
    """Mean negative log-likelihood of the tokens from the second on."""
    return -float(log_probabilities[np.arange(len(ids) - 1), ids[1:]].mean())


def main() -> None:
    """Measure what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--kv", default="fp32,fp16,int8")
    parser.add_argument("--tokens", type=int, default=512)
    asked = parser.parse_args()
    print("| model | kv | KL mean | median | 95 % | largest | NLL difference |")
    print("|---|---|---|---|---|---|---|")
    for model in asked.models:
        ids = passage_of(model)[: asked.tokens]
        oracle = logs(model, ids, backend="reference")
        for kv in asked.kv.split(","):
            ours = logs(model, ids, backend="cpu", kv=kv)
            kl = (np.exp(oracle) * (oracle - ours)).sum(axis=-1)
            row = [kl.mean(), np.median(kl), np.percentile(kl, 95), kl.max()]
            row.append(nll(ours, ids) - nll(oracle, ids))
            print(f"| {model.name} | {kv} | " + " | ".join(f"{v:.1e}" for v in row) + " |")


if __name__ == "__main__":
    main()
