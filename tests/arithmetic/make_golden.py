"""Write the golden vectors: `python tests/arithmetic/make_golden.py` from the repository's root.

Every file is made by the exact mode from seeded inputs. A file that changes means that the
arithmetic changed, which docs/arithmetic.md must then say with a new version number.
"""

from pathlib import Path

import numpy as np

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact, exact_math, exact_quant

FOLDER = Path(__file__).parent / "golden"
ROWS, TOKENS = 11, 3
SCALES = {"Q6_K": (208,), "MXFP4": ()}
MINIMUMS = {"Q4_1", "Q5_1", "Q4_K", "Q5_K"}


def stored_rows(name, rows, columns, rng):
    """Random bytes of a quantised type whose scales are ordinary, denormal, zero or large."""
    kind = TYPES[name]
    raw = rng.integers(0, 256, (rows, columns // kind.block, kind.block_bytes), dtype=np.uint8)
    for offset in SCALES.get(name, (0, 2) if name in MINIMUMS else (0,)):
        scale = rng.standard_normal(raw.shape[:2]) * 0.02
        scale[1] *= 1e-5
        scale[2, ::2] = 0
        scale[3] = 60000
        raw[..., offset : offset + 2] = scale.astype("<f2")[..., None].view(np.uint8)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(110, 135, raw.shape[:2])
        raw[1, :, 0] = rng.integers(0, 3, raw.shape[1])
        raw[3, :, 0] = 250
    return raw.reshape(-1)


def activations(columns, rng):
    """Rows with a zero block, blocks of tiny and huge values, exact halves, denormals."""
    x = rng.standard_normal((TOKENS, columns)).astype(np.float32)
    x[1, :32] = 0
    x[1, 32:64] *= np.float32(1e-37)
    x[1, 64:96] *= np.float32(1e30)
    x[1, 96:128] *= np.float32(1e-42)
    x[2, :32] = np.arange(-16, 16) + 0.5
    x[2, 32] = 1e4
    return x


def floats(name, rows, columns, rng):
    w = rng.standard_normal((rows, columns)).astype(np.float32)
    w[1] *= np.float32(1e-30)
    if name == "BF16":
        return (w.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1)
    if name == "F16":
        w[1] = rng.standard_normal(columns) * 1e-6
    return w.astype({"F32": "<f4", "F16": "<f2"}[name]).view(np.uint8).reshape(-1)


def golden_type(name):
    rng = np.random.default_rng(TYPES[name].ggml)
    quantised = name not in exact.FLOAT_TYPES
    columns = {1: 200, 32: 352, 256: 768}[TYPES[name].block]
    x = activations(columns, rng)
    if quantised:
        matrix = exact.Matrix(name, ROWS, columns, stored_rows(name, ROWS, columns, rng))
        act = exact_quant.quantise(x)
        total, low = exact_quant.sums(exact_quant.unpack(name, matrix.data, ROWS, columns), act)
        middle = {"q": act.q.astype(np.int16), "scale": act.scale, "sum": act.sum, "S": total}
        if low is not None:
            middle["M"] = low
        middle["one_plane"] = exact.product(x, matrix, exact_quant.ONE_PLANE)
    else:
        matrix = exact.Matrix(name, ROWS, columns, floats(name, ROWS, columns, rng))
        middle = {}
    ids = np.array([3, 0, 10], np.int32)
    return {
        "x": x,
        "weight": matrix.data,
        **middle,
        "out": exact.linear(x, matrix),
        "ids": ids,
        "embed": exact.embed(ids, matrix),
    }


def golden_math():
    rng = np.random.default_rng(11)
    x = np.concatenate(
        [
            rng.uniform(-90, 90, 500),
            rng.standard_normal(500),
            np.exp2(rng.uniform(-40, 0, 200)) * rng.choice([-1, 1], 200),
            [-np.inf, np.inf, -87, 88, -87.00001, 88.00001, 0.0, -0.0, 0.625, 0.62499994],
        ]
    ).astype(np.float32)
    positive = np.abs(x[np.isfinite(x)]) - np.float32(0.5)
    return {
        "x": x,
        "exp": exact_math.exp(x),
        "tanh": exact_math.tanh(x),
        "sigmoid": exact_math.sigmoid(x),
        "silu": exact_math.silu(x[np.isfinite(x)]),
        "log1p_x": positive,
        "log1p": exact_math.log1p(positive),
    }


def golden_ops():
    rng = np.random.default_rng(12)
    x = rng.standard_normal((3, 256)).astype(np.float32)
    w = rng.standard_normal(128).astype(np.float32)
    cos, sin = rng.uniform(-1, 1, (2, 3, 24)).astype(np.float32)
    logits = (rng.integers(-9, 9, (3, 40)) / 4).astype(np.float32)
    picks, weights = exact.route(logits, 4, renormalise=True)
    rows = rng.standard_normal((3, 4, 256)).astype(np.float32)
    gate = rng.standard_normal((3, 1)).astype(np.float32)
    y = rng.standard_normal((3, 256)).astype(np.float32)
    return {
        "x": x,
        "y": y,
        "norm_weight": w,
        "rms_norm": exact.rms_norm(x, w, 128, 1e-6),
        "cos": cos,
        "sin": sin,
        "rope": exact.rope(x, cos, sin, heads=4),
        "logits": logits,
        "picks": picks,
        "weights": weights,
        "softmax_weights": exact.route(logits, 4, renormalise=False)[1],
        "rows": rows,
        "combine": exact.combine(x, rows, weights),
        "gate": gate,
        "gate_add": exact.gate_add(x, y, gate),
        "silu_mul": exact.silu_mul(x, y),
    }


def golden_attention():
    rng = np.random.default_rng(13)
    k, v = rng.standard_normal((2, 300, 2, 32)).astype(np.float32)
    q = (rng.standard_normal((3, 4, 32)) * 2).astype(np.float32)
    positions = np.array([297, 298, 299], np.int32)
    out = {"k": k, "v": v, "q": q, "positions": positions}
    for kv_type in ("fp32", "fp16", "int8"):
        kept = exact.kv_round(k, kv_type), exact.kv_round(v, kv_type)
        out[kv_type] = exact.attention(q, *kept, positions)
        out[f"{kv_type}_window"] = exact.attention(q, *kept, positions, 50)
    return out


def all_golden():
    """Every file's name and arrays."""
    made = {name: golden_type(name) for name in TYPES}
    return made | {"math": golden_math(), "ops": golden_ops(), "attention": golden_attention()}


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for name, arrays in all_golden().items():
        np.savez_compressed(FOLDER / f"{name}.npz", **arrays)
