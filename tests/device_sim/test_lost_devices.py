"""A kernel that goes wrong takes its context along: the error is clear, everything ends at once."""

import threading
import time

import numpy as np
import pytest

from strata_core.errors import DeviceError, EngineError, StrataError
from strata_core.interfaces import Window
from strata_core.testing.sim import SimFaults

WORDS = "unspecified launch failure (error 719)"
QUICK = 60.0
"""Seconds, many more than an end takes, and half of what a wait for a lost device would take."""


def closed(backend, executor):
    """Close what there is; whatever it raises comes after everything is free."""
    began = time.monotonic()
    told = []
    for part in filter(None, (executor, backend)):
        try:
            part.close()
        except StrataError as error:
            told.append(error.why)
    assert all(WORDS in why for why in told)
    assert backend.runtime.closed
    assert backend.ledger.outstanding() == ()
    assert time.monotonic() - began < QUICK


def bound(lab, tiny_file, **options):
    options.setdefault("expert_cache", 3)
    backend = lab.backend(**options)
    return backend, lab.bind(backend, tiny_file())


def lose(backend, verb, nth=1):
    """From the nth call of a verb from now on the devices are lost."""
    backend.runtime.faults = SimFaults(lose={verb: backend.runtime.calls().get(verb, 0) + nth})


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"expert_cache": 16},
        {"expert_cache_device1": 5},
        {"adapt_every": 1, "adapt_swaps": 96, "expert_cache": 8},
    ],
)
@pytest.mark.parametrize("nth", [1, 2])
def test_a_device_lost_in_a_round(lab, tiny_file, tools, options, nth):
    before = threading.active_count()
    backend, executor = bound(lab, tiny_file, **options)
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    lose(backend, "graph_launcher", nth)

    def rounds():
        for position in range(1, 1 + nth):
            ids = tools.ids[position : position + 1]
            executor.run(tools.window(ids, start=position, slot=slot))

    with pytest.raises(EngineError, match="a round stopped at") as caught:
        rounds()
    assert WORDS in caught.value.why
    with pytest.raises(DeviceError, match="failed"):  # the next one does not wait for it
        executor.run(tools.window(tools.ids[:1], slot=slot))
    closed(backend, executor)
    assert threading.active_count() <= before


@pytest.mark.parametrize("verb", ["launch", "copy", "record", "finished"])
def test_a_device_lost_in_a_prompt(lab, tiny_file, tools, verb):
    before = threading.active_count()
    backend, executor = bound(lab, tiny_file)
    slot = executor.open_sequence()
    lose(backend, verb, 2)
    window = Window(
        ids=np.resize(tools.ids, 40).astype(np.int32),
        positions=np.arange(40, dtype=np.int32),
        slots=np.full(40, slot, np.int32),
        logits_rows=np.array([39], np.int32),
        kernel_class="prompt",
    )

    def prompts():
        for _ in range(3):
            executor.run(window)
            executor.run(tools.window(tools.ids[:1], start=40, slot=slot))

    with pytest.raises(StrataError) as caught:
        prompts()
    assert WORDS in caught.value.why
    closed(backend, executor)
    assert threading.active_count() <= before


@pytest.mark.parametrize("verb", ["launch", "synchronize", "load", "copy", "end_capture"])
def test_a_device_lost_in_a_start(lab, tiny_file, verb):
    before = threading.active_count()
    backend = lab.backend(lab.runtime(faults=SimFaults(lose={verb: 2})), expert_cache=3)
    with pytest.raises(DeviceError) as caught:
        lab.bind(backend, tiny_file())
    assert WORDS in caught.value.why
    closed(backend, None)
    assert threading.active_count() <= before


def test_a_device_that_never_answers_says_what_the_driver_says(lab, tiny_file, tools):
    """The host waits for a word that does not come; then it asks for the error of the stream."""
    backend = lab.backend(patience=0.05, expert_cache=3)
    executor = lab.bind(backend, tiny_file())
    slot = executor.open_sequence()
    executor.run(tools.window(tools.ids[:1], slot=slot))
    kernels = backend.runtime._kernels

    def silent(_runtime, _device, _launch):
        backend.runtime.lost = True

    kernels["dispatch"] = silent
    with pytest.raises(EngineError, match="a round stopped at layer 0") as caught:
        executor.run(tools.window(tools.ids[1:2], start=1, slot=slot))
    assert WORDS in caught.value.why
    closed(backend, executor)
