"""The self-test at start: every step that multiplies weights passes, and a wrong one is noticed."""

from __future__ import annotations

import ctypes
from itertools import product

import numpy as np
import pytest
from attrs import evolve

import strata_core
from strata_core.kernels.cpu.library import Step
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.self_test import check_cpu_lane
from strata_core.kernels.cpu.target import host_target
from strata_core.kernels.cpu.unpack import UNPACK

LAYOUTS = ((), ("tiles",))
TYPES = [*UNPACK, "F32", "F16", "BF16"]
EXPERT_TYPES = ("Q8_0", "Q4_1", "Q4_K", "Q6_K", "F16")
"""Blocks of 32 without and with minimums, superblocks with them and with scales of 16, floats."""

MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0", "F16"), ("F16", "F32", "Q5_0")]


@pytest.fixture
def pool(kernels):
    made = Pool(kernels.library._compiler, 2)
    yield made
    made.close()


def steps_of(type_name):
    """Every step over a type."""
    layouts = LAYOUTS if type_name in UNPACK else ((),)
    for layout in layouts:
        yield Step("linear", (type_name, *layout))
        yield Step("down", (type_name, *layout))
        yield Step("gate_up", (type_name,) * 3 + layout)


@pytest.mark.parametrize("type_name", TYPES)
def test_every_step_gives_the_golden_bits(kernels, pool, type_name):
    """The best variant that runs here with every type; the others with one of each kind of type.

    Their products (`linear`) are tried with every type in test_products, and each step of an expert
    adds the same to them whatever the type within its kind.
    """
    steps = list(steps_of(type_name))
    if kernels.library.compiler.target.variant != host_target().variant:
        steps = [s for s in steps if s.name == "linear" or type_name in EXPERT_TYPES]
    check = check_cpu_lane(kernels.library, pool, [*steps, Step("shared"), Step("merge", (32,))])
    assert check.exact, check.wrong
    assert len(check.computed) == len(steps)


@pytest.mark.parametrize(("types", "layout"), list(product(MIXED, LAYOUTS)))
def test_experts_of_mixed_types(kernels, pool, types, layout):
    check = check_cpu_lane(kernels.library, pool, [Step("gate_up", (*types, *layout))])
    assert (check.exact, len(check.computed)) == (True, 1)


class Meddled:
    """A library of which one step changes the last bit of what it wrote, or writes nothing."""

    def __init__(self, library, step, change):
        self.library, self.step = library, step
        self.real = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(library.address(step))
        self.wrong = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 3)(self.call)
        self.change = change

    def call(self, args, begin, end):
        if self.change == "nothing":
            return
        self.real(args, begin, end)
        rows = (ctypes.c_int64 * 9).from_address(args)
        at = rows[5] if self.step.name == "linear" else rows[2]
        first = ctypes.c_int64.from_address(at).value
        ctypes.c_uint32.from_address(first).value ^= 1

    def address(self, step):
        if step == self.step:
            return ctypes.cast(self.wrong, ctypes.c_void_p).value
        return self.library.address(step)


@pytest.mark.parametrize("change", ["bit", "nothing"])
@pytest.mark.parametrize("wrong", list(steps_of("Q4_K")), ids=str)
def test_a_wrong_step_is_named(kernels, pool, wrong, change):
    library = Meddled(kernels.library, wrong, change)
    check = check_cpu_lane(library, pool, [*steps_of("Q4_K"), *steps_of("F16")])
    assert check.wrong == (" ".join((wrong.name, *wrong.parameters)),)


def test_a_wrong_kernel_shows_in_a_loaded_model(monkeypatch, tmp_path):
    """The model still runs; its document and its degradations say what is wrong."""
    monkeypatch.setitem(UNPACK, "Q4_0", evolve(UNPACK["Q4_0"], bias=7))
    with strata_core.load("demo", cache_dir=tmp_path, max_context=32) as model:
        assert model.capabilities.exact is False
        said = [item for item in model.degradations if "lane cpu" in item.what]
        assert np.isfinite(model.logits([1, 2])).all()
    (item,) = said
    for name in ("linear Q4_0", "linear Q4_0 tiles", "down Q4_0", "gate_up Q4_0 Q4_0 Q4_0"):
        assert name in item.why
    assert "Q6_K" not in item.why


def test_a_right_model_is_exact():
    with strata_core.load("demo", max_context=32, threads=1) as model:
        assert model.capabilities.exact is True
        assert model.capabilities.threads == 1
        assert not [item for item in model.degradations if "self-test" in item.what]


def test_the_reference_does_not_claim_exactness():
    with strata_core.load("demo", max_context=32, backend="reference") as model:
        assert model.capabilities.exact is False
        assert model.capabilities.threads is None
