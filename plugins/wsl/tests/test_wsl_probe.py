"""WSL 2 with an adapter is told from everything else; the record supersedes the usual allocator."""

from __future__ import annotations

import pytest

from strata_core.errors import PluginError
from strata_core.interfaces import AllocatorContext, AllocatorRecord, Unusable, Usable
from strata_core.plugins import Offer
from strata_core.selection import chosen, select_allocator
from strata_wsl import __version__, plugin

CASES = [
    ({}, {}, "this machine does not run under WSL", ""),
    ({"os": "windows"}, {}, "this machine does not run under WSL", ""),
    ({"wsl": 1}, {}, "WSL 1 offers no graphics adapter", "--set-version"),
    ({"wsl": 2}, {}, "the recorded facts do not say whether /dev/dxg exists", "strata-wsl"),
    ({"wsl": 2}, {"path:/dev/dxg": False},
     "WSL 2 offers no graphics adapter (/dev/dxg is missing)", "wsl --update"),
    ({"wsl": 2, "container": ("docker",)}, {"path:/dev/dxg": False},
     "WSL 2 offers no graphics adapter (/dev/dxg is missing)", "--device /dev/dxg"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "observed", "reason", "hint"), CASES)
def test_the_first_obstacle_is_named(record, facts, observed, reason, hint):
    answer = plugin.probe(record(observed, **facts))
    assert isinstance(answer, Unusable)
    assert answer.reason == reason
    assert hint in answer.hint


def test_wsl_2_with_an_adapter_is_usable(record):
    assert plugin.probe(record({"path:/dev/dxg": True}, wsl=2)) == Usable("WSL 2, /dev/dxg")


def test_the_record(record):
    (found,) = plugin.strata_allocators()
    assert (found.name, found.serves, found.supersedes) == ("wsl", ("cuda",), ("cuda-pinned",))
    assert found.pins(record({}, wsl=2), {"pin_limit_gib": 0.5}) == 1 << 29
    assert found.pins(record({}, wsl=2), {"pin_limit_gib": None}) is None


def test_a_backend_without_a_runtime_is_refused(record):
    (found,) = plugin.strata_allocators()
    context = AllocatorContext(
        machine=record({}, wsl=2), options={}, degrade=print, backend="no backend"
    )
    with pytest.raises(PluginError, match=r"^allocator 'wsl' cannot serve str\n.*\nuse "):
        found.build(context)


def test_it_takes_the_place_of_the_usual_allocator_where_it_is_usable():
    (record,) = plugin.strata_allocators()
    usual = AllocatorRecord(
        name="cuda-pinned",
        summary="The usual one",
        api=(1, 0),
        serves=("cuda",),
        probe=plugin.probe,
        build=record.build,
    )
    offers = [Offer(record, "strata-wsl", __version__), Offer(usual, "strata-cuda", "0.1.0")]
    probes = {"wsl": Usable(), "cuda-pinned": Usable()}
    assert chosen(select_allocator(offers, (), probes, "cuda")).name == "wsl"
    probes["wsl"] = Unusable("this machine does not run under WSL")
    assert chosen(select_allocator(offers, (), probes, "cuda")).name == "cuda-pinned"
