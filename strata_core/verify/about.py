"""What a way is about, and whether a run of it did that.

Equal tokens prove nothing of a lane that served no expert, or of a path that was not taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from attrs import frozen

from strata_core.plan.actual import Actual

_LANES = {
    "pcie": "no expert went over the link",
    "helper": "no helper computed an expert",
    "entered": "no expert entered the cache",
}
"""What it means that a lane counted no expert."""


@frozen(kw_only=True)
class About:
    """What a run must have done before its tokens say anything of what the way is about.

    `lane` counted experts; memory for experts was had by one of `paths` (`Region.path`), `partly`
    with some of it page-locked and some not; `reads` were compared with hashes; rounds were of the
    mode `dispatch` to the end.
    """

    lane: str = ""
    paths: tuple[str, ...] = ()
    partly: bool = False
    reads: bool = False
    dispatch: str = ""

    def __str__(self) -> str:
        parts = [f"lane {self.lane}"] if self.lane else []
        if self.paths:
            parts.append(f"memory {' or '.join(self.paths)}")
        parts += ["partly page-locked"] * self.partly + ["reads compared"] * self.reads
        parts += [f"{self.dispatch} rounds"] if self.dispatch else []
        return ", ".join(parts)

    def missed(
        self,
        counters: Mapping[str, Mapping[str, int]],
        actual: Actual,
        reads: Mapping[str, Any],
        lanes: Mapping[str, Any],
    ) -> str:
        """Why a run with these figures did not do it; "" where it did."""
        if self.lane and not counters.get(self.lane, {}).get("experts"):
            return _LANES.get(self.lane, f"lane {self.lane} served no expert")
        if self.paths:
            taken = [path.partition(": ")[2].partition(",")[0] for path in actual.paths]
            if not taken:
                return "no expert lay in host memory"
            if not set(taken) & set(self.paths):
                return f"the memory was {' and '.join(taken)}, not {' or '.join(self.paths)}"
        if self.partly and not 0 < actual.pinned < actual.host:
            return f"{'all' if actual.pinned else 'none'} of the memory was page-locked"
        if self.reads and not reads.get("compared"):
            return "no read was compared"
        dispatch = lanes.get("dispatch", {})
        if self.dispatch and dispatch.get("mode") != self.dispatch:
            return f"rounds were {dispatch.get('mode')}: {dispatch.get('because')}"
        return ""
