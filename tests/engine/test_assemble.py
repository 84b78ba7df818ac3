"""Starting what was prepared: what was built is held against what was planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attrs import evolve

import strata_core
from strata_core.builtin import REFERENCE
from strata_core.engine import prepare as module
from strata_core.errors import PluginError, UsageError
from strata_core.interfaces import StartPolicy
from strata_core.kernels.reference_backend import ReferenceBackend
from strata_core.memory.host import HostAllocator
from strata_core.plugins import load_plugins


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """built(capabilities=..., policy=...): core's parts, which offer and wish that once built.

    Returns a list to which the parts add their role when they are closed.
    """

    def install(capabilities: Any = REFERENCE, policy: Any = None) -> list[str]:
        closed: list[str] = []

        class Backend(ReferenceBackend):
            @property
            def capabilities(self) -> Any:
                return capabilities

            def close(self) -> None:
                closed.append("backend")

        class Allocator(HostAllocator):
            @property
            def start_policy(self) -> Any:
                return StartPolicy() if policy is None else policy

            def close(self) -> None:
                closed.append("allocator")
                super().close()

        found = load_plugins([])
        backend, allocator = found.backend("reference"), found.allocator("host")
        changed = evolve(
            found,
            backends=(evolve(backend, record=evolve(backend.record, build=lambda _: Backend())),),
            allocators=(
                evolve(allocator, record=evolve(allocator.record, build=lambda _: Allocator())),
            ),
        )
        monkeypatch.setattr(module, "load_plugins", lambda blocked=(): changed)
        return closed

    return install


@pytest.mark.parametrize(
    ("less", "options", "what", "remedy"),
    [
        ({"kv_types": ("fp16",)}, {}, "reference on this machine cannot keep", "give --kv fp16"),
        ({"kv_types": ("fp32",)}, {"kv": "fp16"}, "values as fp16", "give --kv fp32"),
        ({"kv_types": ()}, {}, "reference on this machine cannot keep", "another backend"),
        ({"types": frozenset({"Q4_0"})}, {}, "reference on this machine cannot compute", "another"),
    ],
)
def test_a_built_backend_that_offers_less_is_an_error(less, options, what, remedy, built) -> None:
    closed = built(capabilities=evolve(REFERENCE, **less))
    with pytest.raises(UsageError) as caught:
        strata_core.load("demo", **options)
    assert what in caught.value.what
    assert remedy in caught.value.remedy
    assert closed == ["backend"]


def test_a_built_backend_that_offers_enough_runs(built) -> None:
    closed = built(capabilities=evolve(REFERENCE, kv_types=("fp16",)))
    with strata_core.load("demo", kv="fp16", backend="reference") as model:
        assert model.logits([1, 2]).shape == (2, 4096)
        assert tuple(model.degradations) == ()
    assert closed == ["allocator", "backend"]


@pytest.mark.parametrize(
    ("policy", "asked"),
    [
        (StartPolicy(), []),
        (StartPolicy(small_pins_first=False), []),
        (StartPolicy(contexts_first=True), ["devices' contexts before all else"]),
        (StartPolicy(pin_limit=0), ["a limit of 0 pinned bytes"]),
        (StartPolicy(embedding="pinned"), ["the token embedding in pinned memory"]),
        (
            StartPolicy(contexts_first=True, pin_limit=1 << 30, embedding="pinned"),
            [
                "devices' contexts before all else",
                "a limit of 1073741824 pinned bytes",
                "the token embedding in pinned memory",
            ],
        ),
    ],
)
def test_wishes_that_cannot_be_met_are_reported(policy, asked, built) -> None:
    built(policy=policy)
    with strata_core.load("demo", backend="reference") as model:
        reported = list(model.degradations)
    assert [item.what for item in reported] == [
        f"allocator host asks for {wish}, which this backend does not do" for wish in asked
    ]
    assert all(all(item.as_json().values()) for item in reported)


def test_a_start_policy_that_is_none_is_the_plugins_error(built) -> None:
    closed = built(policy={"contexts_first": True})
    with pytest.raises(PluginError, match="allocator 'host' cannot be used") as caught:
        strata_core.load("demo")
    assert "is a dict" in caught.value.why
    assert closed == ["allocator", "backend"]
