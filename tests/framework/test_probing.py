"""Probes: bounded in time, unable to raise, their answers checked, their output kept off stdout."""

from __future__ import annotations

import time

import pytest

from strata_core.interfaces import Unusable, Usable
from strata_core.plugins import load_plugins, probe_catalogue


def test_every_offer_has_an_answer(install, make_machine):
    catalogue = load_plugins(install("good"))
    probes = probe_catalogue(catalogue, make_machine())
    here = Usable("linux x86_64")
    assert probes == {
        "backend": {
            "cpu": Usable("x86_64, 8 cores"),
            "dummy": Usable("always"),
            "reference": here,
            "sim": Usable("x86_64, 8 cores"),
        },
        "allocator": {"dummy-memory": Usable("always"), "host": here, "sim-pinned": here},
        "source": {
            "arena": here,
            "dummy-source": Usable("always"),
            "mmap": here,
            "sliced-pinned": here,
            "tiered-file": here,
        },
    }


def test_a_slow_probe_is_not_waited_for(install, make_machine):
    catalogue = load_plugins([*install("slow_probe"), *install("good")])
    from strata_dummy import slow_probe
    from strata_dummy.clock import over_when_only

    probes = probe_catalogue(catalogue, make_machine(), 0.3, over_when_only("slow"))
    slow_probe.GATE.set()
    assert probes["backend"]["slow"] == Unusable(
        "its probe gave no answer within 0.3 s", "tell the authors of strata-dummy-slow-probe 1.2"
    )
    assert probes["backend"]["dummy"] == Usable("always")


def test_probes_have_seconds_of_the_real_clock(install, make_machine):
    catalogue = load_plugins(install("slow_probe"))
    from strata_dummy import slow_probe

    started = time.monotonic()
    probes = probe_catalogue(catalogue, make_machine(), seconds=0.1)
    taken = time.monotonic() - started
    slow_probe.GATE.set()
    assert taken >= 0.1
    assert "within 0.1 s" in probes["backend"]["slow"].reason


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("raising", "its probe raised ValueError: no such fact"),
        ("exiting", "its probe raised SystemExit: 4"),
        ("wordy", "its probe returned str, not Usable or Unusable"),
        ("mute", "its probe said no without a reason"),
    ],
)
def test_a_probe_that_breaks_its_contract_counts_as_a_no(install, make_machine, name, reason):
    probes = probe_catalogue(load_plugins(install("bad_probes")), make_machine())
    hint = "tell the authors of strata-dummy-bad-probes 1.2"
    assert probes["backend"][name] == Unusable(reason, hint)


def test_what_a_probe_prints_goes_to_stderr(install, make_machine, capsys):
    catalogue = load_plugins(install("prints"))
    capsys.readouterr()
    probe_catalogue(catalogue, make_machine())
    assert capsys.readouterr() == ("", "printed by the probe\n")
