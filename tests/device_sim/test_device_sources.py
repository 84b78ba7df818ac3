"""Whole models on the device sources, compiled for the host: the CPU's bits in every logit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "device_sources"))

from host_build import HostBuild, host_compiler

from strata_core.interfaces import Window
from strata_core.kernels.device.prompt_table import MATRIX_NAMES, ON_MATRIX_UNITS
from strata_core.kernels.device.table import DEVICE_KERNELS
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers
from strata_core.testing.sim.host_kernels import HostKernels

OPTIONS = {"expert_cache": 6}
IDS = (np.arange(11) * 37 % 290 + 3).astype(np.int32)


class Noted:
    """The simulator's kernels, noting which are loaded."""

    def __init__(self, library):
        self.keys, self._kernels = [], HostKernels(library)

    def load(self, key):
        self.keys.append(key)
        self._kernels.load(key)

    def __call__(self, runtime, device, launch):
        self._kernels.run(runtime, device, launch)


def prompt(executor, size):
    """Logits of all positions, by the kernels of prompts in chunks of `size`."""
    slot, found = executor.open_sequence(), []
    for first in range(0, len(IDS), size):
        ids = IDS[first : first + size]
        window = Window(
            ids=ids,
            positions=first + np.arange(len(ids), dtype=np.int32),
            slots=np.full(len(ids), slot, np.int32),
            logits_rows=np.arange(len(ids), dtype=np.int32),
            kernel_class="prompt",
        )
        found.append(executor.run(window).copy())
    executor.close_sequence(slot)
    return np.concatenate(found)


def logits(lab, checkpoint, runtime):
    """Of windows; of a prompt in one chunk, and in several."""
    backend = lab.backend(runtime, **OPTIONS)
    executor = lab.bind(backend, checkpoint)
    try:
        found = lab.logits(executor, IDS, size=4), *(prompt(executor, n) for n in (len(IDS), 3))
    finally:
        lab.check_closed(backend, executor)
    return found


@pytest.mark.skipif(host_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.timeout(900)
def test_a_model_on_the_device_sources(lab, library, tiny_file, tmp_path):
    """On a device without matrix units and on one with them, whose prompts are their own."""
    checkpoint = tiny_file()
    found, names, keys = [], {}, []
    machines = {matrix: SimHardware(vram=(1 << 30,), matrix=matrix) for matrix in (False, True)}
    for matrix, hardware in machines.items():
        noted = Noted(library)
        kernels = dict.fromkeys(DEVICE_KERNELS, noted)
        runtime = SimRuntime(hardware, host_kernels=kernels, pointers=pointers)
        found += logits(lab, checkpoint, runtime)
        names[matrix] = {key.name for key in noted.keys}
        keys += noted.keys
    build = HostBuild(keys, tmp_path)
    for hardware in machines.values():
        found += logits(lab, checkpoint, build.runtime(hardware))
    assert {"gate_up", "down", "dispatch", "attention", *ON_MATRIX_UNITS} <= names[False]
    assert "prompt_floats" in names[False]
    assert not names[False] & MATRIX_NAMES
    # rows of floats (the router's) are multiplied alike on both
    assert {"prompt_floats", *MATRIX_NAMES} <= names[True]
    assert not names[True] & {"prompt_linear", "prompt_gate_up", "prompt_down", "prompt_attention"}
    cpu = lab.cpu(checkpoint, ids=IDS)
    plain, on_units = (found[i : i + 3] + found[i + 6 : i + 9] for i in (0, 3))
    for each in (*plain, on_units[0], on_units[3]):
        assert each.tobytes() == cpu.tobytes()
    # the simulator's own order of products, and with it the sources' of attention
    for whole, parts in (on_units[1:3], on_units[4:6]):
        assert whole.tobytes() == parts.tobytes()
        assert whole.tobytes() != cpu.tobytes()
        np.testing.assert_allclose(whole, cpu, atol=0.02)
