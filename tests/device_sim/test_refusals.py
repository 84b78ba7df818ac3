"""Whatever verb fails at whatever call of a start: it works or ends in an error; nothing leaks."""

import pytest

from strata_core.errors import StrataError
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
