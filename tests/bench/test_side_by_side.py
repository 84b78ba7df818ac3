"""The side-by-side script: what it reads, how it counts, and a whole run beside a stand-in.

`strata.json` was recorded from `strata bench --json`. `llama-bench.json` was not recorded: it is
written in the form of llama-bench's JSON printer (its fields, their order and types), and its
figures measure nothing.
"""

from __future__ import annotations

import importlib.util
import json
import shlex
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
SCRIPT = HERE / "side_by_side.py"
DEMO = HERE.parents[1] / "strata_core" / "demo" / "kjv-Q4_0.gguf"


def script() -> Any:
    """The script as a module; it is not one of a package."""
    spec = importlib.util.spec_from_file_location("side_by_side", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for their annotations
    spec.loader.exec_module(module)
    return module


side = script()
ASKED = side.Asked(prompt=32, decode=8, repeats=3, threads=2)
STRATA = (HERE / "strata.json").read_text("utf-8")
PEER = (HERE / "llama-bench.json").read_text("utf-8")


# --- the programs' output -------------------------------------------------------------------------


def test_strata_output() -> None:
    figures = side.read_strata(STRATA, ASKED)
    document = json.loads(STRATA)
    for kind in ("prompt", "decode"):
        assert figures.tok_s(kind) == document[f"{kind}_tok_s"]
        assert len(figures.samples[kind]) == 3
    assert figures.about["selections"] == {"backend": "cpu", "allocator": "host", "source": "arena"}
    assert [item["what"] for item in figures.about["degradations"]] == [
        "the backend cpu is a fallback"
    ]
    assert figures.about["kv"] == "fp16"


def test_peer_output() -> None:
    figures = side.read_peer(PEER, ASKED)
    prompt, decode = json.loads(PEER)
    assert figures.samples == {
        "prompt": tuple(prompt["samples_ts"]),
        "decode": tuple(decode["samples_ts"]),
    }
    assert figures.tok_s("decode") == sorted(decode["samples_ts"])[1]
    assert figures.about["type_k"] == "f16"
    assert figures.about["build_number"] == prompt["build_number"]


def changed(text: str, **changes: Any) -> str:
    """The document with other values at "a.b.0" (dots written as __)."""
    document = json.loads(text)
    for path, value in changes.items():
        *way, last = [int(p) if p.isdecimal() else p for p in path.strip("_").split("__")]
        at = document
        for step in way:
            at = at[step]
        if value is None:
            del at[last]
        else:
            at[last] = value
    return json.dumps(document)


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        ("read_strata", "", "nothing"),
        ("read_strata", "[]", "no figures"),
        ("read_strata", changed(STRATA, samples__decode=None), "'decode' is missing"),
        ("read_strata", changed(STRATA, samples__prompt__1=None), "prompt repeats: 3 asked for"),
        ("read_strata", changed(STRATA, samples__prompt__1__tokens=31), "31"),
        ("read_strata", changed(STRATA, samples__prompt__1__tok_s="9"), "'tok_s' is missing"),
        ("read_strata", changed(STRATA, samples__prompt__1__tok_s=0.0), "not all speeds"),
        ("read_strata", changed(STRATA, machine__threads=4), "threads: 2 asked for, found 4"),
        ("read_peer", "error: cannot load\n", "cannot load"),
        ("read_peer", changed(PEER, __1=None), "decode tests of 8 tokens: 1 asked for, found 0"),
        ("read_peer", changed(PEER, __0__n_prompt=512), "prompt tests of 32 tokens"),
        ("read_peer", changed(PEER, __1__n_threads=1), "threads: 2 asked for, found 1"),
        ("read_peer", changed(PEER, __1__samples_ts=[1.0]), "decode repeats"),
        ("read_peer", changed(PEER, __1__samples_ts=[1.0, "x", 2.0]), "not all speeds"),
    ],
)
def test_other_output_is_refused(read: str, text: str, says: str) -> None:
    with pytest.raises(side.Failed, match=says):
        getattr(side, read)(text, ASKED)


def test_a_test_that_was_not_asked_for() -> None:
    only = side.Asked(prompt=0, decode=8, repeats=3, threads=2)
    with pytest.raises(side.Failed, match="tests: 1 asked for, found 2"):
        side.read_peer(PEER, only)
    assert set(side.read_peer(changed(PEER, __0=None), only).samples) == {"decode"}


@pytest.mark.parametrize(("quota", "cores"), [(None, 8), (3.5, 3), (0.5, 1), (16.0, 8)])
def test_machine(quota: float | None, cores: int) -> None:
    facts = {"cpu_model": "X", "physical_cores": 8, "cpu_quota": quota, "os": "linux"}
    text = json.dumps({"machine": {"facts": facts}})
    assert side.read_machine(text)["cores"] == cores


# --- statistics and commands -------------------------------------------------------------------


def figures(prompt: list[float], decode: list[float]) -> Any:
    return side.Figures({"prompt": tuple(prompt), "decode": tuple(decode)}, {})


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine slows to a quarter for the second pair: medians of each side would mix pairs.
    pairs = [
        side.Pair(figures([10, 12, 11], [8]), figures([22, 20, 30], [4])),
        side.Pair(figures([3, 3, 3], [2]), figures([4, 4, 4], [1])),
        side.Pair(figures([12, 12, 1], [9]), figures([24, 24, 24], [3])),
    ]
    found = side.summary(pairs, ["prompt", "decode"])
    assert found["prompt"]["ratio"] == {"median": 0.5, "low": 0.5, "high": 0.75}
    assert found["decode"]["ratio"] == {"median": 2.0, "low": 2.0, "high": 3.0}
    assert found["prompt"]["strata_tok_s"] == {"median": 11, "low": 3, "high": 12}
    assert found["prompt"]["peer_tok_s"] == {"median": 22, "low": 4, "high": 24}
    lines = side.summary_lines(found).splitlines()
    assert lines[0].split() == ["median", "11.00", "22.00", "0.500", "8.00", "3.00", "2.000"]
    assert [line.split()[0] for line in lines] == ["median", "low", "high"]
    widths = {len(line) for line in [*lines, side.heading(["prompt", "decode"])]}
    assert len(widths) == 1


def test_both_programs_are_asked_the_same() -> None:
    strata = side.strata_command(["strata"], "m.gguf", ASKED, "--source mmap --kv 'fp16'")
    peer = side.peer_command("lb", "m.gguf", ASKED, "-ngl 0")
    assert shlex.join(strata) == (
        "strata bench m.gguf -p 32 -n 8 -r 3 --threads 2 --json --source mmap --kv fp16"
    )
    assert shlex.join(peer) == "lb -m m.gguf -p 32 -n 8 -r 3 -t 2 -o json -ngl 0"


def test_processes_take_turns() -> None:
    calls = []

    def runner(command: list[str]) -> str:
        calls.append(command[0])
        return {"s": STRATA, "p": PEER}[command[0]]

    seen: list[int] = []
    commands = {"strata": ["s"], "peer": ["p"]}
    pairs = side.measure(commands, ASKED, 3, runner, lambda number, pair: seen.append(number))
    assert calls == ["s", "p"] * 3
    assert seen == [1, 2, 3]
    assert len(pairs) == 3


# --- whole runs --------------------------------------------------------------------------------


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A program that prints `llama-bench.json`, once it was given the flags they belong to."""
    file = tmp_path / "llama-bench"
    source = f"""#!{sys.executable}
import sys
if "-p 32 -n 8 -r 3 -t 2 -o json" not in " ".join(sys.argv):
    sys.exit("stand-in: " + " ".join(sys.argv[1:]))
print(open({str(HERE / "llama-bench.json")!r}).read())
"""
    file.write_text(source)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


SMALL = ("-p", "32", "-n", "8", "-r", "3", "-t", "2", "--pairs", "1")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script with a #! line")
def test_a_whole_run(peer: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    command = [sys.executable, SCRIPT, DEMO, *SMALL, "--peer", peer, "--json", out]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    document = json.loads(out.read_text("utf-8"))
    assert document["format"] == side.FORMAT
    assert document["asked"] == {
        "prompt": 32, "decode": 8, "repeats": 3, "threads": 2, "pairs": 1,
    }  # fmt: skip
    assert document["model"] == {"name": DEMO.name, "bytes": DEMO.stat().st_size}
    assert document["versions"]["strata"].startswith("strata ")
    assert document["versions"]["peer"] == side.read_peer(PEER, ASKED).about["build_commit"] + (
        f" ({json.loads(PEER)[0]['build_number']})"
    )
    assert document["commands"]["peer"].endswith("-p 32 -n 8 -r 3 -t 2 -o json")
    assert document["machine"]["cores"] >= 1
    for kind in ("prompt", "decode"):
        (pair,) = document["pairs"]
        middle = sorted(pair["strata"]["samples"][kind])[1]
        other = sorted(pair["peer"]["samples"][kind])[1]
        assert pair["ratio"][kind] == pytest.approx(middle / other)
        assert document["summary"][kind]["ratio"]["median"] == pair["ratio"][kind]
    table = done.stdout.split("\n\n")[1].splitlines()
    assert [line.split()[0] for line in table] == ["pair", "1", "median", "low", "high"]


def python(source: str) -> list[str]:
    return [sys.executable, "-c", source]


@pytest.mark.parametrize(
    ("command", "says"),
    [
        (python("import sys; print('figures'); sys.exit('the cause')"), "exit code 1: the cause"),
        (python("print('{}'); raise SystemExit(2)"), "exit code 2: {}"),
        (python("raise SystemExit(3)"), "exit code 3: without a word"),
        (python("print('no figures')"), "no figures in what it printed: no figures"),
        (python("import time; time.sleep(60)"), "more than 1 s"),
        (["/no/such/program"], "cannot be run"),
    ],
)
def test_a_process_that_fails(command: list[str], says: str) -> None:
    def never(number: int, pair: object) -> None:
        pytest.fail("a pair without figures")

    commands = {"strata": command, "peer": python("")}
    with pytest.raises(side.Failed) as error:
        side.measure(commands, ASKED, 2, lambda given: side.run(given, 1), never)
    first, second = str(error.value).splitlines()
    assert first == f"pair 1: {shlex.join(command)}"
    assert says in second


def test_failure_leaves_no_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.json"
    none = str(tmp_path / "none")
    code = side.main([str(DEMO), *SMALL, "--peer", none, "--strata", none, "--json", str(out)])
    assert code == 1
    assert capsys.readouterr().err.startswith("side_by_side: it cannot be run")
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["-p", "0", "-n", "0"], "nothing to measure"),
        (["--pairs", "0"], "whole number of at least 1"),
        (["-t", "two"], "whole number of at least 1"),
        (["--json", "no/such/folder/out.json"], "cannot be written"),
    ],
)
def test_bad_use(args: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as leave:
        side.main([str(DEMO), *SMALL, "--peer", "none", *args])
    assert leave.value.code == 2
    assert says in capsys.readouterr().err
