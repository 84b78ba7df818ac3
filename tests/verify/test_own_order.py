"""Prompts that a backend sums in an order of its own: its ways are compared with each other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from strata_core.cli.main import main
from strata_core.config import resolve
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.verify.identity import Outcome, prove, subject
from strata_core.verify.ways import ways

DEVICE = {"backend": "sim", "sim_vram": 0.05, "kv": "fp16", "threads": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("model") / "m.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(experts=8, layers=2), expert_type="Q4_K")
    return path


def proven(model: Path, places: int = 3, **more: Any) -> list[Outcome]:
    settings = resolve({**DEVICE, **more}, {})
    found = subject(model, model, settings)
    table = ways(found.facts, devices=found.devices, given=settings.given(), quick=True)
    return prove(found, list(table)[:places])[1]


def test_ways_of_an_own_order_are_compared_with_each_other(model, units) -> None:
    units(lambda: 1.001)
    rows = proven(model)
    assert [row.verdict for row in rows] == ["equal"] * 3
    assert [row.run.own_order for row in rows if row.run] == [{"150"}] * 3
    assert len({row.run.answers["150"] for row in rows if row.run}) == 1


def test_a_way_whose_long_prompts_are_others_differs(model, units) -> None:
    runs: Iterator[int] = count()
    units(lambda: 1 + next(runs) / 1000)
    first, *others = proven(model)
    assert first.verdict == "equal"
    for row in others:
        assert row.verdict == "differs"
        assert row.note == "other logits or tokens for: 150; than in the first way for: 150"


def test_exact_prompts_are_compared_with_the_cpu(model, units) -> None:
    units(lambda: 1.001)
    rows = proven(model, exact_prompt=True)
    assert [row.verdict for row in rows] == ["equal"] * 3
    assert not any(row.run.own_order for row in rows if row.run)


def test_products_of_quantised_rows_have_an_order_of_their_own(model, units) -> None:
    units(lambda: 1.001)
    rows = proven(model, 2, kv="fp32")
    assert [row.verdict for row in rows] == ["equal"] * 2
    assert [row.run.own_order for row in rows if row.run] == [{"150"}] * 2


def test_floats_keep_the_cpus_order(tmp_path, units) -> None:
    path = tmp_path / "m.gguf"
    sizes = tiny_hyper(experts=8, layers=2)
    write_tiny_gguf(path, hyper=sizes, dense_type="F32", expert_type="F16")
    units(lambda: 1.001)
    (row,) = proven(path, 1, kv="fp32")
    assert row.verdict == "equal"
    assert row.run is not None
    assert not row.run.own_order


def test_the_table_says_what_was_compared(model, units, capsys) -> None:
    units(lambda: 1.001)
    asked = ["verify", str(model), "--quick", "--backend", "sim", "--sim-vram", "0.05"]
    asked += ["--kv", "fp16", "--threads", "1", "--source", "arena", "--expert-cache", "16"]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "in an order of its own: 150. They are compared" in shown
    assert "not with backend cpu" in shown
    assert main([*asked, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["identity"]["rows"]
    assert {tuple(row["own_order"]) for row in rows if row["verdict"] == "equal"} == {("150",)}
