"""The families Strata knows, and a whole model as a program."""

from __future__ import annotations

from collections.abc import Mapping

from strata_core.checkpoint.hyper import Hyper
from strata_core.errors import CheckpointError
from strata_core.kernels.program import Program, ProgramBuilder, Weight
from strata_core.model import mixtral, olmoe, qwen2_moe, qwen3_moe
from strata_core.model.family import Family
from strata_core.model.layers import stream

FAMILIES: Mapping[str, Family] = {
    module.FAMILY.name: module.FAMILY for module in (qwen3_moe, qwen2_moe, olmoe, mixtral)
}


def build_program(h: Hyper) -> Program:
    """Embedding, the family's layers, and the head over the wanted rows."""
    family = FAMILIES.get(h.family)
    if family is None:
        raise CheckpointError(
            f"architecture {h.family} is not supported",
            f"there are family files for {', '.join(sorted(FAMILIES))}",
            "use a model of one of these families",
        )
    b = ProgramBuilder()
    x = stream(b, h)
    b.emit("embed", table=Weight("token_embedding"), out=x)
    for i in range(h.layers):
        family.layer(b, h, i)
    wanted = b.buffer("wanted", "logits", h.hidden)
    b.emit("gather", x=x, out=wanted)
    final = b.buffer("final", "logits", h.hidden)
    norm = Weight("output_norm")
    b.emit("rms_norm", x=wanted, weight=norm, out=final, dim=h.hidden, eps=h.norm_eps)
    logits = b.buffer("logits", "logits", h.vocabulary)
    head = Weight("token_embedding" if h.tied else "output")
    b.emit("linear", x=final, weight=head, bias=None, out=logits)
    return b.finish(
        logits=logits,
        vocabulary=h.vocabulary,
        top_k=h.top_k,
        rope=h.rope,
        kv_layers=h.layers,
        kv_width=h.kv_heads * h.head_dim,
    )
