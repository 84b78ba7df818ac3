"""Predictions: bytes over rates, lanes at the same time, and what a measured rate teaches."""

from __future__ import annotations

import json

import pytest
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from strata_core.plan.actual import Actual, Beside, memory_beside, memory_line, speed_line
from strata_core.plan.explain import explain
from strata_core.plan.plan import Plan, PlanRequest, Sizes, make_plan
from strata_core.plan.sizes import EXPERTS, Item, Tier
from strata_core.plan.speed import (
    ROUND_S,
    Lane,
    Pace,
    Placed,
    Rate,
    learned,
    predict,
)

MIB = 1 << 20
RATES: dict[Lane, Rate] = {
    "vram": Rate(1000e9, "a"),
    "link": Rate(50e9, "b"),
    "host": Rate(10e9, "c"),
    "file": Rate(1e9, "d"),
}


def pace(**more: object) -> Pace:
    values: dict[str, object] = {"rates": RATES, "dense": 100 * MIB, "asked": (0.5,) * 64}
    return Pace(**{**values, **more})


def test_the_cpu_reads_everything_from_memory() -> None:
    speed = predict(pace(), Placed(in_ram=64, blob=MIB))
    assert speed.bytes_by_lane == {"host": 132 * MIB}
    assert speed.seconds == pytest.approx(132 * MIB / 10e9 + ROUND_S)
    assert speed.tokens_s == pytest.approx(1 / speed.seconds)


def test_lanes_work_at_the_same_time_and_the_file_comes_first() -> None:
    placed = Placed(cached=16, helped=16, in_ram=16, blob=MIB, dense_in="vram")
    speed = predict(pace(), placed)
    # 8 of each kind are asked for; what is in the file is computed by the CPU afterwards
    assert speed.bytes_by_lane == {"vram": 116 * MIB, "host": 16 * MIB, "file": 8 * MIB}
    seconds = 100 * MIB / 1000e9 + 8 * MIB / 1e9 + 16 * MIB / 10e9 + ROUND_S
    assert speed.seconds == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("share", "pinned", "link"),
    [(0.0, 1.0, 0), (1.0, 1.0, 32), (0.25, 1.0, 8), (1.0, 0.5, 16), (None, 1.0, 26), (0.5, 0.0, 0)],
)
def test_the_link_has_its_share_of_what_is_page_locked(
    share: float | None, pinned: float, link: int
) -> None:
    placed = Placed(in_ram=64, blob=MIB, pinned=pinned, dense_in="vram")
    speed = predict(pace(link_share=share), placed)
    assert speed.bytes_by_lane.get("link", 0) // MIB == link
    assert sum(speed.bytes_by_lane.values()) == pytest.approx(132 * MIB, abs=4)


def test_a_mapped_file_is_in_memory_as_far_as_that_goes() -> None:
    placed = Placed(blob=MIB, mapped=True)
    assert "file" not in predict(pace(cached=64 * MIB), placed).bytes_by_lane
    half = predict(pace(cached=32 * MIB), placed)
    assert half.bytes_by_lane == {"host": 132 * MIB, "file": 16 * MIB}


@given(
    cached=st.integers(0, 64),
    helped=st.integers(0, 64),
    in_ram=st.integers(0, 64),
    mapped=st.booleans(),
    asked=st.lists(st.floats(0, 1), min_size=1, max_size=80),
)
def test_more_memory_is_never_slower(
    cached: int, helped: int, in_ram: int, mapped: bool, asked: list[float]
) -> None:
    known = pace(asked=asked, cached=10 * MIB)
    placed = Placed(
        cached=cached, helped=helped, in_ram=in_ram, blob=MIB, mapped=mapped, dense_in="vram"
    )
    speed = predict(known, placed)
    more = Placed(
        cached=cached, helped=helped, in_ram=in_ram + 1, blob=MIB, mapped=mapped, dense_in="vram"
    )
    assert predict(known, more).seconds <= speed.seconds * (1 + 1e-9)
    lanes = sum(n for lane, n in speed.bytes_by_lane.items() if lane != "file")
    assert lanes == pytest.approx(100 * MIB + sum(asked) * MIB, abs=4)
    json.dumps(speed.as_json(), allow_nan=False)


def test_a_run_by_one_lane_teaches_its_rate() -> None:
    speed = predict(pace(), Placed(in_ram=64, blob=MIB))
    found = learned(speed, 25.0, "here")
    assert found is not None
    lane, rate = found
    assert (lane, rate.origin) == ("host", "here")
    known = evolve(pace(), rates={**pace().rates, lane: rate})
    again = predict(known, Placed(in_ram=64, blob=MIB))
    assert again.tokens_s == pytest.approx(25.0)
    mixed = predict(pace(), Placed(cached=5, in_ram=59, blob=MIB, dense_in="vram"))
    assert learned(mixed, 25.0, "here") is None
    assert learned(speed, 0.0, "here") is None


# --- in a plan ---------------------------------------------------------------------------------


SIZES = Sizes(dense=100 * MIB, experts=640 * MIB, kv_position=1, workspace=MIB, count=64)


def planned(source: str | None = None, **more: object) -> Plan:
    values: dict[str, object] = {
        "sizes": SIZES,
        "ram": 4000 * MIB,
        "ram_origin": "available",
        "reserve": 0,
        "trained": 128,
        "source": source,
        "pace": pace(cached=4000 * MIB),
    }
    return make_plan(PlanRequest(**{**values, **more}))


def test_a_plan_says_what_it_expects_and_by_which_rates() -> None:
    plan = planned()
    assert plan.speed is not None
    assert plan.speed.bytes_by_lane == {"host": (100 + 320) * MIB}
    assert "decode: about " in explain(plan)
    assert "420.0 MiB from host memory at 10.0 GB/s (c)" in explain(plan)
    document = plan.as_json()["speed"]
    assert document["decode_tok_s"] == plan.speed.tokens_s
    assert document["lanes"]["host"]["origin"] == "c"


def test_no_prediction_without_rates_or_for_a_source_of_a_plugin() -> None:
    assert planned(pace=None).speed is None
    assert planned("far").speed is None
    assert planned("far").as_json()["speed"] is None


# --- plan beside actual ------------------------------------------------------------------------


def test_every_kind_of_memory_is_set_beside_what_was_taken() -> None:
    plan = planned()
    need = plan.tier("ram").need
    actual = Actual(
        taken={"ram": need * 2},
        items={"ram": {EXPERTS: 7, "something else": 5}},
        paths=("the arena: sliced",),
    )
    (row,) = memory_beside(plan, actual)
    document = row.as_json()
    assert (document["kind"], document["device"]) == ("ram", None)
    assert (document["planned"], document["actual"], document["drift"]) == (need, need * 2, 1.0)
    by_name = {item["name"]: item for item in document["items"]}
    assert by_name[EXPERTS] == {"name": EXPERTS, "planned": 640 * MIB, "actual": 7}
    assert by_name["something else"] == {"name": "something else", "planned": 0, "actual": 5}
    assert by_name["program"]["actual"] is None
    assert sum(item["planned"] for item in document["items"]) == need
    line = memory_line((row,), actual.paths)
    assert "taken (+100%); the arena: sliced" in line


def test_what_is_not_counted_is_said() -> None:
    (row,) = memory_beside(planned(), Actual())
    assert (row.as_json()["actual"], row.as_json()["drift"]) == (None, None)
    assert "not counted" in memory_line((row,), ())
    assert "none measured" in speed_line(Beside("decode", 10.0, None))
    assert "10.0 tokens/s predicted, 5.0 measured at best (-50%)" in speed_line(
        Beside("decode", 10, 5)
    )


def test_every_item_of_a_plan_has_a_name() -> None:
    for tier in planned().tiers:
        assert all(item.name for item in tier.items)
    assert Tier("t", (Item("x", 3),), 3).need == 3
