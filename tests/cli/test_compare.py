"""Comparing with another program: what is read, how it is counted, and whole runs of a stand-in.

`strata-bench.json` was recorded from `strata bench --json`, `llama-bench.json` from
`llama-bench -p 32 -n 8 -r 3 -t 2 -o json -ngl 0 -dev none` (on a busy machine: its figures are
worth nothing, its form counts).
"""

from __future__ import annotations

import json
import shlex
import stat
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strata_core.cli.compare.comparison import parse_flags
from strata_core.cli.compare.figures import Asked, Figures, Pair, summary
from strata_core.cli.compare.peers import PEERS, Placed
from strata_core.cli.compare.reading import NotFigures, read_llama_bench, read_strata
from strata_core.cli.compare.turns import take_turns
from strata_core.errors import UsageError
from strata_core.testing.tiny import write_tiny_gguf

HERE = Path(__file__).parent
ASKED = Asked(prompt=32, decode=8, repeats=3, threads=2, named=True)
STRATA = (HERE / "strata-bench.json").read_text("utf-8")
PEER = (HERE / "llama-bench.json").read_text("utf-8")
READERS = {"strata": read_strata, "peer": read_llama_bench}
LLAMA = PEERS["llama-bench"]


# --- the programs' output -------------------------------------------------------------------------


def test_strata_output() -> None:
    figures = read_strata(STRATA, ASKED)
    document = json.loads(STRATA)
    for kind in ("prompt", "decode"):
        assert figures.tok_s(kind) == document[f"{kind}_tok_s"]
        assert len(figures.samples[kind]) == 3
    assert figures.about["degradations"] == document["degradations"]
    assert figures.about["kv"] == "fp16"


def test_peer_output() -> None:
    figures = read_llama_bench(PEER, ASKED)
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


def nested(levels: int) -> list[Any]:
    """Lists in one another."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


def vram(**changes: Any) -> str:
    """The document with a device in its plan."""
    item = {"name": "expert slots", "actual": 1, **changes}
    return changed(STRATA, plan__memory=[{"kind": "vram0", "items": [item]}])


@pytest.mark.parametrize(
    ("read", "text", "says"),
    [
        ("strata", "", "nothing"),
        ("strata", "[]", "no figures"),
        ("strata", changed(STRATA, samples__decode=None), "'decode' is missing"),
        ("strata", changed(STRATA, samples__prompt__1=None), "prompt repeats: 3 asked for"),
        ("strata", changed(STRATA, samples__prompt__1__tokens=31), "31"),
        ("strata", changed(STRATA, samples__prompt__1__tok_s="9"), "'tok_s' is missing"),
        ("strata", changed(STRATA, samples__prompt__1__tok_s=0.0), "not all speeds"),
        ("strata", changed(STRATA, machine__threads=4), "threads: 2 asked for, found 4"),
        ("strata", changed(STRATA, plan=None), "'plan' is missing"),
        ("strata", changed(STRATA, plan__memory=None), "'memory' is missing"),
        ("strata", changed(STRATA, plan__memory__0__items=None), "'items' is missing"),
        ("strata", changed(STRATA, plan__memory__0__kind=None), "'kind' is missing"),
        ("strata", changed(STRATA, plan__memory__0__kind="vram0"), "'actual' is missing"),
        ("strata", changed(STRATA, machine__threads=[2]), "'threads' is missing"),
        ("strata", changed(STRATA, samples__prompt__1__tok_s=10**400), "not all speeds"),
        ("strata", changed(STRATA, samples__prompt__1__tok_s=True), "'tok_s' is missing"),
        ("strata", changed(STRATA, plan__memory=[{"items": []}]), "'kind' is missing"),
        ("strata", vram(actual=10**400), "no count of bytes"),
        ("strata", vram(name=None), "'name' is missing"),
        ("strata", STRATA.replace("{", '{"deep": ' + "[" * 40 + "]" * 40 + ",", 1), "32 deep"),
        ("peer", "error: cannot load\n", "cannot load"),
        ("peer", "[" * 100_000, "no figures"),
        ("peer", "[" * 100_000 + "]" * 100_000, "no figures"),
        ("peer", "[" + "9" * 10_000 + "]", "no figures"),
        ("peer", changed(PEER, __0__build_number=float("nan")), "no figures"),
        ("peer", changed(PEER, __0__build_number=0).replace(": 0,", ": 1e999,"), "no figures"),
        ("peer", changed(PEER, __0__gpu_info=nested(40)), "32 deep"),
        ("peer", changed(PEER, __1__samples_ts=[1.0, 10**400, 2.0]), "not all speeds"),
        ("peer", changed(PEER, __1__samples_ts=[1e-320, 1e-320, 1e-320]), "not all speeds"),
        ("peer", changed(PEER, __1__samples_ts=[1e300, 1.0, 2.0]), "not all speeds"),
        ("peer", changed(PEER, __1__samples_ts=[True, 1.0, 2.0]), "not all speeds"),
        ("peer", changed(PEER, __1__n_threads=10**400), "threads: 2 asked for, found 1000"),
        ("peer", changed(PEER, __1=None), "decode tests of 8 tokens: 1 asked for, found 0"),
        ("peer", changed(PEER, __0__n_prompt=512), "prompt tests of 32 tokens"),
        ("peer", changed(PEER, __1__n_threads=1), "threads: 2 asked for, found 1"),
        ("peer", changed(PEER, __1__samples_ts=[1.0]), "decode repeats"),
        ("peer", changed(PEER, __1__samples_ts=[1.0, "x", 2.0]), "not all speeds"),
    ],
)
def test_other_output_is_refused(read: str, text: str, says: str) -> None:
    with pytest.raises(NotFigures, match=says) as error:
        READERS[read](text, ASKED)
    assert len(error.value.why) < 400


@given(
    st.sampled_from(["strata", "peer"]),
    st.recursive(
        st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
        max_leaves=8,
    ),
    st.data(),
)
def test_whatever_is_printed_can_be_written_or_is_refused(
    read: str, value: Any, data: st.DataObject
) -> None:
    document = json.loads({"strata": STRATA, "peer": PEER}[read])
    at, steps = document, data.draw(st.integers(1, 6))
    for step in range(steps):
        key = data.draw(st.sampled_from(sorted(at) if isinstance(at, dict) else range(len(at))))
        if step == steps - 1 or not isinstance(at[key], dict | list) or not at[key]:
            at[key] = value
            break
        at = at[key]
    try:
        found = READERS[read](json.dumps(document), ASKED)
    except NotFigures:
        return
    pairs = [Pair(found, found)]
    json.dumps([found.as_json(), summary(pairs, ["prompt", "decode"])], allow_nan=False, indent=2)


def test_a_test_that_was_not_asked_for() -> None:
    only = Asked(prompt=0, decode=8, repeats=3, threads=2)
    with pytest.raises(NotFigures, match="tests: 1 asked for, found 2"):
        read_llama_bench(PEER, only)
    assert set(read_llama_bench(changed(PEER, __0=None), only).samples) == {"decode"}


# --- figures and commands ----------------------------------------------------------------------


def figures(prompt: list[float], decode: list[float]) -> Figures:
    return Figures({"prompt": tuple(prompt), "decode": tuple(decode)}, {})


def test_ratios_are_taken_pair_by_pair() -> None:
    # The machine slows to a quarter for the second pair: medians of each side would mix pairs.
    pairs = [
        Pair(figures([10, 12, 11], [8]), figures([22, 20, 30], [4])),
        Pair(figures([3, 3, 3], [2]), figures([4, 4, 4], [1])),
        Pair(figures([12, 12, 1], [9]), figures([24, 24, 24], [3])),
    ]
    found = summary(pairs, ["prompt", "decode"])
    assert found["prompt"]["ratio"] == {"median": 0.5, "low": 0.5, "high": 0.75}
    assert found["decode"]["ratio"] == {"median": 2.0, "low": 2.0, "high": 3.0}
    assert found["prompt"]["strata_tok_s"] == {"median": 11, "low": 3, "high": 12}
    assert found["prompt"]["peer_tok_s"] == {"median": 22, "low": 4, "high": 24}


@pytest.mark.parametrize(
    ("placed", "where"),
    [
        (Placed(layers=48, experts=0.0, device=False), "-ngl 0 -dev none"),
        (Placed(layers=48, experts=0.0, device=True), "-ngl 99 -ncmoe 48"),
        (Placed(layers=48, experts=0.249, device=True), "-ngl 99 -ncmoe 36"),
        (Placed(layers=48, experts=0.5, device=True), "-ngl 99 -ncmoe 24"),
        (Placed(layers=48, experts=1.0, device=True), "-ngl 99 -ncmoe 0"),
    ],
)
def test_the_peer_gets_as_much_of_a_device(placed: Placed, where: str) -> None:
    command = shlex.join(LLAMA.command("lb", "m.gguf", ASKED, placed))
    assert command == f"lb -m m.gguf -p 32 -n 8 -r 3 -t 2 -o json {where}"


def test_processes_take_turns() -> None:
    calls: list[str] = []
    seen: list[int] = []

    def runner(command: Any) -> str:
        calls.append(command[0])
        return {"s": STRATA, "p": PEER}[command[0]]

    pairs = take_turns(
        (["s"], read_strata),
        (lambda first: ["p" if first.about["kv"] == "fp16" else "?"], read_llama_bench),
        ASKED,
        3,
        runner,
        lambda number, pair: seen.append(number),
    )
    assert calls == ["s", "p"] * 3
    assert seen == [1, 2, 3]
    assert len(pairs) == 3


def test_flags_for_the_peer() -> None:
    assert parse_flags("-ub 2048 --name 'a b'") == ("-ub", "2048", "--name", "a b")
    with pytest.raises(UsageError, match="peer-args"):
        parse_flags("'open")


# --- whole runs --------------------------------------------------------------------------------


@pytest.fixture
def peer(tmp_path: Path) -> Path:
    """A program that prints `llama-bench.json`, once it was given the flags they belong to."""
    file = tmp_path / "llama-bench"
    source = f"""#!{sys.executable}
import sys
if "-p 32 -n 8 -r 3 -t 2 -o json -ngl 0 -dev none -ub 64" not in " ".join(sys.argv):
    sys.exit("stand-in: " + " ".join(sys.argv[1:]))
print(open({str(HERE / "llama-bench.json")!r}).read())
"""
    file.write_text(source)
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return file


SMALL = ("-p", "32", "-n", "8", "-r", "3", "--threads", "2", "--pairs", "1", "--peer-args=-ub 64")


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script with a #! line")
def test_a_whole_run(peer: Path, tmp_path: Path, strata: Any) -> None:
    out = tmp_path / "out.json"
    demo = Path(sys.modules["strata_core"].__path__[0]) / "demo" / "kjv-Q4_0.gguf"
    args = ("bench", "demo", *SMALL, "--compare", f"llama-bench={peer}", "--report", str(out))
    result = strata(*args, "--backend", "cpu", "--kv", "fp32")
    assert result.code == 0, result.err
    document = json.loads(out.read_text("utf-8"))
    assert document["asked"] == {
        "prompt": 32, "decode": 8, "repeats": 3, "threads": 2, "named": True, "pairs": 1,
    }  # fmt: skip
    assert document["model"] == {"name": demo.name, "bytes": demo.stat().st_size}
    assert "--backend cpu" in document["commands"]["strata"]
    assert document["pairs"][0]["strata"]["about"]["kv"] == "fp32"
    for kind in ("prompt", "decode"):
        (pair,) = document["pairs"]
        middle = sorted(pair["strata"]["samples"][kind])[1]
        other = sorted(pair["peer"]["samples"][kind])[1]
        assert pair["ratio"][kind] == pytest.approx(middle / other)
        assert document["summary"][kind]["ratio"]["median"] == pair["ratio"][kind]
    lines = result.out.splitlines()
    assert [line.split()[0] for line in lines] == ["run", "prompt", "decode"]
    assert "pair 1 of 1" in result.err
    assert str(peer) in result.err


@pytest.mark.skipif(sys.platform == "win32", reason="the stand-in is a script with a #! line")
@pytest.mark.parametrize(("cache", "left"), [("0", 6), ("96", 3), ("192", 0)])
def test_a_device_is_shared_out_alike(cache: str, left: int, tmp_path: Path, strata: Any) -> None:
    """The stand-in is asked for as many layers in its device as Strata has experts there."""
    file = tmp_path / "llama-bench"
    file.write_text(f"#!{sys.executable}\nimport sys\nsys.exit(' '.join(sys.argv[1:]))\n")
    file.chmod(file.stat().st_mode | stat.S_IXUSR)
    args = ("bench", "demo", "-p", "0", "-n", "2", "-r", "1", "--pairs", "1")
    device = ("--backend", "sim", "--sim-vram", "0.05", "--expert-cache", cache)
    result = strata(*args, *device, "--compare", f"llama-bench={file}")
    assert result.code == 1
    assert f"-ngl 99 -ncmoe {left}" in result.err


def test_failure_leaves_no_document(tmp_path: Path, strata: Any) -> None:
    out = tmp_path / "out.json"
    none = tmp_path / "none"
    args = ("bench", "demo", *SMALL, "--compare", f"llama-bench={none}", "--report", str(out))
    result = strata(*args, "--backend", "cpu")
    assert result.code == 1
    assert "cannot be run" in result.err
    assert not out.exists()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("--compare", "llama-bench"), "names no program"),
        (("--compare", "another=lb"), "names no program"),
        (("--compare", "llama-bench=lb", "--report", "no/such/out.json"), "cannot be written"),
        (("--report", "out.json"), "without --compare"),
        (("--peer-args", "-ub 1"), "without --compare"),
        (("--pairs", "5"), "--pairs is given without --compare"),
        (("--timeout", "900"), "--timeout is given without --compare"),
        (("--compare", "llama-bench=lb", "--pairs", "0"), "at least 1"),
        (("--compare", "llama-bench=lb", "--timeout", "9" * 20), "from 1 to 604800"),
        (("--compare", "llama-bench=lb", "--timeout", "604801"), "from 1 to 604800"),
        (("--compare", "llama-bench=lb", "--report", ""), "--report is empty"),
        (("--compare", "llama-bench=lb", "--report", "."), "is a folder"),
    ],
)
def test_bad_use(args: tuple[str, ...], says: str, strata: Any) -> None:
    result = strata("bench", "demo", "-p", "4", "-n", "2", *args)
    assert result.code == 2
    assert says in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(
    ("which", "says"),
    [
        ("model", "names a file of the model itself"),
        ("a later part", "names a file of the model itself"),
        ("program", "which would be lost"),
    ],
)
def test_a_report_is_a_file_of_its_own(which: str, says: str, tmp_path: Path, strata: Any) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", shard_tensors=10)
    first, *_, last = sorted(tmp_path.glob("m-*.gguf"))
    files = {"model": first, "a later part": last, "program": tmp_path / "lb"}
    files["program"].write_text("a program")
    before = files[which].read_bytes()
    link = tmp_path / "out.json"
    link.hardlink_to(files[which])
    compare = ("--compare", f"llama-bench={files['program']}")
    for report in (link, files[which]):
        result = strata(
            "bench", str(files["model"]), "-p", "4", "-n", "2", *compare, "--report", str(report)
        )
        assert result.code == 2
        assert says in result.err
        assert files[which].read_bytes() == before


def test_a_folder_cannot_be_given_to_a_peer(tmp_path: Path, strata: Any) -> None:
    from strata_core.testing.tiny import tiny_hyper, write_tiny_hub

    write_tiny_hub(tmp_path / "m", hyper=tiny_hyper())
    args = ("bench", str(tmp_path / "m"), "-p", "4", "-n", "2", "--compare", "llama-bench=lb")
    result = strata(*args)
    assert result.code == 2
    assert "no single GGUF file" in result.err
