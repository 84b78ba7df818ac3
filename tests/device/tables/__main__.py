"""Strata beside llama-bench on one file with as much of a device: decode, prompts, paths.

    python tests/device/tables STATE.json --peer llama-bench=PATH --synth SCRIPT [--tables decode]
        [--seconds 560] [--markdown OUT.md]

Every cell is kept in STATE.json when it is there; a call goes on with what is missing, begins
nothing that may not end within --seconds, and says what is left: carry the file from call to call.
Profiles, recorded from other random ids than those that are measured, are kept beside it.

SCRIPT writes the synthetic model where --model is not there yet, and its routers anew for each
skew (`SCRIPT OUT --shape S --expert-type T --skew X`, `--reskew`). For each cell Strata is loaded
once, in a process of its own; then its runs and llama-bench's processes take turns, so that Strata
is idle beside them, and each pair gives a ratio. llama-bench gets the layers with which its device
memory, read from the driver, is as near to Strata's as whole layers allow. Bounds are from
bandwidths of the same call (`rates.py`).

`--backend sim` and `cpu` try all of it with no device, on a small shape; `--peer` may be any
program that prints what llama-bench does. Leaves with 0 when nothing is left, 1 if anything is.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLUGINS = [ROOT / "plugins" / name for name in ("cuda", "hip")]
sys.path[:0] = [str(path) for path in (HERE, HERE.parent, ROOT, *PLUGINS)]

from cells import SHARES, SKEWS, TABLES, Cell, cells  # noqa: E402
from entry_points import environment  # noqa: E402
from machine import Meter, facts, nvml, rates  # noqa: E402
from measure import Rig, decode_cell, prompts_cell  # noqa: E402
from paths import paths_cell  # noqa: E402
from peer_side import Peer  # noqa: E402
from state import State, markdown, read  # noqa: E402
from strata_side import Failed  # noqa: E402

from strata_core.checkpoint.open import open_checkpoint  # noqa: E402
from strata_core.errors import StrataError  # noqa: E402
from strata_core.kernels.cpu.backend import threads_of  # noqa: E402
from strata_core.machine import read_machine  # noqa: E402

MEASURES: dict[str, Callable[[Rig, Cell], dict[str, Any]]] = {
    "decode": decode_cell,
    "prompts": prompts_cell,
    "paths": paths_cell,
}
EXPECTED = {"decode": 60.0, "prompts": 150.0, "paths": 240.0}
"""Seconds of a cell, until one of its table was measured in this call."""


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("state", type=Path, help="the file of results")
    parser.add_argument("--peer", required=True, help="llama-bench=PATH")
    parser.add_argument("--synth", type=Path, help="the script that writes the model")
    parser.add_argument("--model", type=Path, help="default: one in the folder for temporary files")
    parser.add_argument("--shape", default="30b-a3b")
    parser.add_argument("--expert-type", default="q4_k")
    parser.add_argument("--layers", type=int, help="fewer than the shape has")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=["decode"])
    parser.add_argument("--shares", nargs="+", choices=SHARES, default=list(SHARES))
    parser.add_argument("--skews", nargs="+", type=float, default=list(SKEWS))
    parser.add_argument("--runs", type=int, default=3, help="pairs of runs of each cell")
    parser.add_argument("-n", "--decode", type=int, default=128, help="rounds of a decode run")
    parser.add_argument("-p", "--prompts", nargs="+", type=int, default=[4096, 16384])
    parser.add_argument("--ubatches", nargs="+", type=int, default=[512, 1024, 2048, 4096])
    parser.add_argument("--long", type=int, default=32768, help="the prompt of the table of paths")
    parser.add_argument("--threads", type=int, help="of llama-bench; default: the physical cores")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--peer-args", default="", help="more flags for llama-bench")
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--markdown", type=Path, help="write the tables to this file too")
    return parser.parse_args()


def write_model(asked: argparse.Namespace, model: Path, skew: float, *, again: bool) -> None:
    """The synthetic model, or its routers for another skew."""
    began = time.monotonic()
    command = [sys.executable, str(asked.synth), str(model), "--shape", asked.shape]
    command += ["--skew", str(skew), "--expert-type", asked.expert_type]
    command += ["--reskew"] if again else ["--context", str(needed(asked))]
    if asked.layers:
        command += ["--layers", str(asked.layers)]
    if asked.synth is None:
        raise SystemExit(f"{model} has to be written for skew {skew:g}: name the --synth script")
    subprocess.run(command, check=True)
    print(f"{model.name}: skew {skew:g} in {time.monotonic() - began:.1f} s", flush=True)


def needed(asked: argparse.Namespace) -> int:
    """Tokens of the longest context that any table needs."""
    return max(40960, *asked.prompts, asked.long + asked.decode)


def settings(pairs: list[str]) -> dict[str, Any]:
    """Settings for every load of Strata, by key."""
    found: dict[str, Any] = {}
    for pair in pairs:
        key, _, value = pair.partition("=")
        found[key] = value
    return found


def rig_of(asked: argparse.Namespace, model: Path, measured: dict[str, float] | None) -> Rig:
    """What the cells are measured with."""
    name, _, program = asked.peer.partition("=")
    if name != "llama-bench" or not Path(program).exists():
        raise SystemExit(f"--peer {asked.peer} names no program: llama-bench=PATH")
    checkpoint = open_checkpoint(model)
    hyper, files = checkpoint.hyper, checkpoint.experts
    nbytes = sum(layout.nbytes for layout in files.layouts.values()) * files.count
    checkpoint.close()
    on_device = asked.backend not in ("cpu", "sim")
    folder = asked.state.resolve().parent
    return Rig(
        model=model,
        backend=asked.backend,
        hyper=hyper,
        expert_bytes=nbytes,
        peer=Peer(
            program=Path(program),
            model=model,
            threads=asked.threads or threads_of(read_machine()),
            device=on_device,
            layers=len(hyper.moe_layers),
            more=tuple(asked.peer_args.split()),
        ),
        meter=Meter(nvml() if on_device else None),
        environment=environment(Path(tempfile.gettempdir()) / "strata-tables-site"),
        rates=measured,
        runs=asked.runs,
        decode=asked.decode,
        lengths=tuple(asked.prompts),
        ubatches=tuple(asked.ubatches),
        long=asked.long,
        options=settings(asked.option),
        folder=folder,
    )


def go(asked: argparse.Namespace, state: State, left: list[Cell], until: float) -> None:
    """Measure what is left as far as the time goes."""
    name = f"synth-{asked.shape}-{asked.expert_type}-{asked.layers or 'all'}.gguf"
    model = asked.model or Path(tempfile.gettempdir()) / name
    skew = None
    expected = dict(EXPECTED)
    rig = None
    for cell in left:
        began = time.monotonic()
        if began + expected[cell.table] > until:
            print(f"no time for {cell.name}: it may take {expected[cell.table]:.0f} s", flush=True)
            continue
        if cell.skew != skew:
            write_model(asked, model, cell.skew, again=model.exists())
            skew = cell.skew
        if rig is None:
            environment_ = environment(Path(tempfile.gettempdir()) / "strata-tables-site")
            measured = rates(asked.backend, environment_)
            state.machines.append(facts(asked.backend, measured))
            rig = rig_of(asked, model, measured)
        try:
            found = MEASURES[cell.table](rig, cell)
        except (Failed, StrataError) as error:
            found = {"error": " ".join(str(error).split())[:500]}
        took = time.monotonic() - began
        state.put(cell.name, {**found, "took_s": took})
        expected[cell.table] = took if "error" not in found else expected[cell.table]
        print(f"{cell.name}: {told(found)}, in {took:.1f} s", flush=True)


def told(found: dict[str, Any]) -> str:
    """A cell in a few words."""
    if "error" in found:
        return f"FAILED {found['error']}"
    if "ratio" in found:
        return f"{found['strata']['median']:.1f} tok/s, ratio {found['ratio']['median']:.2f}"
    parts = found.get("lengths") or {}
    ratios = ", ".join(f"{n}: {one['ratio']['median']:.2f}" for n, one in parts.items())
    return f"ratios {ratios}" if parts else f"{len(found['ways'])} ways"


def main() -> int:
    """Measure what is missing, show what is there."""
    asked = parse()
    until = time.monotonic() + asked.seconds
    setup = {
        name: getattr(asked, name)
        for name in ("backend", "shape", "expert_type", "layers", "runs", "decode", "prompts")
    }
    setup |= {"long": asked.long, "option": asked.option, "peer_args": asked.peer_args}
    state = read(asked.state, setup)
    wanted = cells(asked.tables, asked.shares, asked.skews)
    if asked.backend == "cpu":
        wanted = [cell for cell in wanted if cell.table != "paths"]
    go(asked, state, [cell for cell in wanted if not state.has(cell.name)], until)
    state.write()
    text = markdown(state)
    if asked.markdown:
        asked.markdown.write_text(text, "utf-8")
    print(text)
    left = [cell.name for cell in wanted if not state.has(cell.name)]
    print(f"{len(wanted) - len(left)} of {len(wanted)} cells; left: {', '.join(left) or 'none'}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
