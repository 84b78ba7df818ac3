"""One hash from every place: a model's tokens and logits on a device against `--backend cpu`.

    python tests/device/identity.py --backend NAME MODEL [MODEL ...] [--matrix] [--devices N]

What `strata verify` does with one model, for several: each way of `strata_core.verify.ways` on the
backend, against the CPU's bits; prompts in an order of the backend's own against its first way.
With --long a prompt of 1,900 tokens is among the prompts. Prints a line for each way; leaves with 1
where one is not equal. A way that does not fit is no failure, but a model of which no way ran is.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(HERE), str(ROOT), str(ROOT / "plugins/cuda"), str(ROOT / "plugins/hip")]

from harness import own_order_of  # noqa: E402

from strata_core.config import resolve_arguments  # noqa: E402
from strata_core.verify.identity import Outcome, prove, subject  # noqa: E402
from strata_core.verify.ways import Way, ways  # noqa: E402


def wanted(found: tuple[Way, ...], only: str | None) -> Iterator[Way]:
    """The ways whose name has the text `only` in it."""
    for way in found:
        if only is None or only in str(way):
            yield way


def check(model: Path, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The lines of one model."""
    options: dict[str, Any] = {"backend": asked.backend}
    if asked.backend == "sim":
        options |= {"sim_devices": asked.devices, "sim_vram": asked.sim_vram}
    else:
        options["device"] = tuple(range(asked.devices))
    found = subject(model, model, resolve_arguments(options), long=asked.long)
    given = {**found.settings.given()}
    given.pop("device", None)
    table = ways(found.facts, devices=found.devices, given=given, quick=not asked.matrix)

    def show(row: Outcome) -> None:
        served = ", ".join(f"{lane} {count}" for lane, count in row.served.items())
        text = f"{model.name:18} {row.way!s:38} {row.logits[:16]:16} {row.verdict:8} {served}"
        print(f"{text} {row.note[:300]}".rstrip(), flush=True)

    chosen = list(wanted(table, asked.only))
    _, rows = prove(found, chosen, seconds=asked.seconds, on_row=show)
    return [{"model": model.name, "way": str(row.way), **row.as_json()} for row in rows]


def main() -> int:
    """The whole table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--long", action="store_true")
    parser.add_argument("--matrix", action="store_true", help="every cache size at every place")
    parser.add_argument("--devices", type=int, default=1, help="the others are helpers")
    parser.add_argument("--sim-vram", type=float, default=8.0, help="GiB of a simulated device")
    parser.add_argument("--only")
    parser.add_argument("--seconds", type=float, help="of each model; later ways are skipped")
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    lines = [line for model in asked.models for line in check(model, asked)]
    if asked.json:
        asked.json.write_text(json.dumps(lines, indent=1))
    names = {path.name for path in asked.models}
    ran = [line for line in lines if line["verdict"] != "skipped"]
    equal = [line for line in ran if line["verdict"] == "equal"]
    wrong = [line for line in ran if line["verdict"] not in ("equal", "idle")]
    own = [[line["own_order"] for line in ran if line["model"] == name] for name in names]
    print(
        f"{len(equal)} of {len(ran)} ways equal the CPU's bits{own_order_of(own, 'the first way')};"
        f" {len(lines) - len(ran)} skipped, {len(ran) - len(equal) - len(wrong)} idle"
    )
    unproven = names - {line["model"] for line in equal}
    return 1 if wrong or unproven else 0


if __name__ == "__main__":
    sys.exit(main())
