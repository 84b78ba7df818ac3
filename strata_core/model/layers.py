"""Building blocks that families are made of; each emits its kernels into a program."""

from __future__ import annotations

from typing import Literal

from strata_core.checkpoint.hyper import Hyper
from strata_core.kernels.program import Buffer, ProgramBuilder, Weight

QkNorm = Literal["none", "head", "row"]


def stream(b: ProgramBuilder, h: Hyper) -> Buffer:
    """The residual stream: one row of the hidden width a token."""
    return b.buffer("x", "token", h.hidden)


def normed(b: ProgramBuilder, h: Hyper, role: str, layer: int) -> Buffer:
    """The stream through a norm of the layer."""
    out = b.buffer("normed", "token", h.hidden)
    b.emit(
        "rms_norm",
        x=stream(b, h),
        weight=Weight(role, layer),
        out=out,
        dim=h.hidden,
        eps=h.norm_eps,
    )
    return out


def linear(
    b: ProgramBuilder, x: Buffer, role: str, layer: int, width: int, *, bias: bool = False
) -> Buffer:
    """x through the weight of a role; the result's buffer has the role's name."""
    out = b.buffer(role, x.rows, width)
    added = Weight(f"{role}_bias", layer) if bias else None
    b.emit("linear", x=x, weight=Weight(role, layer), bias=added, out=out)
    return out


def attention(
    b: ProgramBuilder, h: Hyper, layer: int, *, qk_norm: QkNorm = "none", bias: bool = False
) -> None:
    """Self-attention with its norm, added to the stream.

    `qk_norm` "head" norms each head of q and k by itself, "row" the whole row; `bias` adds one to
    q, k and v.
    """
    x = normed(b, h, "attn_norm", layer)
    q_width, kv_width = h.heads * h.head_dim, h.kv_heads * h.head_dim
    q = linear(b, x, "attn_q", layer, q_width, bias=bias)
    k = linear(b, x, "attn_k", layer, kv_width, bias=bias)
    v = linear(b, x, "attn_v", layer, kv_width, bias=bias)
    if qk_norm != "none":
        for name, buffer in (("attn_q_norm", q), ("attn_k_norm", k)):
            dim = h.head_dim if qk_norm == "head" else buffer.width
            weight = Weight(name, layer)
            b.emit("rms_norm", x=buffer, weight=weight, out=buffer, dim=dim, eps=h.norm_eps)
    b.emit("rope", x=q, heads=h.heads, head_dim=h.head_dim)
    b.emit("rope", x=k, heads=h.kv_heads, head_dim=h.head_dim)
    b.emit("kv_append", k=k, v=v, layer=layer)
    mixed = b.buffer("attended", "token", q_width)
    b.emit(
        "attention",
        q=q,
        out=mixed,
        layer=layer,
        heads=h.heads,
        kv_heads=h.kv_heads,
        head_dim=h.head_dim,
        window=h.sliding_window,
    )
    y = linear(b, mixed, "attn_output", layer, h.hidden)
    b.emit("add", x=stream(b, h), y=y)


def swiglu(b: ProgramBuilder, h: Hyper, x: Buffer, kind: str, layer: int, width: int) -> Buffer:
    """down(silu(gate(x)) * up(x)) with the dense weights `kind`_gate, _up and _down."""
    gate = linear(b, x, f"{kind}_gate", layer, width)
    up = linear(b, x, f"{kind}_up", layer, width)
    b.emit("silu_mul", gate=gate, up=up, out=gate)
    return linear(b, gate, f"{kind}_down", layer, h.hidden)


def feed_forward(b: ProgramBuilder, h: Hyper, layer: int) -> None:
    """The dense or the routed feed-forward of a layer with its norm, added to the stream."""
    x = normed(b, h, "ffn_norm", layer)
    if layer in h.dense_layers:
        b.emit("add", x=stream(b, h), y=swiglu(b, h, x, "ffn", layer, h.dense_ffn))
        return
    logits = linear(b, x, "router", layer, h.experts)
    picks = b.buffer("picks", "pick", 1, "int32")
    weights = b.buffer("pick_weights", "pick", 1)
    b.emit(
        "route",
        logits=logits,
        picks=picks,
        weights=weights,
        top_k=h.top_k,
        renormalise=h.renormalise,
    )
    rows = b.buffer("expert_rows", "pick", h.hidden)
    b.emit("experts", x=x, picks=picks, out=rows, layer=layer)
    b.emit("combine", x=stream(b, h), rows=rows, weights=weights, top_k=h.top_k)
    if h.shared_ffn:
        y = swiglu(b, h, x, "shared", layer, h.shared_ffn)
        gate = linear(b, x, "shared_router", layer, 1)
        b.emit("gate_add", x=stream(b, h), y=y, gate=gate)
