"""What a kernel of a round must not read before it follows: what the launch before it writes.

docs/decisions/0010-dispatch.md, 8. On a device a read that comes too early is a race that no tool
reports; on the host such memory is stale until all threads of a block have followed.
"""

from __future__ import annotations

import numpy as np
from host_build import HostBuild
from kernel_bench import Bench, Case, Ref

KEPT = ("k", "v", "k_scales", "v_scales")

LATE = {
    "embed": ("ids",),
    "add": ("y",),
    "silu_mul": ("gate", "up"),
    "silu_quantise": ("up",),
    "gate_add": ("y", "gate"),
    "combine": ("near", "far"),
    "gather": ("x",),
    "claim": ("mail_picks", "mail_lanes"),
    "signal": ("value",),
    "rms_norm": ("x",),
    "norm_rows": ("x",),
    "norm_linear": ("x",),
    "combine_norm": ("near", "far"),
    "quantise": ("x",),
    "linear": ("x",),
    "linear_add": ("x",),
    "products": ("x",),
    "kv_append": ("rows_k", "rows_v"),
    "heads": ("v",),
    "attention": ("q",),
    "merge": ("partials",),
    "merge_quantise": ("partials",),
    "route": ("logits",),
    "assign": ("picks", "x"),
    "dispatch": ("logits", "x"),
    "gate_up": ("entries", "x"),
    "down": ("inner",),
    "prompt_norm": ("x",),
    "prompt_add_norm": ("y",),
    "prompt_combine_norm": ("experts",),
    "prompt_heads": ("v",),
    "prompt_floats": ("x",),
    "prompt_linear": ("x",),
    "prompt_attention": ("q", "positions", *KEPT),
    "matrix_attention": ("q", "positions", *KEPT),
    "prompt_group": ("picks",),
    "prompt_combine": ("rows",),
    "prompt_gate_up": ("x",),
    "prompt_down": ("inner",),
    "matrix_linear": ("x",),
    "matrix_gate_up": ("x",),
    "matrix_down": ("inner",),
}
"""Buffers of the predecessor by kernel, but for those that the kernel itself writes, and for the
keys and values of the window's own positions, which `late_keys` adds. Those of prompts read no
keys, values or positions early, whoever wrote them."""

OVERWRITES = frozenset({"rope"})
"""Kernels that write over all that the launch before them wrote: nothing of it can be held back."""


def is_late(case: Case) -> bool:
    """Whether a case has such memory, which can be held back where the kernel does not write it."""
    names = [name for name in LATE.get(case.key.name, ()) if name in case.buffers]
    return bool(names) and case.args.get("out") not in map(Ref, names)


def run_late(bench: Bench, build: HostBuild, case: Case) -> dict[str, np.ndarray]:
    """What comes out where each block finds its predecessor's memory stale until it follows."""

    def before(places: dict[str, int], raw: dict[str, np.ndarray]) -> None:
        held = [
            (places[name], bytes(raw[name].size), raw[name].tobytes())
            for name in LATE[case.key.name]
            if name in raw
        ]
        if case.key.name == "attention":
            held += late_keys(case, places, raw)
        build.late = held

    try:
        return bench.run(case, before)
    finally:
        build.late = ()


def late_keys(
    case: Case, places: dict[str, int], raw: dict[str, np.ndarray]
) -> list[tuple[int, bytes, bytes]]:
    """Keys and values of the window's own positions, which the launch before attention writes."""
    positions = case.buffers["positions"].data
    held = []
    for name, data in raw.items():
        if name[0] not in "kv" or name[-1] not in "01":
            continue
        stored = case.buffers[name].data
        mine = positions[int(name[-1]) :: 2]
        if not mine.size:
            continue
        pitch = stored[0, 0].nbytes
        stale = data.reshape(*stored.shape[:2], pitch).copy()
        stale[int(case.args["layer_offset"]) // stored.shape[1], mine.min() :] = 0
        held.append((places[name], stale.tobytes(), data.tobytes()))
    return held
