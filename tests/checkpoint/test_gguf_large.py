"""A model of 17 GB opens at once and without being read: a real header over a sparse file."""

from __future__ import annotations

import os
import time
from math import prod
from pathlib import Path

import gguf
import numpy as np
import pytest

from strata_core.checkpoint.open import open_checkpoint

VOCABULARY, LAYERS, EXPERTS, HIDDEN, INNER, HEADS, KV_HEADS, HEAD = (
    *(150_000, 48, 128, 2048),
    *(768, 32, 4, 128),
)


def declared() -> list[tuple[str, tuple[int, ...], str]]:
    """(name, shape, type) of every tensor of a model with 48 layers of 128 experts."""
    found: list[tuple[str, tuple[int, ...], str]] = [
        ("token_embd.weight", (VOCABULARY, HIDDEN), "Q8_0"),
        ("output.weight", (VOCABULARY, HIDDEN), "Q8_0"),
        ("output_norm.weight", (HIDDEN,), "F32"),
    ]
    layer: list[tuple[str, tuple[int, ...], str]] = [
        ("attn_q", (HEADS * HEAD, HIDDEN), "Q8_0"),
        ("attn_k", (KV_HEADS * HEAD, HIDDEN), "Q8_0"),
        ("attn_v", (KV_HEADS * HEAD, HIDDEN), "Q8_0"),
        ("attn_output", (HIDDEN, HEADS * HEAD), "Q8_0"),
        ("attn_norm", (HIDDEN,), "F32"),
        ("attn_q_norm", (HEAD,), "F32"),
        ("attn_k_norm", (HEAD,), "F32"),
        ("ffn_norm", (HIDDEN,), "F32"),
        ("ffn_gate_inp", (EXPERTS, HIDDEN), "F32"),
        ("ffn_gate_exps", (EXPERTS, INNER, HIDDEN), "Q4_K"),
        ("ffn_up_exps", (EXPERTS, INNER, HIDDEN), "Q4_K"),
        ("ffn_down_exps", (EXPERTS, HIDDEN, INNER), "Q4_K"),
    ]
    for i in range(LAYERS):
        found.extend((f"blk.{i}.{name}.weight", shape, kind) for name, shape, kind in layer)
    return found


def write_sparse(path: Path) -> None:
    writer = gguf.GGUFWriter(path, "qwen3moe")
    writer.add_block_count(LAYERS)
    writer.add_context_length(40960)
    writer.add_embedding_length(HIDDEN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD)
    writer.add_value_length(HEAD)
    writer.add_expert_count(EXPERTS)
    writer.add_expert_used_count(8)
    writer.add_expert_feed_forward_length(INNER)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"token{i}" for i in range(VOCABULARY)])
    writer.add_token_merges([f"a b{i}" for i in range(VOCABULARY)])
    total = 0
    for name, shape, kind in declared():
        block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
        nbytes = prod(shape) // block * block_bytes
        total += -(-nbytes // 32) * 32
        dtype = np.dtype(np.float32 if kind == "F32" else np.uint8)
        raw = shape if kind == "F32" else (*shape[:-1], shape[-1] // block * block_bytes)
        writer.add_tensor_info(name, raw, dtype, nbytes, gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    try:
        os.truncate(path, -(-path.stat().st_size // 32) * 32 + total)
    except OSError as error:
        pytest.skip(f"no sparse file of 17 GB can be made here: {error}")


def test_a_model_of_17_gb_opens_at_once(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    write_sparse(path)
    assert path.stat().st_size > 17e9
    before = resident()
    times = []
    for _ in range(3):
        began = time.thread_time()
        checkpoint = open_checkpoint(path)
        times.append(time.thread_time() - began)
    assert min(times) < 0.3
    assert resident() - before < 64 << 20
    assert checkpoint.experts.layouts[47].nbytes == 3 * INNER * HIDDEN // 256 * 144


def resident() -> int:
    """Bytes of this process in memory; 0 where the system has no /proc."""
    facts = Path("/proc/self/statm")
    if not facts.exists():
        return 0
    return int(facts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
