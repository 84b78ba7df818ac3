"""The adaptive cache through the public interface, and which addresses hold while it moves."""

from pathlib import Path

import numpy as np
import pytest

import strata_core
from strata_core.engine.messages import Finished
from strata_core.interfaces import Expert
from strata_core.kernels.device.adapting import holds
from strata_core.sources.mmap import MappedFile
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf


class PartlyStable:
    """One expert of each layer has an address that holds."""

    stable_version = 0

    def stable_addresses(self, layer):
        table = np.zeros((4, 3), np.uint64)
        table[layer] = 64
        return table

    def begin_layer(self, layer, experts): ...
    def view(self, expert):
        pytest.fail("nothing is acquired to learn this")

    read_into = release = close = view


def test_whether_an_address_holds(tiny_file):
    for layer in range(3):
        found = [holds(PartlyStable(), Expert(layer, index)) for index in range(4)]
        assert found == [index == layer for index in range(4)]
    assert holds(MappedFile(tiny_file().experts), Expert(0, 1))
    assert not holds(object(), Expert(0, 1))


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=12, layers=2), expert_type="Q5_K")
    return path


def answer(model, **options):
    with strata_core.load(model, max_context=128, threads=1, **options) as loaded:
        found = []
        for _ in range(2):
            (done,) = [
                event
                for event in loaded.generate([5, 9, 3], max_tokens=40, ignore_eos=True)
                if isinstance(event, Finished)
            ]
            found.append((done.first_logits_sha256, done.token_ids))
        return found, loaded.counters, [d.what for d in loaded.degradations]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("every", [1, 4])
def test_a_tier_stays_in_step_with_the_cache(model, share, every):
    expected, _, _ = answer(model, backend="cpu")
    options = {"backend": "sim", "source": "tiered-file", "expert_cache": 9, "sim_vram": 0.05}
    plan = strata_core.api.make_plan(model, max_context=128, **options, ram_budget=2).plan
    experts = 24 * 300_000
    fixed = next(t for t in plan.tiers if t.name == "ram").need - plan.budget
    budget = (fixed + share * experts) / 2**30
    found, counters, degraded = answer(
        model, **options, adapt_every=every, tier_verify=True, ram_budget=budget
    )
    assert found == expected
    assert counters["entered"]["experts"] > 0
    assert counters["file"]["differ"] == 0
    assert counters["file"]["verified"] > 0
    assert not [what for what in degraded if "places" in what or "enter" in what]
    if share == 0.4:
        assert counters["left"]["experts"] > 0


def test_what_a_moving_cache_learned_fills_the_next_one(model):
    options = {"backend": "sim", "source": "mmap", "expert_cache": 9, "sim_vram": 0.05}
    _, first, _ = answer(model, **options, adapt_every=4)
    _, again, _ = answer(model, **options, adapt_every=0)
    assert again["hit"]["experts"] > first["hit"]["experts"]
    _, static, _ = answer(model, **options, adapt_every=0)
    assert static == again, "a cache that does not move learns nothing"
