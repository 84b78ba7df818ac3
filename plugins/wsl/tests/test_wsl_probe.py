"""WSL 2 with an adapter is told from everything else; the record supersedes the usual allocator."""

from __future__ import annotations

import pytest

from strata_core.errors import PluginError
from strata_core.interfaces import AllocatorRecord, Unusable, Usable
from strata_core.plugins import Offer
from strata_core.selection import chosen, select_allocator
from strata_wsl import __version__, plugin

NOT_WRITTEN = f"strata-wsl {__version__} cannot pin memory yet"
CASES = [
    ({}, {}, "this machine does not run under WSL", ""),
    ({"os": "windows"}, {}, "this machine does not run under WSL", ""),
    ({"wsl": 1}, {}, "WSL 1 offers no graphics adapter", "--set-version"),
    ({"wsl": 2}, {}, "the recorded facts do not say whether /dev/dxg exists", "strata-wsl"),
    ({"wsl": 2}, {"path:/dev/dxg": False},
     "WSL 2 offers no graphics adapter (/dev/dxg is missing)", "wsl --update"),
    ({"wsl": 2, "container": ("docker",)}, {"path:/dev/dxg": False},
     "WSL 2 offers no graphics adapter (/dev/dxg is missing)", "--device /dev/dxg"),
    ({"wsl": 2}, {"path:/dev/dxg": True}, NOT_WRITTEN, "a later version"),
]  # fmt: skip


@pytest.mark.parametrize(("facts", "observed", "reason", "hint"), CASES)
def test_the_first_obstacle_is_named(record, facts, observed, reason, hint):
    answer = plugin.probe(record(observed, **facts))
    assert isinstance(answer, Unusable)
    assert answer.reason == reason
    assert hint in answer.hint


def test_the_record_cannot_be_built_yet():
    (record,) = plugin.strata_allocators()
    assert (record.name, record.serves, record.supersedes) == ("wsl", ("cuda",), ("cuda-pinned",))
    with pytest.raises(PluginError, match=r"^allocator 'wsl' cannot be built\n.* yet\n"):
        record.build(None)


def test_it_takes_the_place_of_the_usual_allocator_once_it_is_usable():
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
