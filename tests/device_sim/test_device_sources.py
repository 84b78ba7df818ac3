"""Whole models on the device sources, compiled for the host: the CPU's bits in every logit."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "device_sources"))

from host_build import HostBuild, host_compiler

from strata_core.interfaces import Window
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
    checkpoint = tiny_file()
    noted = Noted(library)
    hardware = SimHardware(vram=(1 << 30,))
    kernels = dict.fromkeys(DEVICE_KERNELS, noted)
    simulated = logits(
        lab, checkpoint, SimRuntime(hardware, host_kernels=kernels, pointers=pointers)
    )
    emulated = logits(lab, checkpoint, HostBuild(noted.keys, tmp_path).runtime())
    assert {"gate_up", "down", "dispatch", "attention", "prompt_down"} <= {
        key.name for key in noted.keys
    }
    cpu = lab.cpu(checkpoint, ids=IDS)
    for found in (*simulated, *emulated):
        assert found.tobytes() == cpu.tobytes()
