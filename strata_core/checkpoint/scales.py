"""A check of stored scales, for the first reading of a tensor or a blob."""

from __future__ import annotations

import numpy as np

from strata_core.checkpoint.types import TYPES
from strata_core.errors import CheckpointError


def check_scales(type_name: str, data: np.ndarray, where: str) -> None:
    """Raise CheckpointError where MXFP4 bytes hold the exponent 255, which stands for no number.

    `where` names the expert or tensor. Other types pass. Meant for the first reading of a blob,
    not for the path of every token.
    """
    if type_name != "MXFP4":
        return
    bad = np.flatnonzero(data.reshape(-1, TYPES[type_name].block_bytes)[:, 0] == 255)
    if bad.size:
        raise CheckpointError(
            f"{where}: {bad.size} MXFP4 blocks have the exponent 255",
            f"the first is block {int(bad[0])}; 255 stands for no number",
            "the file is damaged; download or convert the model again",
        )
