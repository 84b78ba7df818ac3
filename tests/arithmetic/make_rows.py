"""Write the self-test's rows: `python tests/arithmetic/make_rows.py` from the repository's root.

The exact mode makes them. A file that changes means that the arithmetic or the inputs changed.
"""

from __future__ import annotations

import numpy as np

from strata_core.checkpoint.types import TYPES
from strata_core.kernels import exact
from strata_core.kernels.self_test import COLUMNS, FILE, ROWS, golden_activations, golden_weight


def golden_rows() -> np.ndarray:
    """float32 [types, tokens, rows]."""
    x = golden_activations()
    matrices = [exact.Matrix(name, ROWS, COLUMNS, golden_weight(name)) for name in TYPES]
    return np.stack([exact.linear(x, matrix) for matrix in matrices]).astype("<f4")


if __name__ == "__main__":
    FILE.write_bytes(golden_rows().tobytes())
