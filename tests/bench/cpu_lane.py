"""How long the CPU's lane of a device takes for few experts of a layer, by their number.

    python tests/bench/cpu_lane.py MODEL [--backend cuda] [--threads N] [--repeats 40]

MODEL is loaded with no expert on the device; then layers are computed as start-up's trials do
(`kernels/device/measure.py`), other experts each time, with nothing on the link and no kernel
running. Median microseconds a layer.
"""

from __future__ import annotations

import argparse
import statistics

import strata_core
from strata_core.kernels.device.measure import CpuTrials, samples


def main() -> None:
    """Print a line of times, and the rate at the most experts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--repeats", type=int, default=40)
    given = parser.parse_args()
    options = {} if given.threads is None else {"threads": given.threads}
    with strata_core.load(given.model, backend=given.backend, expert_cache=0, **options) as model:
        executor = model._running.executor
        host, pool = executor._maker.host, executor._pool
        top_k = model.checkpoint.hyper.top_k
        lane = CpuTrials(host, pool, samples(executor._maker.cells, host), top_k)
        taken: dict[int, list[float]] = {count: [] for count in range(1, lane.most + 1)}
        for count in taken:
            lane.ready(count)()  # compiles what is missing
        for _ in range(given.repeats):
            for count, seconds in taken.items():
                trial = lane.ready(count)
                lane.wake()
                seconds.append(trial())
        times = {count: statistics.median(seconds) for count, seconds in taken.items()}
        shown = ", ".join(f"{count}: {seconds * 1e6:.1f}" for count, seconds in times.items())
        rate = lane.most * lane.nbytes / times[lane.most] / 1e9
        print(
            f"{pool.threads} threads, {lane.nbytes:.0f} bytes an expert; us a layer {shown}; "
            f"{rate:.1f} GB/s"
        )


if __name__ == "__main__":
    main()
