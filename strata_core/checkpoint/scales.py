"""Checks of stored numbers: scales at the first reading of a blob, or all that can be infinite."""

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


_FLOATS: dict[str, tuple[str, int]] = {
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}
"""Of each type of plain numbers its words, and the exponent that is no number's."""

_HALVES: dict[str, tuple[int, ...]] = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}
"""Where blocks of the GGUF format hold half floats: scales, and minima."""


def check_numbers(type_name: str, data: np.ndarray, where: str) -> None:
    """Raise CheckpointError where a stored float or scale is infinite, or not a number.

    `data`: uint8, whole blocks. `where` names the expert or tensor. It looks at every block, so it
    is for checks of a whole model, not for loading one.
    """
    check_scales(type_name, data, where)
    if type_name in _FLOATS:
        words, exponent = _FLOATS[type_name]
        bad = (data.view(words) & exponent) == exponent
        what = "values"
    elif type_name in _HALVES:
        blocks = data.reshape(-1, TYPES[type_name].block_bytes)
        bad = np.zeros(len(blocks), bool)
        for at in _HALVES[type_name]:
            halves = np.ascontiguousarray(blocks[:, at : at + 2]).view("<u2")[:, 0]
            bad |= (halves & 0x7C00) == 0x7C00
        what = "blocks"
    else:
        return
    found = np.flatnonzero(bad)
    if found.size:
        raise CheckpointError(
            f"{where}: {found.size} {type_name} {what} are not finite",
            f"the first is number {int(found[0])}, where an exponent stands for no number",
            "the file is damaged; download or convert the model again",
        )
