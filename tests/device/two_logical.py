"""The helper's path on a machine with one device: that device, listed twice, is its own helper.

    python tests/device/two_logical.py MODEL [MODEL ...] [--backend cuda|hip|sim] [--every]

Each model runs in the ways of `strata verify` that a helper takes part in, against the CPU
backend's bits; with --every at every place and cache size. Before them in one without a helper:
prompts that the backend sums in an order of its own are compared with that one. A line for each
way; leaves with 1 where one is not equal, or none ran in which the helper served experts.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from harness import Repeated, installed, own_order_of

from strata_core.config import resolve_arguments
from strata_core.verify.identity import Outcome, prove, subject
from strata_core.verify.ways import ways


def check(model: Path, asked: argparse.Namespace) -> list[Outcome]:
    """The outcomes of one model's ways."""
    options = {"backend": asked.backend, "device": (0, 1)}
    found = subject(model, model, resolve_arguments(options))
    given = {key: value for key, value in found.settings.given().items() if key != "device"}
    table = ways(found.facts, devices=found.devices, given=given, quick=not asked.every)
    helped = [way for way in table if "expert_cache_device1" in way.options]
    alone = next(way for way in table if way not in helped)

    def show(row: Outcome) -> None:
        served = ", ".join(f"{lane} {count}" for lane, count in row.served.items())
        print(f"{model.name:18} {row.way!s:38} {row.logits[:16]:16} {row.verdict:8} {served} "
              f"{row.note[:300]}".rstrip(), flush=True)  # fmt: skip

    return prove(found, [alone, *helped], on_row=show)[1]


def main() -> int:
    """Every model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--every", action="store_true", help="every place and cache size, helped")
    asked = parser.parse_args()
    with installed(asked.backend, Repeated, times=2) as made:
        models = [check(model, asked) for model in asked.models]
    rows = [row for found in models for row in found]
    equal = [row for row in rows if row.verdict == "equal"]
    wrong = [row for row in rows if row.verdict not in ("equal", "idle", "skipped")]
    served = sum(row.served.get("helper", 0) for row in equal)
    own = [[row.run.own_order for row in found if row.run] for found in models]
    print(
        f"{len(equal)} of {len(rows)} ways equal the CPU's bits"
        f"{own_order_of(own, 'the way without a helper')}, {len(wrong)} do not; the helper on "
        f"the same device computed {served} experts in {len(made)} starts"
    )
    return 1 if wrong or not served else 0


if __name__ == "__main__":
    sys.exit(main())
