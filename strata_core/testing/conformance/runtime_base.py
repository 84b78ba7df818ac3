"""What the tests of a runtime's verbs share: what its author supplies, and a bench to work on."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from strata_core.memory.address import address_of
from strata_core.runtime import Launch, Runtime

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

PAGE = mmap.PAGESIZE
MIB = 1 << 20


@contextmanager
def pages(count: int) -> Iterator[int]:
    """Page-aligned pageable memory: its address."""
    mapping = mmap.mmap(-1, count * PAGE)
    yield ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    mapping.close()


def pattern(nbytes: int, seed: int = 1) -> Bytes:
    """Bytes that tell where they came from."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


class Bench:
    """A runtime with one stream on a device: puts bytes there and gets them back."""

    def __init__(self, runtime: Runtime, device: int = 0) -> None:
        self.runtime = runtime
        self.device = device
        self.stream = runtime.create_stream(device)

    def put(self, data: NDArray[np.generic], target: int | None = None) -> int:
        """Copy an array to the device, to memory of its own unless `target` is given; done."""
        raw = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
        address = self.runtime.alloc(self.device, raw.size) if target is None else target
        self.runtime.copy(address, address_of(raw), raw.size, self.stream)
        self.runtime.synchronize(self.stream)
        return address

    def get(self, address: int, nbytes: int) -> Bytes:
        """What is there once the stream is empty."""
        back = np.zeros(nbytes, np.uint8)
        self.runtime.copy(address_of(back), address, nbytes, self.stream)
        self.runtime.synchronize(self.stream)
        return back

    def floats(self, address: int, count: int) -> Floats:
        """`get` as float32."""
        return self.get(address, 4 * count).view(np.float32)


class RuntimeBase:
    """What a runtime's author supplies, and the runtime of one test."""

    def make(self) -> Runtime:
        """A new runtime; the suite opens its contexts and closes it."""
        raise NotImplementedError("a subclass of RuntimeSuite supplies make()")

    def add(self, x: int, y: int, count: int) -> Launch | None:
        """A launch that adds `count` float32 at device address `y` to those at `x`.

        None where the runtime under test has no such kernel; then kernels are not tested.
        """
        del x, y, count
        return None

    @pytest.fixture
    def runtime(self) -> Iterator[Runtime]:
        """The runtime under test, device 0 open; closed after the test whatever happened."""
        made = self.make()
        try:
            made.open_context(0)
            yield made
        finally:
            made.close()

    @pytest.fixture
    def bench(self, runtime: Runtime) -> Bench:
        """Device 0 with a stream."""
        return Bench(runtime)

    @pytest.fixture
    def launch(self, runtime: Runtime) -> Callable[[int, int, int], Launch]:
        """`add`, loaded on device 0; skips without one."""

        def made(x: int, y: int, count: int) -> Launch:
            launch = self.add(x, y, count)
            if launch is None:
                pytest.skip("the suite was given no kernel")
            runtime.load(0, [launch.kernel])
            return launch

        return made
