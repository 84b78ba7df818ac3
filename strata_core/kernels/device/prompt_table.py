"""The device kernels of prompts: chunks of many tokens, experts' tokens grouped by expert.

They keep the orders of docs/arithmetic.md to the letter, so that a token has the bits that a window
gives it. Products go tile by tile: the rows of a block's weights stay while up to PROMPT_TILE
tokens at a time pass by. On a device that has matrix units, the kernels of ON_MATRIX_UNITS take the
place of those that multiply quantised rows, and of attention; they have the same arguments, and
orders of their own (section 11 there).

`wave`: entries WAVE of the experts that one launch computes; `starts` int32 [experts + 1] and
`order` int32 [entries]: the entries of expert e are order[starts[e]] to order[starts[e + 1] - 1],
ascending. Entry i is router position i % top_k of token i / top_k.
"""

from __future__ import annotations

from collections.abc import Iterable

from attrs import evolve

from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device.entry import DeviceKernel, Geometry, Kind, Values, each, over
from strata_core.runtime import Launch

PROMPT_ROWS = 32
"""Weight rows of one block: eight warps of four rows, eight lanes a row."""

PROMPT_TILE = 16
"""Tokens that pass a block's rows together."""

FLOAT_ROWS, FLOAT_TOKENS = 64, 32
"""Rows of floats of one block of `prompt_floats`, and its tokens."""

MATRIX_ROWS = 128
"""Weight rows of a tile of matrix units; of gate and up half of them each."""

MATRIX_TILE = 128
"""Tokens of such a tile where a block may have `matrix_room` bytes of shared memory; else half."""

MATRIX_WARPS = 8
"""Warps of a block that computes one."""

LEAST_TOKENS = 16
MATRIX_BLOCKS = 256
"""Tokens of the narrowest tile of a dense product, and how many blocks are worth narrower ones."""

MOST_SPREAD = 16
"""Blocks that at most share the tokens of an expert's rows on matrix units."""

PLAIN_SPREAD_FROM = 256
PLAIN_SPREAD = 4
"""Without them: from so many tokens on, so many blocks do."""

SHORT_HEAD = 128
"""Elements of the longest head for which `prompt_attention` has a block of ATTENTION_QUERIES."""

ATTENTION_QUERIES = 64
"""(token, head) pairs of one block of `prompt_attention`; they share their keys and values."""

PROMPT_PAIRS = 8
"""(token, head) pairs of one block of longer heads, a warp each."""


def _linear(a: Values) -> Geometry:
    tiles = -(-int(a["tokens"]) // PROMPT_TILE)
    return Geometry((-(-int(a["rows"]) // PROMPT_ROWS), tiles, 1), (256, 1, 1))


def _floats(a: Values) -> Geometry:
    tiles = -(-int(a["tokens"]) // FLOAT_TOKENS)
    return Geometry((-(-int(a["rows"]) // FLOAT_ROWS), tiles, 1), (256, 1, 1))


def _grouped(a: Values) -> Geometry:
    """A line of blocks for each expert; each takes every `spread`-th tile of its tokens."""
    across = -(-int(a["rows"]) // PROMPT_ROWS)
    return Geometry((across, int(a["experts"]), int(a["spread"])), (256, 1, 1))


def matrix_room() -> int:
    """Bytes of shared memory of a block of `matrix_linear` and the like: the sources' `Room`.

    Two steps of the tokens' blocks, one of the rows' with their factors; what is known of a token.
    Devices of compute capability 7.5 have less, and tiles of half as many tokens.
    """
    rows, tokens, step = MATRIX_ROWS, MATRIX_TILE, 4
    pieces = 16 * (2 * 4 * step * tokens + 2 * step * rows)
    return pieces + 8 * step * (rows + 4) + 8 * step * tokens + (16 + 16 + 4 + 4) * tokens + 16


def _matrix_linear(a: Values) -> Geometry:
    """Where that makes few blocks, they have fewer tokens each."""
    across, tokens = -(-int(a["rows"]) // MATRIX_ROWS), int(a["tokens"])
    wanted = min(-(-tokens // LEAST_TOKENS), MATRIX_BLOCKS // across)
    tiles = max(1, wanted, -(-tokens // MATRIX_TILE))
    return Geometry((across, tiles, 1), (32 * MATRIX_WARPS, 1, 1), matrix_room())


def _matrix_gate_up(a: Values) -> Geometry:
    return _matrix_grouped(a, MATRIX_ROWS // 2)


def _matrix_down(a: Values) -> Geometry:
    return _matrix_grouped(a, MATRIX_ROWS)


def _matrix_grouped(a: Values, rows: int) -> Geometry:
    """As `_grouped`: all experts' first tiles, the largest ones, come before the others."""
    grid = (-(-int(a["rows"]) // rows), int(a["experts"]), int(a["spread"]))
    return Geometry(grid, (32 * MATRIX_WARPS, 1, 1), matrix_room())


def attention_room(head_dim: int) -> int:
    """Bytes of shared memory of a block of `prompt_attention`: the sources' `Room`.

    Half of the queries' stripes; as many of the keys, or weights and values; what is known of each
    query. It is what every accelerator has, at most.
    """
    if head_dim > SHORT_HEAD:
        return 0
    queries, span, chunk = ATTENTION_QUERIES, 64, 16
    group = 16 * (4 if head_dim % 64 == 0 else 2)
    keys = head_dim // 2 * (span + 4)
    weights = span * (queries + 8) + chunk * -(-head_dim // group) * group
    each = head_dim // 2 * (queries + 4) + (3 * span // 32 + 9) * queries
    return 4 * (each + max(keys, weights)) + 64


def _attention(a: Values) -> Geometry:
    pairs, head_dim = int(a["tokens"]) * int(a["group"]), int(a["width"]) // int(a["kv_heads"])
    if head_dim > SHORT_HEAD:
        return Geometry((int(a["kv_heads"]), -(-pairs // PROMPT_PAIRS), 1), (256, 1, 1))
    grid = (int(a["kv_heads"]), -(-pairs // ATTENTION_QUERIES), 1)
    return Geometry(grid, (128, 1, 1), attention_room(head_dim))


def _matrix_attention(a: Values) -> Geometry:
    pairs = int(a["tokens"]) * int(a["group"])
    return Geometry((int(a["kv_heads"]), -(-pairs // ATTENTION_QUERIES), 1), (128, 1, 1))


_LINEAR_ARGS: dict[str, Kind] = {
    "weight": "ptr",
    "x": "ptr",
    "out": "ptr",
    "bias": "ptr",
    "stride": "i64",
    "tokens": "i32",
    "rows": "i32",
    "columns": "i32",
}

_PLAIN = (
    DeviceKernel(
        name="prompt_linear",
        parameters=("type",),
        args=_LINEAR_ARGS,
        geometry=_linear,
        summary="as `linear`, for any number of tokens and rows that are quantised",
    ),
    DeviceKernel(
        name="prompt_floats",
        parameters=("type",),
        args=_LINEAR_ARGS,
        geometry=_floats,
        summary="`prompt_linear` of rows of floats",
    ),
    DeviceKernel(
        name="prompt_attention",
        parameters=("kv", "head_dim"),
        args={
            "q": "ptr",
            "out": "ptr",
            "positions": "ptr",
            "places": "ptr",
            "layer_offset": "i64",
            "tokens": "i32",
            "width": "i32",
            "kv_heads": "i32",
            "group": "i32",
            "window": "i32",
        },
        geometry=_attention,
        summary="as `attention` and `merge` together; the tokens are of one sequence, positions "
        "ascending; out: float32 [tokens, heads, head_dim]",
    ),
    DeviceKernel(
        name="prompt_group",
        args={"picks": "ptr", "starts": "ptr", "order": "ptr", "count": "i32", "experts": "i32"},
        geometry=each("experts", threads=512),
        summary="`starts` and `order` of `count` picks, int32",
    ),
    DeviceKernel(
        name="prompt_gate_up",
        parameters=("gate", "up", "down"),
        args={
            "wave": "ptr",
            "starts": "ptr",
            "order": "ptr",
            "x": "ptr",
            "inner": "ptr",
            "status": "ptr",
            "gate_stride": "i64",
            "up_stride": "i64",
            "experts": "i32",
            "top_k": "i32",
            "rows": "i32",
            "columns": "i32",
            "spread": "i32",
            "op": "i32",
        },
        geometry=_grouped,
        summary="as `gate_up` for all entries of the `experts` experts of a wave; inner rows are "
        "numbered by entry",
    ),
    DeviceKernel(
        name="prompt_down",
        parameters=("type",),
        args={
            "wave": "ptr",
            "starts": "ptr",
            "order": "ptr",
            "inner": "ptr",
            "out": "ptr",
            "stride": "i64",
            "experts": "i32",
            "rows": "i32",
            "columns": "i32",
            "spread": "i32",
        },
        geometry=_grouped,
        summary="as `down` for all entries of a wave; entry i's result is row i of out, float32 "
        "[entries, rows]",
    ),
    DeviceKernel(
        name="prompt_combine",
        args={
            "x": "ptr",
            "rows": "ptr",
            "weights": "ptr",
            "tokens": "i32",
            "width": "i32",
            "top_k": "i32",
        },
        geometry=over("width", 256, "tokens"),
        summary="as `combine`; entry i's row is row i of rows",
    ),
)

OF_FLOATS = {"prompt_linear": "prompt_floats"}
"""What takes the place of a kernel where rows are floats."""

ON_MATRIX_UNITS = {
    "prompt_linear": ("matrix_linear", _matrix_linear),
    "prompt_gate_up": ("matrix_gate_up", _matrix_gate_up),
    "prompt_down": ("matrix_down", _matrix_down),
    "prompt_attention": ("matrix_attention", _matrix_attention),
}
"""What takes the place of a kernel where a device has matrix units, and its grid rule.

`multiplying` and `attending` say where it does.
"""

MATRIX_KV = frozenset({"fp16", "int8"})
MATRIX_HEADS = frozenset({32, 64, 80, 96, 128})
"""Types of keys and values, and sizes of heads, that `matrix_attention` is made for."""


def _on_matrix_units(kernel: DeviceKernel) -> DeviceKernel:
    name, geometry = ON_MATRIX_UNITS[kernel.name]
    summary = f"`{kernel.name}` on matrix units"
    return evolve(kernel, name=name, geometry=geometry, summary=summary)


PROMPT_KERNELS = (
    *_PLAIN,
    *(_on_matrix_units(kernel) for kernel in _PLAIN if kernel.name in ON_MATRIX_UNITS),
)
"""Their part of the table."""


MATRIX_NAMES = frozenset(name for name, _ in ON_MATRIX_UNITS.values())
"""The kernels that only a device with matrix units has."""


def multiplying(name: str, types: Iterable[str], *, matrix: bool) -> str:
    """The kernel that multiplies rows of such types: `name`, or what takes its place.

    `matrix`: whether the device has matrix units.
    """
    if not UNPACK.keys() >= set(types):
        return OF_FLOATS.get(name, name)
    return ON_MATRIX_UNITS[name][0] if matrix else name


def attending(kv: str, head_dim: int, *, matrix: bool) -> str:
    """The kernel of a prompt's attention: section 9's order, or where there are units their own."""
    whole = kv != "int8" or head_dim % 32 == 0
    fits = matrix and kv in MATRIX_KV and head_dim in MATRIX_HEADS and whole
    return ON_MATRIX_UNITS["prompt_attention"][0] if fits else "prompt_attention"


def within(launch: Launch, room: int) -> Launch:
    """The launch where a block may have `room` bytes of shared memory.

    Products on matrix units have smaller tiles where that is less than they ask for.
    """
    if launch.kernel.name not in _PRODUCTS or launch.shared <= room:
        return launch
    return evolve(launch, shared=room)


_PRODUCTS = MATRIX_NAMES - {"matrix_attention"}


def spread_of(name: str, tokens: int, entries: int, experts: int) -> int:
    """How many blocks share the tokens of an expert's rows: a chunk's `entries` over `experts`.

    Matrix units: four times the tiles of experts that are asked for alike, which they are not.
    """
    if name not in MATRIX_NAMES:
        return PLAIN_SPREAD if tokens >= PLAIN_SPREAD_FROM else 1
    return max(1, min(MOST_SPREAD, -(-4 * entries // (experts * MATRIX_TILE))))
