"""The tiered file in a running model: same tokens at every budget, the rule, profiles, counters."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import strata_core
from strata_core.api import make_plan
from strata_core.cache.profile import Profile, read_profile, write_profile
from strata_core.checkpoint.open import open_checkpoint
from strata_core.config import resolve_arguments
from strata_core.engine.prepare import prepare
from strata_core.engine.tier import learned_path
from strata_core.errors import Degradation, StrataError, UsageError
from strata_core.pack.write import write_pack
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

GIB = 1 << 30
PROMPT = [5, 9, 3, 200, 17, 4, 4, 250, 31, 8]


@pytest.fixture
def tiny_model(tmp_path: Path) -> Path:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=8, layers=3), expert_type="Q4_K")
    return path


def budget(model: Path, share: float, **options: Any) -> float:
    """A --ram-budget, in GiB, that keeps such a share of the experts' cells."""
    plan = make_plan(model, source="tiered-file", ram_budget=4, **options).plan
    (tier,) = [tier for tier in plan.tiers if tier.name == "ram"]
    rest = sum(item.nbytes for item in tier.items if item.what != "experts")
    cells = tier.need - rest
    return (rest + int(cells * share) + 1) / GIB


def run(model: Path, prompt: Any = PROMPT, **options: Any) -> tuple[Any, ...]:
    """(first logits' hash, tokens, counters) of a short answer."""
    with strata_core.load(model, **options) as loaded:
        *_, done = loaded.generate(prompt, max_tokens=12, ignore_eos=True)
        return done.first_logits_sha256, done.token_ids, loaded.counters


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory: pytest.TempPathFactory, compiled_kernels: Path) -> Path:
    """A folder that has compiled kernels from all tests."""
    folder = tmp_path_factory.mktemp("cache")
    with suppress(OSError):  # no links here: kernels are compiled once for the module
        (folder / "kernels").symlink_to(compiled_kernels.resolve(), target_is_directory=True)
    return folder


@pytest.fixture(autouse=True)
def own_cache(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What runs learn stays in the test."""
    shutil.rmtree(cache_folder / "profiles", ignore_errors=True)
    monkeypatch.setenv("STRATA_CACHE_DIR", str(cache_folder))
    return cache_folder


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_tokens_do_not_depend_on_the_budget(backend: str, tiny_model: Path) -> None:
    expected = run(tiny_model, backend=backend, source="arena")[:2]
    read = []
    for share in (0.0, 0.13, 0.5, 0.9, 1.0):
        options = {
            "source": "tiered-file",
            "ram_budget": budget(tiny_model, share, backend=backend),
        }
        *answer, counters = run(tiny_model, backend=backend, tier_verify=True, **options)
        assert tuple(answer) == expected
        assert counters["file"]["differ"] == 0
        assert counters["file"]["verified"] == counters["file"]["experts"]
        read.append(counters["file"]["experts"])
    assert read[-1] == 24, "the tier is filled once, and nothing is read after that"
    assert read[0] > 24, "a ring of one layer's experts does not keep all layers"


def test_a_pack_and_its_checkpoint_give_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    class Bar:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_: None

    write_pack(open_checkpoint(tiny_model), tmp_path / "p", Bar())
    expected = run(tiny_model, source="mmap")[:2]
    for share in (0.0, 0.4):
        options = {"source": "tiered-file", "ram_budget": budget(tmp_path / "p", share)}
        assert run(tmp_path / "p", verify_reads="all", **options)[:2] == expected


@pytest.mark.shared
@pytest.mark.parametrize("variant", ["kjv-Q8_0.gguf", "kjv-Q4_K_M.gguf", "."])
def test_the_reference_models_give_the_same_tokens(variant: str, models: Path) -> None:
    model = models / "kjv-moe" / variant
    prompt = "And the LORD spake unto Moses, saying, " * 20
    expected = run(model, prompt, source="arena")[:2]
    for share in (0.0, 0.4, 1.0):
        options = {"source": "tiered-file", "ram_budget": budget(model, share)}
        assert run(model, prompt, **options)[:2] == expected


# --- when it is chosen -------------------------------------------------------------------------


def chosen(model: Path, machine: Any, **options: Any) -> Any:
    return prepare(open_checkpoint(model), resolve_arguments(options, {}), machine)


def test_it_is_chosen_where_the_experts_and_16_gib_exceed_the_memory(
    tiny_model: Path, make_machine
) -> None:
    experts = make_plan(tiny_model, source="mmap").plan.tiers[-1].need
    available = int(budget(tiny_model, 0.3) * GIB)

    def source(installed: int, **options: Any) -> str:
        machine = make_machine(ram_installed=installed, ram_available=available)
        found = chosen(tiny_model, machine, **{"ram_reserve_gib": 0, **options})
        assert found.plan.source == found.source.name
        return found.source.name

    assert source(16 * GIB + experts) == "mmap"
    assert source(16 * GIB + experts - 1) == "tiered-file"
    assert source(8 * GIB, no_low_ram=True) == "mmap"
    assert source(8 * GIB, source="mmap") == "mmap"
    limited = make_machine(
        ram_installed=64 * GIB, ram_available=available, cgroup_memory_limit=8 * GIB
    )
    found = chosen(tiny_model, limited, ram_reserve_gib=0)
    assert found.source.name == "tiered-file"
    assert "16.00 GiB exceed the 8.00 GiB there are" in found.plan.source_because
    whats = [item.what for item in found.degradations]
    assert "which experts stay in memory is not chosen by use" in whats
    assert f"{found.plan.reads.experts_in_file} experts are read from the file when needed" in whats


def test_the_arena_is_taken_where_it_fits_all_the_same(tiny_model: Path, make_machine) -> None:
    machine = make_machine(ram_installed=8 * GIB, ram_available=7 * GIB)
    assert chosen(tiny_model, machine, ram_reserve_gib=0).source.name == "arena"


def test_a_budget_too_small_for_all_experts_chooses_it(tiny_model: Path, make_machine) -> None:
    small = budget(tiny_model, 0.5)
    found = chosen(tiny_model, make_machine(), ram_budget=small)
    assert found.source.name == "tiered-file"
    assert found.plan.fits
    assert 0 < found.plan.reads.experts_kept < 24
    assert found.plan.reads.experts_in_file == 24 - found.plan.reads.experts_kept
    ram = next(tier for tier in found.plan.tiers if tier.name == "ram")
    assert ram.need <= small * GIB
    assert found.plan.budget == next(i.nbytes for i in ram.items if i.what == "experts")
    assert chosen(tiny_model, make_machine(), ram_budget=small, no_low_ram=True).source.name == (
        "mmap"
    )


def test_several_devices_refuse_it_by_flag_and_do_without_it_otherwise(
    tiny_model: Path, make_machine
) -> None:
    options = {"backend": "sim", "sim_devices": 2, "ram_reserve_gib": 0}
    machine = make_machine(ram_installed=8 * GIB, ram_available=258 << 20)
    with pytest.raises(UsageError, match="tiered-file") as caught:
        chosen(tiny_model, machine, source="tiered-file", **options)
    assert caught.value.why.startswith("it serves one device without helpers, and ")
    found = chosen(tiny_model, machine, **options)
    assert found.source.name == "mmap"
    (item,) = [i for i in found.degradations if i.what.startswith("the mapped file is used inst")]
    assert item.why == caught.value.why


def test_the_plan_expects_fewer_reads_by_a_profile(tiny_model: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(tiny_model)
    counts = {layer: [90, 0, 0, 0, 0, 0, 0, 10] for layer in checkpoint.experts.layouts}
    profile = tmp_path / "p.json"
    write_profile(Profile.of(checkpoint.model_hash, counts), profile)
    options = {"source": "tiered-file", "ram_budget": budget(tiny_model, 3 / 24)}
    neutral = make_plan(tiny_model, **options).plan.reads
    assert (neutral.experts_kept, neutral.learned) == (3, False)
    assert neutral.experts_a_token == pytest.approx(21 * 2 / 8)
    known = make_plan(tiny_model, expert_profile=profile, **options)
    assert known.plan.reads.experts_a_token == pytest.approx(3 * 2 * 0.1)
    assert known.plan.reads.learned
    assert known.as_json()["reads"]["experts_kept"] == 3


# --- profiles ----------------------------------------------------------------------------------


def test_a_profile_counts_what_the_router_chose(tiny_model: Path, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    with strata_core.load(tiny_model, backend="cpu", expert_profile_save=saved) as model:
        model.logits(PROMPT)
        counted = model.profile()
    assert {layer: sum(row) for layer, row in counted.counts.items()} == {0: 20, 1: 20, 2: 20}
    assert read_profile(saved) == counted
    with strata_core.load(
        tiny_model, backend="cpu", expert_profile=saved, expert_profile_save=saved
    ) as model:
        model.logits(PROMPT)
    twice = {layer: tuple(2 * n for n in row) for layer, row in counted.counts.items()}
    assert read_profile(saved).counts == twice


def test_a_profile_serves_a_model_and_its_pack(tiny_model: Path, tmp_path: Path) -> None:
    class Bar:
        def __getattr__(self, _name: str) -> Any:
            return lambda *_: None

    pack = tmp_path / "p"
    write_pack(open_checkpoint(tiny_model), pack, Bar())
    for recorded, used in ((tiny_model, pack), (pack, tiny_model)):
        saved = tmp_path / f"{recorded.name}.json"
        run(recorded, backend="cpu", expert_profile_save=saved)
        options = {"source": "tiered-file", "ram_budget": budget(used, 0.4)}
        assert make_plan(used, expert_profile=saved, **options).plan.reads.learned


def test_what_a_run_learned_orders_the_next_ones_tier(tiny_model: Path, own_cache: Path) -> None:
    options = {"source": "tiered-file", "ram_budget": budget(tiny_model, 0.3)}
    with strata_core.load(tiny_model, **options) as model:
        assert any("profile" in item.why for item in model.degradations)
        model.logits(PROMPT)
        counted = model.profile()
    (kept,) = (own_cache / "profiles").iterdir()
    assert kept == learned_path(model.checkpoint, resolve_arguments({}))
    assert read_profile(kept) == counted
    plan = make_plan(tiny_model, **options)
    assert plan.plan.reads.learned
    assert not any("profile" in item.why for item in plan.degradations)
    kept.write_text("{", "utf-8")
    assert not make_plan(tiny_model, **options).plan.reads.learned
    with strata_core.load(tiny_model, source="arena") as model:
        model.logits(PROMPT)
    assert kept.read_text("utf-8") == "{", "only runs with a tier learn by themselves"


OTHER_PROFILE = json.dumps(
    {"format": "strata-profile", "version": 1, "model_hash": "f" * 64, "experts": 1,
     "counts": {"0": [1]}}
)  # fmt: skip
DAMAGED = ["", "{", "[]", '{"format": "strata-profile", "version": 99}', OTHER_PROFILE]


@pytest.mark.parametrize("content", DAMAGED)
def test_a_damaged_profile_of_earlier_runs_is_reported(
    tiny_model: Path, own_cache: Path, content: str
) -> None:
    path = learned_path(open_checkpoint(tiny_model), resolve_arguments({}))
    assert path is not None
    path.parent.mkdir(parents=True)
    path.write_text(content, "utf-8")

    def told(**options: Any) -> list[Degradation]:
        found = make_plan(tiny_model, **options).degradations
        return [item for item in found if "earlier runs learned" in item.what]

    tier = {"source": "tiered-file", "ram_budget": budget(tiny_model, 0.3)}
    (item,) = told(**tier)
    assert item.why.startswith(f"{path}: ")
    assert len(item.why) > len(f"{path}: ")
    cached = {"backend": "sim", "sim_vram": 0.05, "expert_cache": 3}
    assert told(**cached) == [item]
    assert told(backend="cpu", source="arena") == [], "it would go by no profile"
    with strata_core.load(tiny_model, **tier) as model:
        assert item in model.degradations
        model.logits(PROMPT)
    assert told(**tier) == [], "it was written anew"


def test_a_profile_of_another_model_is_refused(tiny_model: Path, tmp_path: Path) -> None:
    other = tmp_path / "p.json"
    write_profile(Profile.of("f" * 64, {layer: [1] * 8 for layer in range(3)}), other)
    with pytest.raises(UsageError, match="the profile of another model") as caught:
        make_plan(tiny_model, expert_profile=other)
    assert "it is of the model ffffffffffffffff" in caught.value.why
    checkpoint = open_checkpoint(tiny_model)
    write_profile(Profile.of(checkpoint.model_hash, {0: [1] * 8}), other)
    with pytest.raises(UsageError, match="another model"):
        make_plan(tiny_model, expert_profile=other)


def test_a_backend_that_counts_nothing_saves_no_profile(tiny_model: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--expert-profile-save has no effect"):
        strata_core.load(tiny_model, backend="reference", expert_profile_save=tmp_path / "p")
    with (
        strata_core.load(tiny_model, backend="reference") as model,
        pytest.raises(UsageError, match="does not count"),
    ):
        model.profile()


def test_a_profile_that_cannot_be_written_is_an_error_after_the_end(
    tiny_model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "goes"
    folder.mkdir()
    model = strata_core.load(tiny_model, expert_profile_save=folder / "p.json")
    model.logits(PROMPT)
    folder.rmdir()
    with pytest.raises(StrataError, match="cannot write the profile"):
        model.close()
    model.close()
    with pytest.raises(StrataError, match="closed"):
        model.logits(PROMPT)


@pytest.mark.parametrize("part", ["picks", "counters", "close"])
def test_a_part_that_fails_at_the_end_keeps_nothing_else_from_ending(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    saved = tmp_path / "p.json"
    model = strata_core.load(tiny_model, backend="cpu", expert_profile_save=saved)
    model.logits(PROMPT)
    executor, engine = model._running.executor, model._running.engine
    order: list[str] = []

    def noted(owner: Any, name: str, *, fails: bool) -> None:
        call = getattr(owner, name)

        def note() -> Any:
            assert engine.join(0), "the engine has ended before its parts are asked"
            order.append(f"{type(owner).__name__}.{name}")
            result = call()
            if fails:
                raise RuntimeError(f"{name} failed")
            return result

        monkeypatch.setattr(owner, name, note)

    for name in ("picks", "counters", "close"):
        noted(executor, name, fails=name == part)
    closed = []
    close = type(model.checkpoint).close
    monkeypatch.setattr(type(model.checkpoint), "close", lambda c: (closed.append(c), close(c)))
    with pytest.raises((RuntimeError, StrataError), match=f"{part} failed"):
        model.close()
    asked = ["picks"] if part == "picks" else ["picks", "counters"]
    assert order == [f"CpuExecutor.{name}" for name in (*asked, "close")]
    assert model.checkpoint in closed
    assert saved.exists() == (part != "picks")
    model.close()


def test_the_file_is_json_with_a_version(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    write_profile(Profile.of("abc", {2: [1, 0], 1: [3, 4]}), path)
    assert json.loads(path.read_text("utf-8")) == {
        "format": "strata-profile",
        "version": 1,
        "model_hash": "abc",
        "experts": 2,
        "counts": {"1": [3, 4], "2": [1, 0]},
    }
    assert list(tmp_path.iterdir()) == [path]
