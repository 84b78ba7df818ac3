"""Fused kernels of prompts: the runs are those of windows, for more tokens than a window has.

A block has a row of a norm, a warp a head; each thread takes four neighbouring elements at a time
where it can. Fewer tokens go by the fused kernels of windows, or one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

from strata_core.kernels.device.entry import DeviceKernel, Geometry, Values
from strata_core.kernels.device.fused_entry import (
    HEADS_ARGS,
    HEADS_RUNS,
    NORM_ARGS,
    NORM_ENDS,
    NORM_PART,
    QUANTISE_PART,
    WIDEST_ROW,
    Fused,
    Part,
)
from strata_core.kernels.device.layout import MOST_TOKENS

HEADS_OF_BLOCK = 16
"""Heads of one block of `prompt_heads`, of q and then of k: two for each of its warps."""

TURNED = (64, 128, 256)
"""Sizes of heads that it takes, all of whose elements turn."""


def _row(a: Values) -> Geometry:
    return Geometry((int(a["rows"]), 1, 1), (256, 1, 1), 4 * int(a["dim"]))


def _heads(a: Values) -> Geometry:
    across = -(-(int(a["heads"]) + int(a["kv_heads"])) // HEADS_OF_BLOCK)
    return Geometry((across, int(a["tokens"]), 1), (256, 1, 1))


def _row_fits(a: Values, _: Sequence[str | int]) -> bool:
    return a["rows"] > MOST_TOKENS and a["dim"] <= WIDEST_ROW and a["dim"] % 32 == 0


def _heads_fit(a: Values, _: Sequence[str | int]) -> bool:
    dim, turned = a["head_dim"], 2 * a["half"]
    whole = dim in TURNED and turned == dim and a["width"] == a["kv_heads"] * dim
    return a["tokens"] > MOST_TOKENS and whole


_SUM = Part(kernel="add", args={"width": "dim"})
_COMBINE = Part(kernel="prompt_combine", args={"rows": "experts", "tokens": "rows", "width": "dim"})

PROMPT_FUSED = (
    Fused(
        kernel=DeviceKernel(
            name="prompt_norm",
            args={"x": "ptr", **NORM_ARGS, **NORM_ENDS},
            geometry=_row,
            summary="as `norm_rows`",
        ),
        runs=((NORM_PART, QUANTISE_PART),),
        fits=_row_fits,
    ),
    Fused(
        kernel=DeviceKernel(
            name="prompt_add_norm",
            args={"x": "ptr", "y": "ptr", **NORM_ARGS, **NORM_ENDS},
            geometry=_row,
            summary="add, then rms_norm of whole rows and, unless records is 0, their records",
        ),
        runs=((_SUM, NORM_PART, QUANTISE_PART), (_SUM, NORM_PART)),
        fits=_row_fits,
    ),
    Fused(
        kernel=DeviceKernel(
            name="prompt_combine_norm",
            args={
                "x": "ptr",
                "experts": "ptr",
                "weights": "ptr",
                **NORM_ARGS,
                "top_k": "i32",
                **NORM_ENDS,
            },
            geometry=_row,
            summary="prompt_combine of the rows `experts`, then rms_norm of whole rows and, unless "
            "records is 0, their records",
        ),
        runs=((_COMBINE, NORM_PART, QUANTISE_PART), (_COMBINE, NORM_PART)),
        fits=_row_fits,
    ),
    Fused(
        kernel=DeviceKernel(
            name="prompt_heads",
            parameters=("kv",),
            args=HEADS_ARGS,
            geometry=_heads,
            summary="as `heads`, of heads that turn wholly",
        ),
        runs=HEADS_RUNS,
        fits=_heads_fit,
    ),
)
"""They come before those of windows, which take the same runs."""
