"""Prompts in an order of the device's own: the programs compare them with each other's, no CPU's.

Simulated devices have matrix units here, whose attention gives other numbers than the CPU's: the
same in every way, as a sound device's does, or others each time.
"""

from __future__ import annotations

import argparse
import sys
from itertools import count

import check_models
import failures
import identity
import numpy as np
import pytest
import refusals
import two_backends
import two_logical

from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.verify.answers import Answer

SAME = "in an order of its own"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(layers=2))
    return path


@pytest.fixture
def folder(compiled_kernels):
    """The cache folder, with the kernels that are compiled already."""
    return compiled_kernels.parent


@pytest.fixture
def program(monkeypatch, capsys):
    """program(module, *arguments): its exit code and what it printed."""
    real = check_models.variants
    monkeypatch.setattr(check_models, "variants", lambda model: list(real(model))[1:5:3])

    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        code = module.main()
        return code, capsys.readouterr().out

    return call


@pytest.fixture
def sound(units):
    """A device whose prompts are the same in every way, and not the CPU's."""
    units(lambda: 1.001)


@pytest.fixture
def unsound(units):
    """A device whose prompts are others each time."""
    runs = count()
    units(lambda: 1 + next(runs) / 1000)


ON = ("--backend", "sim")


def programs(model, folder):
    """Each with what it prints last where long prompts are in an order of the device's own."""
    refused = (model, *ON, "--cache", folder, "--only", "none")
    few = (model, "--on", "sim", "--cache", folder, "--tokens", "12", "--rounds", "0")
    return {
        "refusals": (refusals, refused, "(prompt long, in an order of its own: that of the first"),
        "two_logical": (two_logical, (model, *ON), "that of the way without a helper), 0 do not"),
        "identity": (
            identity,
            (model, *ON, "--only", "path 2"),
            "that of the first way); 0 skipped",
        ),
        "check_models": (check_models, few, "0 runs differ or failed"),
    }


NAMES = tuple(programs(None, None))


@pytest.mark.parametrize("name", NAMES)
def test_the_same_bits_in_every_way_are_right(program, model, folder, sound, name):
    module, arguments, said = programs(model, folder)[name]
    code, out = program(module, *arguments)
    assert code == 0, out
    assert said in out.splitlines()[-1]
    assert SAME in out


@pytest.mark.parametrize("name", NAMES)
def test_other_bits_in_some_way_are_wrong(program, model, folder, unsound, name):
    module, arguments, _ = programs(model, folder)[name]
    code, out = program(module, *arguments)
    assert code == 1, out


def test_an_exact_prompt_is_compared_with_the_cpu(program, model, folder, unsound):
    given = (model, *ON, "--cache", folder, "--only", "none", "--exact-prompt")
    code, out = program(refusals, *given)
    assert code == 0, out
    assert SAME not in out


def test_one_way_alone_proves_nothing_of_them(program, model, sound):
    code, out = program(identity, model, *ON, "--only", "arena, cache half")
    assert code == 0, out
    assert "that of the first way, WHICH RAN ALONE" in out


def without_memory(model, monkeypatch):
    """Of a prompt whose memory goes whether it is the same; of starts without, what is wrong."""
    monkeypatch.setattr(failures, "IDS", failures.IDS[:100])  # two chunks; the simulator is slow
    asked = argparse.Namespace(model=model, backend="sim")
    eaten, budget = failures.eaten(asked), failures.budget(asked)
    assert eaten["left"] == budget["left"] == []
    assert budget["degraded"], "no start goes on without some of its memory"
    return eaten["same"], budget["wrong"]


def test_memory_that_goes_does_not_change_the_order(model, monkeypatch, sound):
    assert without_memory(model, monkeypatch) == (True, [])


def test_memory_that_changes_the_order_is_told(model, monkeypatch, units):
    others = np.random.default_rng(4)
    units(others.standard_normal)
    same, wrong = without_memory(model, monkeypatch)
    assert not same
    assert any("other tokens" in each for each in wrong)


def test_backends_are_compared_where_both_have_an_order_of_their_own(
    capsys, monkeypatch, model, sound
):
    cell, mine, other = two_backends.Cell, Answer("a", "b"), Answer("c", "b")
    differ = two_backends.differ
    assert differ([cell("equal", "x", "", {"150": mine}), cell("equal", "x")]) == []
    assert differ([cell("equal", "x", "", {"150": mine})] * 2) == []
    apart = [cell("equal", "x", "", {"150": answer}) for answer in (mine, other)]
    assert differ(apart) == ["150"]
    assert differ([cell("equal", "x"), cell("equal", "y")]) == ["the first logits"]
    monkeypatch.setattr(two_backends, "WAYS", two_backends.WAYS[:1])
    assert two_backends.identity([model], ["sim"], float("inf")) == (0, 0)
    assert "prompts in an order of its own: sim" in capsys.readouterr().out
