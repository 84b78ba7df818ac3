"""`strata inspect`: what is in a model's files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import attrs

from strata_core.cli.command import Invocation, command, model_argument
from strata_core.cli.console import Console
from strata_core.cli.words import size, table

if TYPE_CHECKING:
    from strata_core.checkpoint.open import Checkpoint
    from strata_core.tokenizer import Tokenizer


@command("inspect", [model_argument()])
def command_object(invocation: Invocation, model: str) -> None:
    """Say what is in MODEL's files.

    Shows architecture, sizes, weight types by role, experts and tokenizer. Only headers and
    configuration are read, and every tensor's presence, shape and place in its file is checked.
    """
    from strata_core.api import model_path
    from strata_core.checkpoint.open import open_checkpoint
    from strata_core.tokenizer import open_tokenizer

    checkpoint = open_checkpoint(model_path(model))
    document = describe(checkpoint, open_tokenizer(checkpoint))
    invocation.console.document(document)
    _print(invocation.console, document)


def describe(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What `strata inspect --json` prints: the checkpoint's metadata, sizes, experts, tokenizer.

    `experts.classes` groups the layers whose blobs have the same layout.
    """
    hyper = checkpoint.hyper
    classes: dict[tuple[tuple[str, ...], int], list[int]] = {}
    for layer, layout in sorted(checkpoint.experts.layouts.items()):
        kinds = tuple(part.type for part in layout.parts)
        classes.setdefault((kinds, layout.nbytes), []).append(layer)
    sizes = attrs.asdict(hyper)
    sizes["dense_layers"] = sorted(hyper.dense_layers)
    sizes["eos"] = list(hyper.eos)
    return {
        **checkpoint.metadata(),
        "hyper": sizes,
        "experts": {
            "layers": len(checkpoint.experts.layouts),
            "per_layer": checkpoint.experts.count,
            "asked_per_token": hyper.top_k,
            "bytes": checkpoint.experts.count
            * sum(layout.nbytes for layout in checkpoint.experts.layouts.values()),
            "classes": [
                {"types": list(kinds), "bytes": nbytes, "layers": layers}
                for (kinds, nbytes), layers in classes.items()
            ],
        },
        "tokenizer": {"vocabulary": tokenizer.vocabulary} if tokenizer else None,
        "chat_template": tokenizer is not None and tokenizer.has_chat_template,
    }


def _print(console: Console, document: dict[str, Any]) -> None:
    hyper, experts = document["hyper"], document["experts"]
    total = sum(kind["bytes"] for kind in document["types"].values())
    asked = f"{experts['per_layer']} a layer, {experts['asked_per_token']} asked a token"
    rows = [
        ("model", f"{document['name'] or '(no name)'}, {document['architecture']}"),
        ("files", f"{len(document['files'])} ({document['form']}), weights {size(total)}"),
        ("layers", f"{hyper['layers']}, {experts['layers']} of them with routed experts"),
        ("width", f"{hyper['hidden']}, {hyper['heads']} heads, {hyper['kv_heads']} KV heads"),
        ("context", f"{hyper['context']} tokens, vocabulary {hyper['vocabulary']}"),
        ("experts", f"{asked}, {size(experts['bytes'])} in all"),
        ("tokenizer", _tokenizer(document)),
    ]
    console.text(table([], rows))
    console.line()
    console.text(
        table(
            ["blob of", "gate", "up", "down", "size"],
            [
                (f"layers {_ranges(item['layers'])}", *item["types"], size(item["bytes"]))
                for item in experts["classes"]
            ],
        )
    )
    console.line()
    console.text(
        table(
            ["role", "bytes by type"],
            [
                (role, ", ".join(f"{kind} {size(nbytes)}" for kind, nbytes in kinds.items()))
                for role, kinds in document["roles"].items()
            ],
        )
    )
    if document["unclaimed"]:
        console.line()
        console.line(f"not used: {', '.join(document['unclaimed'])}")


def _tokenizer(document: dict[str, Any]) -> str:
    if document["tokenizer"] is None:
        return "none: prompts are token ids"
    return "yes, " + ("with" if document["chat_template"] else "no") + " chat template"


def _ranges(numbers: list[int]) -> str:
    """ "0-3, 5" for 0, 1, 2, 3, 5."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) + (f"-{run[-1]}" if len(run) > 1 else "") for run in runs)
