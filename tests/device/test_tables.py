"""The program that measures tables on a device, tried with a simulated one and a stand-in peer."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from strata_core.testing.tiny import tiny_hyper

HERE = Path(__file__).resolve().parent
TABLES = HERE / "tables"

STAND_IN = """
import json, sys
flags = dict(zip(sys.argv[1::2], sys.argv[2::2]))
rows = []
for ubatch in flags.get("-ub", "50").split(","):
    tests = [(int(p), 0) for p in flags["-p"].split(",") if p != "0"]
    for prompt, gen in tests + [(0, int(flags["-n"]))] * (flags["-n"] != "0"):
        rows.append({"n_prompt": prompt, "n_gen": gen, "n_ubatch": int(ubatch),
                     "n_threads": int(flags["-t"]), "samples_ts": [10.0 + int(ubatch) / 100]})
print(json.dumps(rows))
"""

WRITER = """
import sys
import time
from pathlib import Path
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf
skew = sys.argv[sys.argv.index("--skew") + 1]
Path(sys.argv[1] + ".skews").open("a").write(skew + " ")
if "--reskew" not in sys.argv:
    write_tiny_gguf(Path(sys.argv[1]), hyper=tiny_hyper(layers=2, context=256), seed=3)
"""


@pytest.fixture(autouse=True)
def found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TABLES))


def test_cells_are_in_the_order_of_the_file_and_have_the_goals() -> None:
    from cells import SHARES, SKEWS, cells

    decode = cells(["decode"], list(SHARES), SKEWS)
    assert [cell.name for cell in decode] == [
        *("decode all 0.6", "decode half 0.6", "decode quarter 0.6", "decode none 0.6"),
        *("decode half 0.3", "decode quarter 0.3", "decode half 0", "decode quarter 0"),
    ]
    assert [cell.goal for cell in decode] == [1.0, 3.0, 2.5, 1.8, 2.2, 2.0, 1.5, 1.6]
    assert [cell.experts(6144) for cell in decode[:4]] == [6144, 3072, 1536, 0]
    prompts = cells(["prompts", "paths"], list(SHARES), SKEWS)
    assert [cell.goal for cell in prompts] == [0.8, 1.3, 1.3, 1.3, None]


@pytest.fixture
def peer(tmp_path: Path):
    from peer_side import Peer

    program = tmp_path / "llama-bench"
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    program.chmod(0o755)
    return Peer(program=program, model=Path("m.gguf"), threads=2, device=True, layers=48, on_cpu=24)


def test_the_peer_gets_the_layers_that_make_its_memory_nearest(peer) -> None:
    gib = 1 << 30
    layer = gib // 3
    assert peer.nearer(10 * gib, int(10.4 * gib), layer) is None  # equal within 5 percent
    assert peer.nearer(10 * gib, 11 * gib, layer).on_cpu == 27
    assert peer.nearer(10 * gib, 9 * gib, layer).on_cpu == 21
    assert peer.nearer(10 * gib, 40 * gib, layer).on_cpu == 48  # no more than all of them
    assert peer.nearer(gib // 2, int(0.6 * gib), layer) is None  # no whole layer would do
    assert peer.nearer(None, gib, layer) is None


def test_the_peer_is_sized_until_it_is_near(peer) -> None:
    from machine import Meter
    from measure import sized

    in_use, looks = [100], []

    def used() -> int:
        looks.append(in_use[0])
        return in_use[0]

    def measure(self, **tests):
        in_use[0] = 1100 - 10 * self.on_cpu
        while looks[-1] == 100:
            time.sleep(0.001)
        in_use[0] = 100
        return [{"on_cpu": self.on_cpu}]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(peer), "measure", measure)
        patch.setattr("machine.STEP", 0.001)
        rig = SimpleNamespace(meter=Meter(used), layer_bytes=10)
        found, rows, its = sized(rig, peer, 600, decode=8)
    assert (found.on_cpu, rows, its) == (40, [{"on_cpu": 40}], 600)


def test_rows_that_were_not_asked_for_are_an_error(peer) -> None:
    from strata_side import Failed

    rows = peer.measure(prompts=[32, 64], ubatches=[16, 32])
    assert [(row["n_prompt"], row["n_ubatch"]) for row in rows] == [
        *((32, 16), (64, 16), (32, 32), (64, 32))
    ]
    assert [row["n_gen"] for row in peer.measure(decode=8)] == [8]
    peer.program.write_text(f"#!{sys.executable}\nprint('[]')")
    with pytest.raises(Failed, match="measured"):
        peer.measure(decode=8)


def test_the_bound_of_decoding_is_that_of_lanes_side_by_side() -> None:
    from bounds import decode_bound

    items = [{"name": "dense weights", "actual": 1000}, {"name": "keys and values", "actual": 400}]
    about = {"plan": {"memory": [{"kind": "vram0", "items": items}]}}
    rates = {"vram": 1e-6, "link": 9.0, "cpu": 9.0, "link_beside": 4e-9, "cpu_beside": 2e-9}
    lanes = {"hit": 100.0, "pcie": 40.0, "cpu": 20.0}
    bound = decode_bound(about, lanes, 64, 64, rates, 0.05)
    assert bound["tok_s"] == pytest.approx(1 / (1200 / 1000 + 10))
    assert bound["reached"] == pytest.approx(0.05 * 11.2)
    alone = decode_bound(about, {"hit": 100.0, "pcie": 36.0}, 64, 64, rates | {"link": 9e-9}, 0.05)
    assert alone["tok_s"] == pytest.approx(1 / (1200 / 1000 + 4))
    assert decode_bound(about, lanes, 64, 64, None, 1.0) is None


def tables(folder: Path, *more: str) -> subprocess.CompletedProcess[str]:
    (folder / "writer.py").write_text(WRITER)
    command = [sys.executable, str(TABLES), str(folder / "state.json")]
    command += ["--peer", f"llama-bench={folder / 'llama-bench'}"]
    command += ["--synth", str(folder / "writer.py"), "--model", str(folder / "m.gguf")]
    command += ["--backend", "sim", "--runs", "2", "-n", "8", "-p", "70", "--ubatches", "25", "50"]
    command += ["--shares", "half", "--skews", "0.6", "0", "--option", "threads=1"]
    command += ["--tables", "decode", "prompts", *more]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_calls_go_on_from_each_other(tmp_path: Path) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(f"#!{sys.executable}\nprint('nothing')")
    program.chmod(0o755)
    # a cell that fails is told of, and tried again
    failed = tables(tmp_path, "--seconds", "100", "--tables", "decode", "--skews", "0.6")
    assert failed.returncode == 1, failed.stderr
    assert "| decode half 0.6 | llama-bench: " in failed.stdout
    assert "left: decode half 0.6" in failed.stdout
    program.write_text(f"#!{sys.executable}\n{STAND_IN}")
    rest = tables(tmp_path, "--seconds", "500", "--markdown", str(tmp_path / "out.md"))
    assert rest.returncode == 0, rest.stdout + rest.stderr
    assert "3 of 3 cells; left: none" in rest.stdout
    # each call writes the model, or its routers for its first skew
    assert (tmp_path / "m.gguf.skews").read_text().split()[-2:] == ["0.6", "0.0"]
    assert {p.name for p in tmp_path.glob("profile-*")} == {"profile-0.6.json", "profile-0.json"}
    document = json.loads((tmp_path / "state.json").read_text())
    assert len(document["machines"]) == 2
    cells = document["cells"]
    assert {cell["machine"] for cell in cells.values()} == {1}
    decode = cells["decode half 0.6"]
    assert (decode["goal"], decode["peer"]["all"]) == (3.0, [10.5, 10.5])
    assert decode["ratio"]["all"] == [value / 10.5 for value in decode["strata"]["all"]]
    assert 0 < decode["hit_rate"] < 1
    experts = [decode["experts_a_token"][lane] for lane in ("hit", "pcie", "cpu")]
    assert sum(experts) == 2 * tiny_hyper().top_k
    assert decode["host_us"] > 0
    assert decode["vram"]["plan"] > decode["vram"]["slots"] > 0
    assert "-dev none" in decode["commands"][1]
    prompt = cells["prompts half 0.6"]["lengths"]["70"]
    assert (prompt["ubatch"], prompt["ubatches"]) == (50, {"25": 10.25, "50": 10.5})
    shown = (tmp_path / "out.md").read_text()
    assert "| half | 0.6 | 70 |" in shown
    assert "## Failed" not in shown
    other = tables(tmp_path, "--seconds", "0", "-n", "9")
    assert other.returncode == 1
    assert "of another set-up" in other.stderr


def test_a_plugin_without_early_starts_is_one_for_as_long_as_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(HERE.parents[1] / "plugins/cuda"))
    from two_backends import no_early_starts

    from strata_cuda.runtime import _Driver

    binding = SimpleNamespace(
        runtime=None,
        modules=SimpleNamespace(moduleGetFunction=None),
        call=lambda *args, **more: 7,
    )
    driver, device = _Driver(binding), SimpleNamespace(architecture="sm_90")
    assert driver.find("load", 1, "entry", device).early
    with no_early_starts():
        assert not driver.find("load", 1, "entry", device).early
    assert driver.find("load", 1, "entry", device).early
