"""Stdout belongs to the command, and stderr is never a reason to fail."""

from __future__ import annotations

import sys

import pytest

from strata_core.cli.streams import (
    begin,
    document_written,
    own_stdout,
    shared_stdout,
    write,
    write_document,
    write_error,
)


def test_only_write_reaches_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    before = sys.stdout
    with own_stdout():
        print("stray")
        write("answer\n")
        with shared_stdout():
            print("asked for")
        print("stray again")
    assert sys.stdout is before
    assert capsys.readouterr() == ("answer\nasked for\n", "stray\nstray again\n")


def test_stdout_comes_back_after_an_error() -> None:
    before = sys.stdout
    with pytest.raises(ZeroDivisionError), own_stdout():
        raise ZeroDivisionError
    assert sys.stdout is before


def test_a_second_document_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    begin()
    assert not document_written()
    write_document("first")
    write_document("second")
    assert document_written()
    assert capsys.readouterr() == ("first", "second")
    begin()
    assert not document_written()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/dev/full")
@pytest.mark.parametrize(("args", "code"), [(("-n", "2"), 0), (("--nope",), 2)])
def test_a_full_stderr_stops_nothing(args: tuple[str, ...], code: int, run_strata) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        result = run_strata("generate", "demo", "In the", *args, stderr=full)
    assert result.code == code
    assert bool(result.out) == (code == 0)


def test_a_closed_stderr_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    write_error("nobody hears this")
