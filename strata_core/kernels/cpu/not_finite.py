"""The error of a round in which a kernel met a value that is not finite."""

from __future__ import annotations

from strata_core.checkpoint.packed import PackedExperts
from strata_core.checkpoint.scales import check_scales
from strata_core.errors import EngineError, StrataError
from strata_core.interfaces import Expert, ExpertFiles
from strata_core.kernels.program import Program, Weight


def not_finite(program: Program, files: ExpertFiles, number: int) -> StrataError:
    """What op number `number` of a program met, naming its layer.

    Raises the CheckpointError of an expert whose scales are no numbers, where that is the cause.
    """
    op = program.ops[number]
    layer = op.args.get("layer")
    for value in op.args.values():
        if isinstance(value, Weight) and value.layer is not None:
            layer = value.layer
    _check_experts(files, layer if isinstance(layer, int) else program.kv_layers)
    where = "outside the layers" if layer is None else f"in layer {layer}"
    return EngineError(
        f"{op.kernel} {where} met a value that is not finite",
        "a weight or an activation overflowed, or the file is damaged",
        "compare the model file's checksum with its source, or use another model",
    )


def _check_experts(files: ExpertFiles, last: int) -> None:
    """Raise the CheckpointError of an expert up to layer `last` whose scales are no numbers.

    Experts in a mapped file are not looked through before they are used: that would read it.
    """
    if isinstance(files, PackedExperts) and files.file is None:
        return  # a plugin's source read them, and only it can again
    for layer, layout in files.layouts.items():
        for index in range(files.count if layer <= last else 0):
            expert = Expert(layer, index)
            for part, data in zip(layout.parts, files.mapped(expert), strict=True):
                check_scales(part.type, data, str(expert))
