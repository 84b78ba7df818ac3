"""Graphs: items put on a stream while it records."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress

from strata_core.errors import StrataError
from strata_core.kernels.device.segments import Copy, Item
from strata_core.memory.held import undo_all
from strata_core.runtime import KernelKey, Launch, Runtime


def capture(runtime: Runtime, stream: int, items: Iterable[Item]) -> int:
    """A graph of items, in order. Their kernels must be loaded."""
    runtime.begin_capture(stream)
    try:
        for item in items:
            put(runtime, stream, item)
        return runtime.end_capture(stream)
    except BaseException:
        with suppress(StrataError):
            undo_all(runtime, [lambda: runtime.destroy_graph(runtime.end_capture(stream))])
        raise


def put(runtime: Runtime, stream: int, item: Item) -> None:
    """Put one item on a stream."""
    if isinstance(item, Launch):
        runtime.launch(item, stream)
    elif isinstance(item, Copy):
        runtime.copy(item.target, item.source, item.nbytes, stream)
    else:
        runtime.fill(item.target, item.value, item.nbytes, stream)


def kernels_of(items: Iterable[Item]) -> list[KernelKey]:
    """The kernels that items launch, each once."""
    return sorted({item.kernel for item in items if isinstance(item, Launch)}, key=repr)
