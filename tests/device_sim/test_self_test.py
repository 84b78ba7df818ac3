"""The self-test of devices at start: right kernels pass, one wrong bit of any of them is named."""

import threading
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from attrs import frozen
from hypothesis import given, settings
from hypothesis import strategies as st

from strata_core.cache.staging import Staging
from strata_core.errors import DeviceError, StrataError
from strata_core.interfaces import AllocatorContext
from strata_core.kernels.cpu.unpack import UNPACK
from strata_core.kernels.device import backend as backend_module
from strata_core.kernels.device import self_test as module
from strata_core.kernels.device.golden import TESTED, GoldenWork
from strata_core.kernels.device.layout import ENTRY, HIT, LINK
from strata_core.kernels.device.prompt_table import MATRIX_NAMES, OF_FLOATS, ON_MATRIX_UNITS
from strata_core.kernels.device.self_test import AT_ONCE, compute, golden_keys
from strata_core.kernels.device.table import DEVICE_KERNELS, unpack
from strata_core.kernels.self_test import check_lane
from strata_core.memory.address import bytes_at
from strata_core.memory.held import Held
from strata_core.memory.ledger import Ledger
from strata_core.memory.pinned import build
from strata_core.model.build import build_program
from strata_core.runtime import PLAIN_ROOM, KernelKey
from strata_core.sources.arena import Arena
from strata_core.sources.mmap import MappedFile
from strata_core.testing.machines import recorded_pc
from strata_core.testing.sim import VERBS, SimFaults, SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers
from strata_core.testing.sim.host_kernels import HostKernels

QUANTISED = tuple(UNPACK)
FLOATS = ("F32", "F16", "BF16")
EVERY = (*QUANTISED, *FLOATS)
MIXED = [("Q4_K", "Q4_K", "Q6_K"), ("Q8_0", "Q4_0", "F16"), ("F16", "F32", "Q5_0")]
BY_TYPE = sorted(TESTED - {"quantise", "combine", "combine_norm"})
OF_QUANTISED = {"products", *OF_FLOATS, *MATRIX_NAMES}
WRITTEN = {
    "quantise": ("records",),
    "linear": ("out",),
    "linear_add": ("out", "sum"),
    "products": ("out_a", "out_b", "out_c"),
    "gate_up": ("inner",),
    "down": ("row",),
    "combine": ("x",),
    "combine_norm": ("x", "out"),
    "prompt_linear": ("out",),
    "prompt_floats": ("out",),
    "prompt_gate_up": ("inner",),
    "prompt_down": ("out",),
    "matrix_linear": ("out",),
    "matrix_gate_up": ("inner",),
    "matrix_down": ("out",),
}
"""What each kernel writes; `row` is the first entry's."""


def types_of(name: str) -> tuple[str, ...]:
    """The types of weights that a kernel is made for."""
    if name in OF_FLOATS.values():
        return FLOATS
    return QUANTISED if name in OF_QUANTISED else EVERY


def keys_of(type_name: str) -> list[KernelKey]:
    """Every kernel that can be tested, for one type."""
    found = [KernelKey("combine"), KernelKey("combine_norm")]
    found += [
        KernelKey(name, (type_name,) * len(DEVICE_KERNELS[name].parameters))
        for name in BY_TYPE
        if type_name in types_of(name)
    ]
    return golden_keys(found)


@frozen(eq=False)
class Meddled:
    """A kernel that changes the lowest bit of what it wrote, where `when` says so."""

    real: Callable
    written: str
    when: Callable

    def load(self, key):
        self.real.load(key)

    def __call__(self, runtime, device, launch):
        self.real(runtime, device, launch)
        values = unpack(launch.kernel.name, launch.args)
        if not self.when(runtime, device, launch, values):
            return
        if self.written == "row":
            at = int(entries(runtime, device, values)["row"][0])
        else:
            at = int(values[self.written])
        bytes_at(runtime.places.reach(device, at, 1, "a test").address, 1)[0] ^= 1


def entries(runtime, device, values):
    place = runtime.places.reach(device, int(values["entries"]), 1, "a test")
    return bytes_at(place.address, ENTRY.itemsize * int(values["count"])).view(ENTRY)


def always(_runtime, _device, _launch, _values):
    return True


def over_the_link(runtime, device, _launch, values):
    return bool((entries(runtime, device, values)["lane"] == LINK).any())


def meddled_runtime(lab, name, written, when=always, **hardware):
    """A runtime of the lab's of which one kernel is wrong."""
    kernels = dict(HostKernels(lab.library).mapping())
    kernels[name] = Meddled(kernels[name], written, when)
    hardware.setdefault("vram", (1 << 30,) * 3)
    return SimRuntime(SimHardware(**hardware), host_kernels=kernels, pointers=pointers)


class Bench:
    """A device with a buffer for filling, and nothing else on it."""

    def __init__(self, runtime):
        self.runtime = runtime
        runtime.open_context(0)
        self.ledger = Ledger(devices=3)
        self.held = Held(runtime, self.ledger)
        self.staging = Staging.make(self.held, 0)

    def checks(self, keys):
        """What the lanes of a device make of some kernels."""
        self.runtime.load(0, keys)
        image, came = compute(self.held, 0, keys, self.staging, link=True)
        return [check_lane(str(lane), image.computed(came, lane)) for lane in (HIT, LINK)]

    def close(self):
        self.staging.close()
        assert self.runtime.leaks() == []
        assert self.ledger.outstanding() == ()
        self.runtime.close()


@pytest.mark.parametrize("aliases", ["same", "apart"])
def test_every_kernel_gives_golden_rows_for_every_type(lab, aliases):
    bench = Bench(lab.runtime(aliases=aliases))
    for type_name in EVERY if aliases == "same" else EVERY[::3]:
        keys = keys_of(type_name)
        own, link = bench.checks(keys)
        assert (own.wrong, link.wrong) == ((), ())
        named = {str(name).partition(" ")[0] for name in own.computed}
        assert {key.name for key in keys} - {"quantise"} <= named
        assert {name.partition(" ")[0] for name in link.computed} == {"gate_up", "down"}
    for types in MIXED:
        own, link = bench.checks(golden_keys([KernelKey("gate_up", types)]))
        assert (own.exact, link.exact) == (True, True)
        assert link.computed == (" ".join(("gate_up", *types)),)
    bench.close()


def test_without_an_alias_there_is_no_lane_of_the_link(lab):
    bench = Bench(lab.runtime(aliases="none"))
    own, link = bench.checks(keys_of("Q8_0"))
    assert own.exact
    assert link.computed == ()
    bench.close()


@pytest.mark.parametrize("name", sorted(WRITTEN))
def test_one_wrong_bit_of_any_kernel_is_named_for_every_type(lab, name):
    assert set(WRITTEN) == TESTED
    for written in WRITTEN[name]:
        bench = Bench(meddled_runtime(lab, name, written))
        types = QUANTISED if name == "quantise" else types_of(name)
        for type_name in types:
            own, link = bench.checks(keys_of(type_name))
            blamed = {text.partition(" ")[0] for text in own.wrong}
            if name != "quantise":
                assert blamed == {name}
                assert all("token 0" in where for where in own.where)
            else:  # whatever takes its records
                assert {"linear", "down", "prompt_linear"} <= blamed
            assert link.exact == (name not in ("quantise", "gate_up", "down"))
        bench.close()


def test_a_kernel_that_writes_nothing_is_named(lab):
    kernels = dict(HostKernels(lab.library).mapping())
    for name in sorted(TESTED - {"quantise"}):
        silent = {**kernels, name: lambda *_: None}
        runtime = SimRuntime(SimHardware(), host_kernels=silent, pointers=pointers)
        bench = Bench(runtime)
        own, _ = bench.checks(keys_of(types_of(name)[0]))
        assert {text.partition(" ")[0] for text in own.wrong} == {name}
        bench.close()


def test_it_is_small():
    """Fewer than 20 launches a type, beyond the five that make activations into records."""
    for type_name, others in product(EVERY, (MATRIX_NAMES, ON_MATRIX_UNITS)):
        work = GoldenWork(256, 256, PLAIN_ROOM)
        work.add(key for key in keys_of(type_name) if key.name not in others)
        assert len(work.launches) < 25
        assert work.image.nbytes < 1 << 18


TYPE = st.sampled_from(QUANTISED) | st.sampled_from(EVERY)
KEY = st.builds(KernelKey, st.just("gate_up"), st.tuples(TYPE, TYPE, TYPE)) | st.builds(
    KernelKey, st.just("products"), st.tuples(*[st.sampled_from(QUANTISED)] * 3)
)


@settings(max_examples=20, deadline=None)
@given(st.lists(KEY, min_size=AT_ONCE, max_size=AT_ONCE, unique=True), st.booleans())
def test_an_image_fits_into_a_buffer_and_sizes_do_not_depend_on_its_place(keys, link):
    keys = [k for k in keys if k.name == "products" or fits(*k.parameters)]
    first, second = (GoldenWork(base, base * link, PLAIN_ROOM) for base in (256, 1 << 40))
    first.add(keys)
    second.add(keys)
    assert first.image.nbytes == second.image.nbytes <= 1 << 20
    assert len(first.launches) == len(second.launches)


def fits(gate, up, _down):
    return (gate in UNPACK) == (up in UNPACK)


# in a start


def degradations(lab):
    return [item for item in lab.degradations if "self-test" in f"{item.what} {item.why}"]


def test_a_right_start_says_nothing_and_gives_its_memory_back(lab, tiny_file):
    backend = lab.backend(expert_cache=3, expert_cache_device1=2)
    checkpoint = tiny_file()
    executor = lab.bind(backend, checkpoint)
    assert backend.capabilities.exact
    assert degradations(lab) == []
    purposes = [claim.purpose for claim in backend.ledger.outstanding()]
    assert not [purpose for purpose in purposes if "self-test" in purpose]
    lab.check_closed(backend, executor)


def test_a_model_with_more_kernels_than_an_image_takes(lab, tiny_file, monkeypatch):
    """They are tested some at a time, and what the first ones made is not lost."""
    monkeypatch.setattr(module, "AT_ONCE", 2)
    backend = lab.backend(meddled_runtime(lab, "combine_norm", "x"))
    executor = lab.bind(backend, tiny_file())
    assert backend.runtime.calls()["free"] > 2
    (item,) = degradations(lab)
    assert "other bits came from combine_norm (first in row 0 of token 0)" in item.why
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("device", [0, 1, 2])
def test_a_wrong_device_is_told_and_is_not_exact(lab, tiny_file, device):
    runtime = meddled_runtime(lab, "down", "row", lambda _r, on, *_: on == device)
    options = {"expert_cache_device1": 2, "expert_cache_device2": 2}
    backend = lab.backend(runtime, expert_cache=3, pcie_frac=0.0, **options)
    executor = lab.bind(backend, tiny_file())
    assert not backend.capabilities.exact
    (item,) = degradations(lab)
    assert item.what == f"the lane SIM{device} does not compute the golden rows of its self-test"
    assert "down " in item.why
    assert "row 0 of token 0" in item.why
    for way in ("compiled kernels", "--backend cpu", "strata verify"):
        assert way in item.remedy
    lab.check_closed(backend, executor)


@pytest.mark.parametrize("share", [None, 1.0])
def test_a_wrong_lane_of_the_link_is_left_out(lab, tiny_file, tools, share):
    """The device reads no expert over the link then, and every bit is right."""
    checkpoint = tiny_file()
    runtime = meddled_runtime(lab, "gate_up", "inner", over_the_link)
    backend = lab.backend(runtime, expert_cache=3, pcie_frac=share)
    source = pinned_arena(backend, checkpoint, tools, lab)
    executor = lab.bind(backend, checkpoint, source)
    (item,) = degradations(lab)
    assert item.what == "the lane SIM0 over the link is left out"
    assert "gate_up" in item.why
    assert backend.capabilities.exact
    assert lab.logits(executor).tobytes() == lab.cpu(checkpoint).tobytes()
    assert executor.counters()["pcie"]["experts"] == 0
    assert executor.counters()["cpu"]["experts"] > 0
    executor.close()
    source.close()
    lab.check_closed(backend)


def pinned_arena(backend, checkpoint, tools, lab):
    backend.open_contexts()
    context = AllocatorContext(
        machine=recorded_pc({}), backend=backend, options={}, degrade=lab.degradations.append
    )
    return Arena(checkpoint.experts, build(context), tools.quiet())


def test_a_kernel_that_fails_ends_the_start(lab, tiny_file):
    def fails(*_):
        raise RuntimeError("trap")

    kernels = {**HostKernels(lab.library).mapping(), "down": fails}
    hardware = SimHardware(vram=(1 << 30,))
    runtime = SimRuntime(hardware, host_kernels=kernels, pointers=pointers)
    backend = lab.backend(runtime)
    with pytest.raises(DeviceError, match="kernel down failed on SIM0"):
        lab.bind(backend, tiny_file())
    assert backend.ledger.outstanding() == ()
    assert runtime.leaks() == []
    backend.close()


def placed(lab, tiny_file, tools, faults):
    """A placement whose next step is the self-test."""
    checkpoint = tiny_file()
    runtime = lab.runtime(faults=faults)
    backend = lab.backend(runtime, expert_cache_device1=2)
    backend.open_contexts()
    program = build_program(checkpoint.hyper)
    made = backend.prepare(
        program, checkpoint, checkpoint.experts, tools.limits, tools.quiet(), None
    )
    made.take_small_pins()
    return backend, made


TOLD = {"devices", "take_error", "close", "memory"}
"""Verbs that tell something, or end."""


def test_every_call_of_the_self_test_may_fail(lab, tiny_file, tools):
    backend, made = placed(lab, tiny_file, tools, SimFaults())
    before = backend.runtime.calls()
    made.test_lanes()
    after = backend.runtime.calls()
    lab_threads = threading.active_count()
    backend.close()
    tried = {}
    for verb in sorted(set(VERBS) - TOLD):
        first, last = before.get(verb, 0) + 1, after.get(verb, 0)
        chosen = {*range(first, min(first + 3, last + 1)), *range(max(first, last - 1), last + 1)}
        for n in sorted(chosen):
            backend, made = placed(lab, tiny_file, tools, SimFaults({verb: n}))
            with pytest.raises(StrataError):
                made.test_lanes()
            made.close()
            assert backend.runtime.leaks() == [], f"{verb} {n}"
            backend.close()
            assert backend.ledger.outstanding() == (), f"{verb} {n}"
        tried[verb] = len(chosen)
    used = {"alloc", "free", "alias", "copy", "launch", "load", "synchronize", "create_stream"}
    assert used <= {verb for verb, count in tried.items() if count}
    assert threading.active_count() <= lab_threads


def test_devices_are_tested_once(lab, tiny_file, tools):
    backend, made = placed(lab, tiny_file, tools, SimFaults())
    made.test_lanes((0,))
    launches = backend.runtime.calls()["launch"]
    made.test_lanes((0,))
    assert backend.runtime.calls()["launch"] == launches
    made.test_lanes()
    assert backend.runtime.calls()["launch"] > launches
    made.close()
    backend.close()


def test_the_hosts_lane_is_tested_too(lab, tiny_file, monkeypatch):
    seen = []

    def check(library, pool, model):
        seen.append(module.check_host_lane(library, pool, model))
        found = seen[-1]
        return type(found)(found.lane, found.computed, found.computed[:1], ("row 1 of token 0",))

    monkeypatch.setattr(backend_module, "check_host_lane", check)
    backend = lab.backend()
    executor = lab.bind(backend, tiny_file(), MappedFile(tiny_file().experts))
    (found,) = seen
    assert found.exact
    assert {name.partition(" ")[0] for name in found.computed} == {"gate_up", "down"}
    assert not backend.capabilities.exact
    assert [item.what for item in degradations(lab)] == [
        "the lane cpu does not compute the golden rows of its self-test"
    ]
    lab.check_closed(backend, executor)


def test_golden_activations_are_not_changed(lab):
    bench = Bench(lab.runtime())
    before = GoldenWork(256, 0, PLAIN_ROOM)
    before.add(keys_of("F32"))
    image = np.zeros(before.image.nbytes, np.uint8)
    before.image.write(image)
    bench.checks(keys_of("F32"))
    again = GoldenWork(256, 0, PLAIN_ROOM)
    again.add(keys_of("F32"))
    other = np.zeros(again.image.nbytes, np.uint8)
    again.image.write(other)
    assert image.tobytes() == other.tobytes()
    bench.close()
