"""From a kernel's key to the source that a run-time compiler takes.

One text for every run-time compiler: lines that say what to compile for, shared headers, the file
that holds the kernel. Compilers need no include path.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
from attrs import frozen

from strata_core.checkpoint.types import TYPES
from strata_core.kernels.device.prompt_table import SHORT_HEAD, attention_room, matrix_room
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.runtime import KernelKey

HERE = Path(__file__).parent / "src"

HEADERS = ("portable.h", "exact.h", "weights.h", "layout.h", "stage.h", "kv.h", "wait.h")

MORE_HEADERS = {
    "products.cu": ("multiply.h",),
    "experts.cu": ("multiply.h",),
    "prompt_matrix.cu": ("tiles.h",),
}
"""Headers behind those, by the file that includes them."""

FILES = {
    "elementwise.cu": (
        "embed", "rope", "add", "silu_mul", "gate_add", "combine", "gather", "signal",
    ),
    "rows.cu": ("rms_norm", "norm_rows", "combine_norm", "heads", "silu_quantise"),
    "products.cu": ("quantise", "linear", "linear_add", "norm_linear", "products"),
    "experts.cu": ("gate_up", "down"),
    "attention.cu": ("kv_append", "attention", "merge", "merge_quantise"),
    "routing.cu": ("route", "assign", "dispatch", "claim"),
    "prompt_products.cu": ("prompt_linear", "prompt_gate_up", "prompt_down"),
    "prompt_rows.cu": (
        "prompt_norm", "prompt_add_norm", "prompt_combine_norm", "prompt_heads",
    ),
    "prompt_floats.cu": ("prompt_floats",),
    "prompt_matrix.cu": ("matrix_linear", "matrix_gate_up", "matrix_down"),
    "prompt_attention.cu": ("prompt_attention",),
    "prompt_long_heads.cu": (),
    "matrix_attention.cu": ("matrix_attention",),
    "prompt_routing.cu": ("prompt_group", "prompt_combine"),
}  # fmt: skip
"""Which file holds which kernels; `prompt_long_heads.cu` has prompt_attention for longer heads."""

FILE_OF = {kernel: file for file, kernels in FILES.items() for kernel in kernels}

FLOATS = frozenset({"F32", "F16", "BF16"})
"""Types whose rows are multiplied as floats."""


@frozen
class Source:
    """What to compile: the text, a name for messages, and the entry to look up afterwards."""

    text: str
    name: str
    entry: str


def source_of(key: KernelKey) -> Source:
    """The source of a kernel for its parameters. Raises ValueError for one that does not exist."""
    kernel = DEVICE_KERNELS.get(key.name)
    if kernel is None or len(key.parameters) != len(kernel.parameters):
        raise ValueError(f"there is no device kernel {key.name} for {key.parameters}")
    named = dict(zip(kernel.parameters, key.parameters, strict=True))
    lines, file = [f"#define KERNEL_{key.name}", *_definitions(named)], FILE_OF[key.name]
    if key.name == "prompt_attention":
        head_dim = int(named["head_dim"])
        file = "prompt_long_heads.cu" if head_dim > SHORT_HEAD else file
        lines.append(f"#define ROOM_BYTES {attention_room(head_dim)}")
    if file == "prompt_matrix.cu":
        lines.append(f"#define ROOM_BYTES {matrix_room()}")
    headers = (*HEADERS, *MORE_HEADERS.get(file, ()))
    text = "\n".join([*lines, "", *map(_read, headers), _read(file)])
    label = "_".join([key.name, *map(str, key.parameters)])
    return Source(text, f"strata_{label}.cu", "add_rows" if key.name == "add" else key.name)


def _definitions(named: dict[str, str | int]) -> list[str]:
    lines = []
    for name, value in named.items():
        if name == "kv":
            lines.append(f"#define KV_{value}")
        elif name == "head_dim":
            scale = np.float32(1.0 / np.sqrt(np.float64(int(value))))
            lines += [f"#define HEAD_DIM {value}", f"#define SCALE {float(scale).hex()}f"]
        else:
            if value not in TYPES:
                raise ValueError(f"there is no weight type {value}")
            lines.append(f"#define {name.upper()} {value}")
    factor = named.get("type") or named.get("type_a") or named.get("gate")
    if factor is not None and factor not in FLOATS:
        lines.append("#define QUANTISED")
    if named.get("down") is not None and named["down"] not in FLOATS:
        lines.append("#define DOWN_QUANTISED")
    return lines


@cache
def _read(name: str) -> str:
    return (HERE / name).read_text("utf-8")
