"""What the settings ask of devices, held against those that a backend has."""

from __future__ import annotations

import pytest

from strata_core.api import make_plan
from strata_core.builtin import strata_allocators, strata_backends
from strata_core.config import resolve
from strata_core.engine.devices import accelerator, without_use
from strata_core.errors import UsageError
from strata_core.kernels.device.options import read_options, used_devices

CPU, _, SIM = strata_backends()
SIM_PINNED = next(record for record in strata_allocators() if record.name == "sim-pinned")


def settings(**flags: object):
    return resolve({key: str(value) for key, value in flags.items()}, {})


def devices(**flags: object):
    return SIM.devices(None, settings(**flags).options())


@pytest.mark.parametrize(
    ("asked", "labels"),
    [
        ({}, ["SIM0", "SIM1", "SIM2"]),
        ({"device": "2,0"}, ["SIM2", "SIM0"]),
        ({"device": "1"}, ["SIM1"]),
    ],
)
def test_devices_are_used_in_the_order_that_names_them(asked, labels) -> None:
    used = used_devices(settings(**asked).options(), devices(sim_devices=3))
    assert [device.label for device in used] == labels


@pytest.mark.parametrize(
    ("asked", "what", "why"),
    [
        ({"device": "0,3"}, "--device 3: there is no such device", "1 (SIM1)"),
        ({"expert_cache_device2": 5}, "--expert-cache-device2 5 has no device", "SIM0, SIM1"),
        ({"device": "1", "expert_cache_device1": "auto"}, "--expert-cache-device1 auto", "SIM1"),
    ],
)
def test_devices_that_are_not_there_are_refused(asked, what, why) -> None:
    with pytest.raises(UsageError) as caught:
        used_devices(settings(**asked).options(), devices(sim_devices=2))
    assert what in caught.value.what
    assert why in caught.value.why
    with pytest.raises(UsageError, match="no device"):
        used_devices(settings().options(), ())


def test_more_devices_than_can_be_used_are_refused_where_they_were_named() -> None:
    five = devices(sim_devices=5)
    with pytest.raises(UsageError, match="names 5 devices, and 4 can be used"):
        used_devices(settings(device="0,1,2,3,4").options(), five)
    assert len(used_devices(settings(device="4,3,2,1").options(), five)) == 4
    assert used_devices(settings().options(), five)[0].label == "SIM0"


def test_a_plan_refuses_a_piece_without_partial_pinning(make_machine) -> None:
    asked = resolve({}, {"STRATA_PARTIAL_PIN_GIB": "1"})
    with pytest.raises(UsageError, match="STRATA_PARTIAL_PIN_GIB"):
        accelerator(asked, make_machine(), SIM, SIM_PINNED)


@pytest.mark.parametrize("mib", [0, 10, 700])
def test_a_reserve_that_was_named_is_kept_to_the_letter(mib, make_machine) -> None:
    asked = settings(sim_vram=0.05, vram_reserve_mib=mib)
    plan = accelerator(asked, make_machine(), SIM, SIM_PINNED)
    started = read_options(asked.options(), plan.devices)
    assert plan.kept(0) == mib << 20
    assert started.cache.reserve == mib << 20
    default = settings(sim_vram=0.05)
    assert read_options(default.options(), plan.devices).cache.reserve is None


def test_what_was_asked_reaches_the_planner(make_machine) -> None:
    asked = settings(
        sim_devices=2, sim_vram=0.5, sim_pin_budget=1, device="1,0", vram_budget=0.25,
        vram_reserve_mib=10, expert_cache=7, expert_cache_device1="auto", resident_budget_gib=2,
        complement_pin_gib=0,
    )  # fmt: skip
    plan = accelerator(asked, make_machine(), SIM, SIM_PINNED)
    assert [device.label for device in plan.devices] == ["SIM1", "SIM0"]
    assert (plan.budget, plan.reserve, plan.cache) == (1 << 28, 10 << 20, 7)
    assert (plan.helpers, plan.resident) == ((None, 0, 0), 2 << 30)
    assert {name: rule.most for name, rule in plan.bulk.items()} == {
        "arena": None,
        "sliced-pinned": 0,
        "tiered-file": None,
    }
    assert 0 < plan.pins < 1 << 30  # what contexts take is not there for buffers
    assert accelerator(settings(), make_machine(), CPU, SIM_PINNED) is None


def test_a_flag_that_nobody_heeds_is_an_error() -> None:
    for asked in ({"expert_cache": 5}, {"sim_vram": 1}, {"device": 0}):
        with pytest.raises(UsageError, match="has no effect here"):
            without_use(settings(**asked), CPU)
        assert without_use(settings(**asked), SIM) == ()
    with pytest.raises(UsageError, match=r"^argument|^expert_cache has no effect here"):
        without_use(resolve({}, {}).with_arguments({"expert_cache": 5}), CPU)


def test_a_variable_or_a_file_that_nobody_heeds_is_a_degradation(tmp_path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("vram_reserve_mib = 5\nexpert_profile = 'p'\n")
    found = without_use(resolve({}, {"STRATA_SIM_VRAM": "1"}, file), CPU)
    assert [item.what for item in found] == [
        f"vram_reserve_mib (file {file}) has no effect",
        "STRATA_SIM_VRAM (environment STRATA_SIM_VRAM) has no effect",
    ]


def test_the_demo_is_planned_for_simulated_devices(make_machine) -> None:
    planned = make_plan(
        "demo", None, make_machine(), backend="sim", sim_vram=0.008, sim_devices=2,
        expert_cache_device1="auto",
    )  # fmt: skip
    chosen = {item.role: item.name for item in planned.selections}
    assert chosen == {"backend": "sim", "allocator": "sim-pinned", "source": "arena"}
    assert planned.plan.fits
    first, helper = planned.plan.caches
    assert 0 < first.experts < 192
    assert first.experts + helper.experts == 192
    assert [tier.name for tier in planned.plan.tiers] == ["vram0", "vram1", "pinned", "ram", "file"]
