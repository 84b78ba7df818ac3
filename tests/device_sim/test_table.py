"""The table of device kernels: argument blocks as a C compiler lays them out, grids, layouts."""

import ctypes

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.kernels.device.layout import CELL, ENTRY, inner_bytes, record_bytes
from strata_core.kernels.device.prompt_table import (
    ATTENTION_QUERIES,
    ON_MATRIX_UNITS,
    SHORT_HEAD,
    attending,
    attention_room,
    multiplying,
    spread_of,
)
from strata_core.kernels.device.table import DEVICE_KERNELS, make_launch, pack, unpack
from strata_core.runtime import PLAIN_ROOM

C_TYPES = {
    "ptr": ctypes.c_uint64,
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "f32": ctypes.c_float,
}
VALUES = {
    "ptr": st.integers(0, 2**64 - 1),
    "i32": st.integers(-(2**31), 2**31 - 1),
    "i64": st.integers(-(2**63), 2**63 - 1),
    "f32": st.floats(width=32, allow_nan=False),
}


def structure(kernel):
    fields = [(name, C_TYPES[kind]) for name, kind in kernel.args.items()]
    return type(kernel.name, (ctypes.Structure,), {"_fields_": fields})


@pytest.mark.parametrize("name", DEVICE_KERNELS)
@settings(max_examples=10, deadline=None)
@given(data=st.data())
def test_a_block_is_what_c_makes_of_the_arguments(name, data):
    kernel = DEVICE_KERNELS[name]
    values = {n: data.draw(VALUES[kind]) for n, kind in kernel.args.items()}
    block = pack(name, **values)
    kind = structure(kernel)
    last = list(kernel.args)[-1]
    field = getattr(kind, last)
    assert len(block) == field.offset + field.size
    made = kind.from_buffer_copy(block.ljust(ctypes.sizeof(kind), b"\0"))
    assert {n: getattr(made, n) for n in kernel.args} == values
    assert unpack(name, block) == values


def test_wrong_arguments_are_named():
    with pytest.raises(ValueError, match="device kernel add takes"):
        pack("add", x=1, y=2, rows=3)
    with pytest.raises(ValueError, match="device kernel add"):
        pack("add", x=1, y=-2, rows=3, width=4)
    with pytest.raises(ValueError, match="made for"):
        make_launch("signal", ("Q8_0",), word=1, value=2)


@given(st.integers(1, SHORT_HEAD // 8), st.integers(1, 5), st.integers(1, 16), st.integers(1, 700))
def test_attention_of_prompts_fits_every_device(eighths, kv_heads, group, tokens):
    sizes = {"q": 1, "out": 2, "positions": 3, "places": 4, "layer_offset": 0, "window": 0}
    sizes |= {"tokens": tokens, "kv_heads": kv_heads, "group": group}
    width = kv_heads * 8 * eighths
    launch = make_launch("prompt_attention", ("fp16", 8 * eighths), width=width, **sizes)
    assert launch.shared == attention_room(8 * eighths) <= PLAIN_ROOM
    across, down, _ = launch.grid
    assert across == kv_heads
    assert 0 <= down * ATTENTION_QUERIES - tokens * group < ATTENTION_QUERIES
    other = make_launch("matrix_attention", ("fp16", 8 * eighths), width=width, **sizes)
    assert (other.grid, other.block, other.shared) == (launch.grid, (128, 1, 1), 0)


def test_grids_cover_what_they_divide():
    launch = make_launch(
        "linear",
        ("Q8_0",),
        weight=1,
        x=2,
        out=3,
        bias=0,
        stride=34,
        tokens=2,
        rows=33,
        columns=32,
    )
    assert (launch.grid, launch.block, launch.shared) == ((2, 1, 1), (128, 1, 1), 4 * 512)
    assert launch.kernel.parameters == ("Q8_0",)


def test_layouts_have_their_sizes():
    assert (ENTRY.itemsize, CELL.itemsize) == (48, 64)
    assert (record_bytes(256), record_bytes(257), inner_bytes(32)) == (576, 1152, 1024)


def test_matrix_units_take_rows_that_are_quantised():
    assert multiplying("prompt_down", ("Q4_K",), matrix=True) == "matrix_down"
    assert multiplying("prompt_gate_up", ("Q4_K", "Q6_K"), matrix=True) == "matrix_gate_up"
    assert multiplying("prompt_linear", ("Q4_K",), matrix=False) == "prompt_linear"
    for types, matrix in ((("F16",), False), (("F16",), True), (("Q4_K", "F32"), True)):
        assert multiplying("prompt_linear", types, matrix=matrix) == "prompt_floats"
        assert multiplying("prompt_down", types, matrix=matrix) == "prompt_down"
    for name, (matrix_name, _) in ON_MATRIX_UNITS.items():
        plain, other = DEVICE_KERNELS[name], DEVICE_KERNELS[matrix_name]
        assert (plain.args, plain.parameters) == (other.args, other.parameters)


def test_matrix_units_take_attention_over_halves_and_bytes():
    for kv, head_dim in (("fp16", 32), ("fp16", 80), ("int8", 96), ("int8", 128)):
        assert attending(kv, head_dim, matrix=True) == "matrix_attention"
        assert attending(kv, head_dim, matrix=False) == "prompt_attention"
    # floats, scales that heads share, sizes that are no multiple of 16 or have no room
    for kv, head_dim in (("fp32", 64), ("int8", 80), ("fp16", 40), ("fp16", 256)):
        assert attending(kv, head_dim, matrix=True) == "prompt_attention"


@pytest.mark.parametrize(
    ("tokens", "spread"), [(1, 1), (512, 1), (1024, 2), (2048, 4), (4096, 8), (65536, 16)]
)
def test_blocks_of_matrix_units_take_a_tile_each_or_none(tokens, spread):
    assert spread_of("matrix_down", tokens, 8 * tokens, 128) == spread
