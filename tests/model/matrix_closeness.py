"""How close prompts on matrix units come to the CPU, with attention's kernel run on the host.

    python tests/model/matrix_closeness.py MODEL... [--kv fp16,int8] [--tokens 512] [--products]

The table of `closeness.py --against cpu`, where no device is: a simulated one says that it has
matrix units, so that its products are summed in their order (numpy), and its `matrix_attention` is
the device source, compiled for the host; all else are the CPU's steps. A step of a unit is summed
in plain floats there. With --products attention is the CPU's too. Needs a C++ compiler.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "device_sources")]

from closeness import logs, passage_of, row_of  # noqa: E402
from host_build import HostBuild  # noqa: E402

from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.kernels.device.prompt_table import ON_MATRIX_UNITS, attending  # noqa: E402
from strata_core.runtime import KernelKey  # noqa: E402
from strata_core.testing.sim import hardware  # noqa: E402
from strata_core.testing.sim.host_kernels import HostKernels  # noqa: E402

NAME = ON_MATRIX_UNITS["prompt_attention"][0]


def with_units(build: HostBuild | None) -> Any:
    """Simulated devices have matrix units meanwhile, and that one kernel of `build`, if any."""
    init, mapping = hardware.SimHardware.__init__, HostKernels.mapping

    def made(self: Any, *args: Any, **given: Any) -> None:
        init(self, *args, **{**given, "matrix": True})

    def kernels(self: HostKernels) -> Mapping[str, Any]:
        return mapping(self) if build is None else {**mapping(self), NAME: build}

    return patch.multiple(hardware.SimHardware, __init__=made), patch.multiple(
        HostKernels, mapping=kernels
    )


def head_dim_of(model: Path) -> int:
    """The size of a model's heads."""
    checkpoint = open_checkpoint(model)
    try:
        return checkpoint.hyper.head_dim
    finally:
        checkpoint.close()


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--kv", default="fp16,int8")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--products", action="store_true")
    asked = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "strata-check"
    print("| model | kv | KL mean | median | 95 % | largest | NLL difference | equal bits |")
    print("|---|---|---|---|---|---|---|---|")
    for model in asked.models:
        head_dim, ids = head_dim_of(model), passage_of(model)[: asked.tokens]
        for kv in asked.kv.split(","):
            if attending(kv, head_dim, matrix=True) != NAME:
                print(f"| {model.name} | {kv} | heads of {head_dim} keep the CPU's order |")
                continue
            key = KernelKey(NAME, (kv, head_dim))
            build = None if asked.products else HostBuild([key], folder)
            units, kernels = with_units(build)
            expected = logs(model, ids, backend="cpu", kv=kv)
            with units, kernels:
                ours = logs(model, ids, backend="sim", kv=kv)
            print(row_of(model, kv, ids, expected, ours), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
