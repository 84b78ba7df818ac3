"""The suite of a runtime's verbs through the HIP plugin; check_hip.py runs it on a CUDA device."""

from __future__ import annotations

import pytest
from check_hip import make_runtime

from strata_core.kernels.device.table import make_launch
from strata_core.runtime import Launch
from strata_core.testing.conformance.runtime import RuntimeSuite

pytestmark = pytest.mark.device


class TestHip(RuntimeSuite):
    def make(self):
        return make_runtime(None)

    def add(self, x: int, y: int, count: int) -> Launch:
        return make_launch("add", x=x, y=y, rows=1, width=count)
