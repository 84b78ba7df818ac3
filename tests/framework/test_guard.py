"""Diverting stdout while plugins run."""

from __future__ import annotations

import sys
from threading import Barrier, Thread

import pytest

from strata_core.plugins.guard import stdout_to_stderr


def test_threads_that_leave_in_any_order_put_stdout_back() -> None:
    before = sys.stdout
    both, left = Barrier(2), Barrier(2)

    def first() -> None:
        with stdout_to_stderr():
            both.wait(120)
        left.wait(120)

    def second() -> None:
        with stdout_to_stderr():
            both.wait(120)
            left.wait(120)
            assert sys.stdout is sys.stderr

    threads = [Thread(target=first), Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert sys.stdout is before


def test_an_error_inside_puts_stdout_back() -> None:
    before = sys.stdout
    with pytest.raises(KeyError), stdout_to_stderr():
        raise KeyError("x")
    assert sys.stdout is before


def test_nested_use_diverts_until_the_outer_end(capsys: pytest.CaptureFixture[str]) -> None:
    with stdout_to_stderr():
        with stdout_to_stderr():
            print("inner")
        print("outer")
    print("after")
    assert capsys.readouterr() == ("after\n", "inner\nouter\n")
