"""The suite of a runtime's verbs on the CUDA runtime of this machine.

A test module under another name, so that collecting the tests does not open a device.

Run: python -m pytest -q -p no:cacheprovider tests/device/check_runtime.py
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/cuda")]

from strata_core.errors import DeviceError  # noqa: E402
from strata_core.kernels.device.table import make_launch  # noqa: E402
from strata_core.runtime import KernelKey, Launch  # noqa: E402
from strata_core.testing.conformance.runtime import RuntimeSuite  # noqa: E402
from strata_core.testing.conformance.runtime_base import Bench  # noqa: E402
from strata_cuda.runtime import CudaRuntime  # noqa: E402

pytestmark = pytest.mark.device


class TestCuda(RuntimeSuite):
    def make(self) -> CudaRuntime:
        return CudaRuntime()

    def add(self, x: int, y: int, count: int) -> Launch:
        return make_launch("add", x=x, y=y, rows=1, width=count)

    def test_a_kernel_that_was_not_loaded(self, bench: Bench) -> None:
        launch = make_launch("add", x=0, y=0, rows=1, width=1)
        with pytest.raises(DeviceError, match="was not loaded"):
            bench.runtime.launch(launch, bench.stream)

    def test_kernels_are_loaded_once(self, bench: Bench) -> None:
        before = bench.runtime.memory(0).free
        for _ in range(3):
            bench.runtime.load(0, [KernelKey("add"), KernelKey("add"), KernelKey("signal")])
        assert bench.runtime.memory(0).free > before - (64 << 20)

    def test_a_launch_that_asks_for_too_much(self, bench: Bench) -> None:
        bench.runtime.load(0, [KernelKey("add")])
        made = make_launch("add", x=0, y=0, rows=1, width=0)
        wrong = Launch(made.kernel, (1, 1, 1), (2048, 1, 1), 0, made.args)
        with pytest.raises(DeviceError, match="launch add failed"):
            bench.runtime.launch(wrong, bench.stream)
        assert "cuLaunchKernel" in (bench.runtime.take_error() or "")
        assert bench.runtime.take_error() is None
        bench.runtime.synchronize(bench.stream)
