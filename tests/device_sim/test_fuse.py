"""The fusion pass: what it finds, what it leaves, and that fused runs are what they stand for."""

import itertools
from contextlib import closing

import numpy as np
import pytest
from attrs import evolve

from strata_core.checkpoint.open import open_checkpoint
from strata_core.kernels.device import rounds
from strata_core.kernels.device.fuse import fuse, parts_of
from strata_core.kernels.device.fused_table import FUSED
from strata_core.kernels.device.segments import Copy, Segment
from strata_core.kernels.device.table import DEVICE_KERNELS, make_launch, unpack
from strata_core.runtime import Launch

SIZES = {
    "top_k": 4,
    "head_dim": 64,
    "kv_heads": 2,
    "heads": 4,
    "width": 128,
    "dim": 256,
    "tokens": 3,
    "rows": 2,
    "outputs": 40,
}
OF_PROMPTS = {"tokens": 33, "rows": 33, "half": 32}
TYPES = {"kv": "fp16", "head_dim": 64}
FLOATS = {"norm_linear": "F32"}


def launch_of(fused, run):
    """A fused launch whose arguments all differ but for sizes; those of other runs are 0."""
    name, number = fused.kernel.name, itertools.count(1 << 20, 4096)
    named = {part.args.get(name, name) for part in run for name in DEVICE_KERNELS[part.kernel].args}
    values = {
        name: 0 if name not in named else SIZES.get(name, next(number) % (1 << 30))
        for name in fused.kernel.args
    }
    values |= {"eps": 0.5} if "eps" in named else {}
    values |= {n: v for n, v in OF_PROMPTS.items() if n in named and name.startswith("prompt_")}
    values |= {n: 64 for n in named if isinstance(n, str) and n.startswith("stride")}
    types = tuple(
        TYPES.get(name, FLOATS.get(fused.kernel.name, "Q8_0")) for name in fused.kernel.parameters
    )
    return make_launch(fused.kernel.name, types, **values)


RUNS = [(fused, run) for fused in FUSED.values() for run in fused.runs]


@pytest.mark.parametrize(("fused", "run"), RUNS, ids=lambda v: getattr(v, "kernel", v) and None)
def test_a_run_and_back(fused, run):
    launch = launch_of(fused, run)
    parts = parts_of(launch)
    assert [p.kernel.name for p in parts] == [part.kernel for part in run]
    assert fuse(Segment(list(parts))).items == [launch]
    for short in range(1, len(parts)):
        names = [item.kernel.name for item in fuse(Segment(list(parts[:short]))).items]
        assert fused.kernel.name not in names or len(fused.runs) > 1


@pytest.mark.parametrize(("fused", "run"), RUNS, ids=lambda v: getattr(v, "kernel", v) and None)
def test_another_value_is_no_run(fused, run):
    """Whatever two parts share must be the same in both."""
    parts = list(parts_of(launch_of(fused, run)))
    names = [n for part in run for n in {p.args.get(a, a) for p in (part,) for a in _args(p)}]
    shared = {n for n in names if names.count(n) > 1 and isinstance(n, str)}
    assert shared
    for number, part in enumerate(run):
        for name in _args(part):
            if part.args.get(name, name) in shared:
                values = unpack(part.kernel, parts[number].args)
                values[name] += 32
                other = make_launch(part.kernel, parts[number].kernel.parameters, **values)
                changed = [*parts[:number], other, *parts[number + 1 :]]
                whole = fuse(Segment(changed)).items
                assert len(whole) > 1, name


def _args(part):
    return DEVICE_KERNELS[part.kernel].args


def test_only_what_follows_a_launch_starts_early():
    add = make_launch("add", x=1, y=2, rows=1, width=4)
    items = fuse(Segment([add, add, Copy(1, 2, 3), add, add], layer=7))
    assert [item.early for item in items.items if isinstance(item, Launch)] == [0, 1, 0, 1]
    assert items.layer == 7
    assert evolve(items.items[1], early=False) == add


@pytest.mark.shared
@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "olmoe", "mixtral"])
@pytest.mark.parametrize("cache", [0, 6])
def test_the_same_bits_in_fewer_launches(lab, models, monkeypatch, family, cache):
    with closing(open_checkpoint(models / "tiny" / family)) as checkpoint:
        expected = lab.cpu(checkpoint)
        counts = []
        for fusing in (True, False):
            if not fusing:
                monkeypatch.setattr(rounds, "fuse", lambda segment: segment)
            backend = lab.backend(expert_cache=cache)
            executor = lab.bind(backend, checkpoint)
            for size in (1, 2, 3, 5, 8):
                assert lab.logits(executor, size=size).tobytes() == expected.tobytes(), size
            counts.append(sum(backend.runtime.report()["kernels"].values()))
            lab.check_closed(backend, executor)
    assert counts[0] < 0.9 * counts[1]


def test_a_layer_of_ten_launches(lab, tools, tiny_file):
    """A token with everything in slots: what docs/experiments.md counts on."""
    backend = lab.backend(expert_cache=1000)
    checkpoint = tiny_file()
    executor = lab.bind(backend, checkpoint)
    slot = executor.open_sequence()
    executor.run(tools.window(np.array([5]), slot=slot))
    before = dict(backend.runtime.report()["kernels"])
    executor.run(tools.window(np.array([6]), start=1, slot=slot))
    after = backend.runtime.report()["kernels"]
    made = {name: after[name] - before.get(name, 0) for name in after}
    layers = checkpoint.hyper.layers
    for name in ("gate_up", "dispatch", "heads", "norm_linear"):
        assert made[name] == layers
    assert sum(made.values()) <= 10 * layers + 6
    executor.close_sequence(slot)
    lab.check_closed(backend, executor)
