"""What a model takes of devices and of page-locked memory, told without any: for planning."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from attrs import frozen

from strata_core.cache.slots import slot_bytes
from strata_core.cache.staging import BUFFERS, staging_bytes
from strata_core.cache.swaps import buffer_bytes
from strata_core.interfaces import BlobLayout, Limits
from strata_core.kernels.cpu.executor import float_weights
from strata_core.kernels.device.dense import lone_embedding
from strata_core.kernels.device.exchange import Exchange, Shape
from strata_core.kernels.device.layout import MOST_TOKENS
from strata_core.kernels.device.prompt_lower import (
    prompt_exchange,
    prompt_model,
    prompt_regions,
)
from strata_core.kernels.device.regions import Regions
from strata_core.kernels.device.workspace import Model, cells_bytes, helper_regions, main_regions
from strata_core.kernels.program import Program, Weight
from strata_core.plan.lending import LEAST, own_buffers


@frozen(kw_only=True)
class DeviceSizes:
    """Bytes: `dense` weights with the token embedding, `embedding` of it (0 where it is tied),
    `workspace` of the first device, `helper_workspace` of each other one, `small` page-locked
    buffers; `table` and `moving` are those that experts change places through; `prompt` of the
    first device for a prompt's chunk of `chunk` tokens, and `prompt_buffers` for the experts of
    prompts where its cache of fewer than `lends` lends none.
    """

    dense: int
    embedding: int
    workspace: int
    helper_workspace: int
    small: int
    prompt: int
    prompt_buffers: int
    chunk: int
    lends: int
    table: int
    moving: int


@frozen
class StoredWeight:
    """A dense weight as the checkpoint has it."""

    type: str
    shape: tuple[int, ...]
    nbytes: int


def device_sizes(
    program: Program,
    weights: Mapping[Weight, StoredWeight],
    layouts: Mapping[int, BlobLayout],
    experts: int,
    limits: Limits,
) -> DeviceSizes:
    """The sizes of a model in windows as large as the kernels take, prompts in `limits.tokens`."""
    shape = Shape.of(program, min(MOST_TOKENS, limits.tokens))
    model = Model(
        program=program,
        layouts=layouts,
        experts=experts,
        types={weight: stored.type for weight, stored in weights.items()},
        limits=limits,
        shape=shape,
    )
    exchange, prompts = Exchange.plan(shape), prompt_model(model, limits.tokens)
    largest = max((layout.nbytes for layout in layouts.values()), default=0)
    each, chunk = max(map(slot_bytes, layouts.values()), default=0), prompt_regions(prompts).nbytes
    own = own_buffers(0, experts, len(layouts), chunk // max(1, each))
    floats, lone = float_weights(program), lone_embedding(program)
    dense = Regions()
    for weight, stored in weights.items():
        nbytes = 4 * prod(stored.shape) if weight in floats else stored.nbytes
        dense.add(repr(weight), nbytes)
    return DeviceSizes(
        dense=dense.nbytes,
        embedding=weights[lone].nbytes if lone is not None else 0,
        workspace=main_regions(model, exchange).nbytes,
        helper_workspace=helper_regions(model).nbytes,
        small=exchange.nbytes + prompt_exchange(prompts).nbytes + BUFFERS * staging_bytes(largest),
        prompt=chunk,
        prompt_buffers=own * each,
        chunk=limits.tokens,
        lends=LEAST,
        table=cells_bytes(model),
        moving=buffer_bytes(largest),
    )
