"""The programs that provoke failures on a device, on the simulated one: they find what is wrong."""

from __future__ import annotations

import json
import sys

import check_golden
import failures
import harness
import long_prompt
import pytest
import refusals
import two_logical
from attrs import evolve

from strata_core.errors import DeviceError, Refused, StrataError
from strata_core.runtime import Runtime
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
from strata_core.verify.answers import Answer, Expected

MIB = 1 << 20


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_tiny_gguf(path, hyper=tiny_hyper(layers=2))
    return path


@pytest.fixture
def program(monkeypatch, capsys):
    """program(module, *arguments): its exit code and what it printed."""

    def call(module, *arguments):
        monkeypatch.setattr(sys, "argv", [module.__file__, *map(str, arguments)])
        code = module.main()
        return code, capsys.readouterr().out

    return call


# lenses


def test_a_lens_is_a_runtime():
    runtime = SimRuntime(SimHardware(vram=(8 * MIB, 4 * MIB)))
    lens = harness.Repeated(runtime)
    assert isinstance(lens, Runtime)
    assert [d.label for d in lens.devices()] == ["SIM0", "SIM1", "SIM2", "SIM3"]
    assert [d.total for d in lens.devices()] == [8 * MIB, 8 * MIB, 4 * MIB, 4 * MIB]
    lens.open_context(3)
    stream = lens.create_stream(3)
    address = lens.alloc(2, MIB)
    assert lens.memory(3).free == lens.memory(2).free == 3 * MIB
    lens.free(3, address)
    lens.destroy_stream(stream)
    lens.close()
    assert runtime.leaks() == []


def test_memory_ends_where_a_lens_says():
    lens = harness.Bounded(SimRuntime(), 3 * MIB)
    lens.open_context(0)
    first = lens.alloc(0, 2 * MIB)
    with pytest.raises(Refused, match="allocate"):
        lens.alloc(0, 2 * MIB)
    assert lens.memory(0).free == MIB
    lens.free(0, first)
    lens.free(0, lens.alloc(0, 3 * MIB))
    assert (lens.held, lens.peaks) == (0, [2 * MIB, 3 * MIB])
    lens.close()


def test_a_driver_pins_what_a_lens_says():
    lens = harness.PinsLittle(SimRuntime(), budget=3 * MIB, context=MIB)
    lens.open_context(0)
    lens.open_context(0)
    first = lens.host_alloc(2 * MIB)
    with pytest.raises(Refused, match="page-lock"):
        lens.host_alloc(1)
    assert lens.taken == 3 * MIB
    lens.host_free(first)
    assert lens.taken == MIB
    lens.close()


# programs


def test_golden_rows_of_a_type(program, compiled_kernels, monkeypatch):
    given = ("--on", "sim", "--types", "Q8_0", "--cache", compiled_kernels)
    code, out = program(check_golden, *given)
    assert code == 0
    assert f"Q8_0     {len(check_golden.keys_of('Q8_0'))} kernels, " in out
    assert "ms: equal" in out
    real = check_golden.HostKernels.mapping
    silent = lambda self: {**real(self), "down": lambda *_: None}  # noqa: E731
    monkeypatch.setattr(check_golden.HostKernels, "mapping", silent)
    code, out = program(check_golden, *given)
    assert code == 1
    assert out.count("other bits came from down Q8_0 (first in row 0 of token 0)") == 2


def test_a_device_helps_itself(program, model):
    code, out = program(two_logical, model, "--backend", "sim")
    assert code == 0
    assert "2 of 2 ways equal the CPU's bits, 0 do not" in out
    assert "helper " in out


def test_a_refused_path_is_told(program, model, compiled_kernels):
    given = (model, "--backend", "sim", "--cache", compiled_kernels.parent)
    given += ("--only", "pins for a layer, plain")
    code, out = program(refusals, *given)
    assert code == 0, out
    assert "0 cases ended otherwise" in out
    assert "sliced" in out


def test_what_is_otherwise_than_a_case_says():
    answer, other = Answer("x", "y"), Answer("z", "y")
    wanted = Expected({"short": answer, "long": answer})
    case = refusals.Case(name="a", path="pinned")
    good = refusals.End(answers={"short": answer, "long": answer}, paths=("experts: pinned",))
    assert refusals.judged(case, good, wanted) == []
    for end in (
        evolve(good, answers={"short": other, "long": answer}),
        evolve(good, answers={"short": answer, "long": other}),
        evolve(good, paths=()),
        evolve(good, paths=("experts: locked",)),
        evolve(good, left=("a claim",)),
        evolve(good, allocator="wsl"),
        refusals.End(error=StrataError("what", "why", "do")),
    ):
        assert refusals.judged(case, end, wanted)
    # a prompt in an order of the backend's own has to be the first case's
    own = evolve(good, answers={"short": answer, "long": other}, own_order=frozenset({"long"}))
    assert refusals.judged(case, own, wanted) == []
    later = refusals.judged(case, evolve(own, answers=good.answers), wanted)
    assert later == ["another answer than the first case's for the long prompt"]
    allowed = evolve(case, refused=True)
    assert refusals.judged(allowed, refusals.End(error=DeviceError("a", "b", "c")), wanted) == []
    assert refusals.judged(allowed, refusals.End(error=DeviceError("a")), wanted)


def test_a_trap_ends_a_start(program, model):
    code, out = program(failures, model, "--backend", "sim", "--only", "trap-start")
    assert code == 0, out
    assert "strata: testing the kernels of SIM0 failed" in out


def test_how_a_child_may_end():
    def end(code=0, out="", err=""):
        return failures.Ended(code=code, out=out, err=err, seconds=1.0)

    assert failures.judged("interrupt", end(130, err="interrupted after 3 tokens")) == []
    assert failures.judged("interrupt", end(0, err="interrupted after 3 tokens"))
    assert failures.judged("interrupt", end(130))
    assert failures.judged("trap-round", end(1, err="a round stopped at its end; 719")) == []
    assert failures.judged("trap-round", end(-9, err="a round stopped at its end"))
    silent = "a round stopped at its end\nthe driver says: nothing"
    assert failures.judged("trap-round", end(1, err=silent))
    assert failures.judged("vram-budget", end(1, err="Traceback: vram"))
    found = {"left": [], "eaten": 3, "same": True, "refused": ["a", "b", "c"]}
    assert failures.judged("eaten", end(0, json.dumps(found))) == []
    worse = ({"left": ["x"]}, {"same": False}, {"eaten": 0}, {"refused": ["a", "", "c"]})
    for change in worse:
        text = json.dumps({**found, **change})
        assert failures.judged("eaten", end(0, text))


def test_a_long_prompt_is_compared_between_ways(program, model, monkeypatch):
    chosen = ("-p", 150, "--backend", "sim", "--only", "all in slots", "none, chunks")
    code, text = program(long_prompt, model, *chosen)
    assert (code, text.splitlines()[-1]) == (0, "2 ways, all equal; 0 did not run")
    assert "vram0" in text
    found = long_prompt.ways

    def other(experts, nbytes):
        return {**found(experts, nbytes), "all in slots": {"expert_cache": experts, "kv": "int8"}}

    monkeypatch.setattr(long_prompt, "ways", other)
    code, text = program(long_prompt, model, *chosen)
    assert (code, text.splitlines()[-1]) == (1, "2 ways, NOT EQUAL; 0 did not run")


def test_a_long_prompt_that_does_not_fit_a_way_is_told(program, model):
    code, text = program(long_prompt, model, "-p", 10**6, "--backend", "sim", "--only", "none")
    assert code == 1
    assert text.splitlines()[-1].endswith("did not run")
