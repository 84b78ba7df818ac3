"""Every fault of the table ends as it should, and the table finds one that does not."""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from .faults import FAULTS, Lab, Outcome, io_error, make_lab, served

pytestmark = pytest.mark.skipif(not hasattr(os, "preadv"), reason="this system has no preadv")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return make_lab(tmp_path_factory.mktemp("faults"))


# Killed at any moment: test_crash.py has more of it.
QUICK = [fault for fault in FAULTS if fault.__name__ != "killed"]


@pytest.mark.parametrize("fault", QUICK, ids=lambda fault: fault.__name__)
def test_a_fault_ends_as_it_should(fault: Callable[[Lab], Outcome], lab: Lab) -> None:
    outcome = fault(lab)
    assert outcome.wrong == "", outcome
    assert outcome.said
    assert outcome.later


def test_the_table_tells_what_is_wrong(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = served(lab, "nothing breaks", lambda: None, lambda: None)
    assert nothing.wrong == "the request was answered"
    monkeypatch.setitem(lab.expected, lab.spares, "another")
    assert "an answer meanwhile differs" in io_error(lab).wrong
