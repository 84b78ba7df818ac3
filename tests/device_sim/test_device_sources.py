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


def prompt(executor):
    """Logits of all positions, by the kernels of prompts."""
    window = Window(
        ids=IDS,
        positions=np.arange(len(IDS), dtype=np.int32),
        slots=np.full(len(IDS), executor.open_sequence(), np.int32),
        logits_rows=np.arange(len(IDS), dtype=np.int32),
        kernel_class="prompt",
    )
    return executor.run(window).copy()


def logits(lab, checkpoint, runtime):
    backend = lab.backend(runtime, **OPTIONS)
    executor = lab.bind(backend, checkpoint)
    try:
        return lab.logits(executor, IDS, size=4), prompt(executor)
    finally:
        lab.check_closed(backend, executor)


@pytest.mark.skipif(host_compiler() is None, reason="there is no C++ compiler")
@pytest.mark.timeout(900)
def test_a_model_on_the_device_sources(lab, library, tiny_file, tmp_path):
    """On a device without matrix units and on one with them."""
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
    assert not names[False] & MATRIX_NAMES
    # rows of floats (the router's) are multiplied as ever
    assert {"prompt_linear", *MATRIX_NAMES} <= names[True]
    assert not names[True] & {"prompt_gate_up", "prompt_down"}
    cpu = lab.cpu(checkpoint, ids=IDS)
    for each in found:
        assert each.tobytes() == cpu.tobytes()
