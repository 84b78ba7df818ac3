"""A sample of the refusals that `refusals.py` tries one by one; the counts are printed.

All of them: `python tests/start/refusals.py`, about two minutes.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).with_name("refusals.py")


def script() -> Any:
    """The script as a module; it is not one of a package."""
    spec = importlib.util.spec_from_file_location("strata_refusals", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


refusals = script()


@pytest.mark.parametrize(
    ("source", "order", "every"),
    [("sliced-pinned", "plain", 41), ("arena", "wsl", 41)],
)
def test_a_refused_call_ends_in_a_clear_error_or_a_degradation(
    source, order, every, kernels, wsl, capsys
) -> None:
    del wsl  # skips where strata-wsl is not there
    counts, wrong = refusals.sweep(refusals.Lab(kernels, source, order), every)
    assert wrong == []
    assert {"open_context", "host_alloc", "alloc", "copy", "launch", "end_capture"} <= set(counts)
    assert sum(count.errors for count in counts.values()) > 20
    assert counts["host_alloc"].calls >= 2
    with capsys.disabled():
        print(f"\nsource {source}, {order} order, every {every}:\n{refusals.table(counts)}")


def test_the_sweep_finds_what_is_wrong(kernels) -> None:
    lab = refusals.Lab(kernels, "mmap")
    clean = lab.start()
    assert (clean.error, clean.left) == (None, [])
    bad = [
        refusals.End(None, (0,), (), {}, []),
        refusals.End(None, clean.tokens, (), {}, ["a claim"]),
        refusals.End(KeyError("x"), (), (), {}, []),
        refusals.End(refusals.StrataError("what only"), (), (), {}, []),
    ]
    for end in bad:
        with pytest.raises(AssertionError):
            refusals.check(clean, end, "this")
    assert refusals.check(clean, clean, "this") == "unharmed"
    assert list(refusals.cases({"a": 5}, 3)) == [("a", 1), ("a", 3), ("a", 5)]
