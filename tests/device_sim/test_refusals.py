"""Whatever verb fails at whatever call of a start: it works or ends in an error; nothing leaks."""

import gc
import threading
from pathlib import Path

import pytest

from strata_core.errors import StrataError
from strata_core.kernels.device import backend as module
from strata_core.testing.sim import VERBS, SimFaults

SKIPPED = {"close", "take_error", "graph_launcher", "devices", "end_capture"}
"""`close` frees everything first; `end_capture` cannot be undone by any other verb."""


def start(lab, checkpoint, faults):
    runtime = lab.runtime(faults=faults)
    backend = lab.backend(runtime, expert_cache=3, expert_cache_device1=2)
    try:
        return backend, lab.bind(backend, checkpoint)
    except BaseException:
        found = backend.runtime.leaks(), backend.ledger.outstanding()
        backend.close()
        assert found == ([], ())
        raise


@pytest.mark.parametrize("verb", sorted(set(VERBS) - SKIPPED))
def test_every_call_of_a_start_may_fail(lab, tiny_file, verb):
    checkpoint = tiny_file()
    backend, executor = start(lab, checkpoint, SimFaults())
    last = backend.runtime.calls().get(verb, 0)
    lab.check_closed(backend, executor)
    chosen = range(1, last + 1) if last <= 12 else [*range(1, 6), last // 2, last - 1, last]
    for n in chosen:
        with pytest.raises(StrataError):
            start(lab, checkpoint, SimFaults({verb: n}))


@pytest.mark.parametrize("part", ["DeviceTable", "Swapper", "Maker", "DeviceExecutor"])
def test_a_part_that_is_not_made_leaves_no_thread_pipe_or_stream(lab, tiny_file, monkeypatch, part):
    folder = Path("/proc/self/fd")

    def open_files():
        return len(list(folder.iterdir())) if folder.is_dir() else 0

    def refuse(*args, **kwargs):
        raise RuntimeError(f"no {part}")

    split = module.DeviceBackend._split

    def split_and_ask(self, placement, cells, host):
        assert host.serving.pipe, "the pipe is open from here on"
        return split(self, placement, cells, host)

    backend = lab.backend(expert_cache=6, adapt_every=1, adapt_swaps=96)
    checkpoint = tiny_file()
    monkeypatch.setattr(module.DeviceBackend, "_split", split_and_ask)
    gc.collect()  # what earlier tests left
    before, threads = open_files(), set(threading.enumerate())
    with monkeypatch.context() as patch:
        patch.setattr(module, part, refuse)
        with pytest.raises(RuntimeError, match=f"no {part}"):
            lab.bind(backend, checkpoint)
    assert open_files() == before
    assert set(threading.enumerate()) <= threads
    assert backend.runtime.leaks() == []
    assert backend.ledger.outstanding() == ()
    # the same backend can be bound again
    lab.check_closed(backend, lab.bind(backend, checkpoint))
