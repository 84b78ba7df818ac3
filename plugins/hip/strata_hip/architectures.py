"""Which of AMD's architectures there are kernels for, and which a ROCm can know.

An architecture that a hiprtc has never heard of ends the process inside the library (seen with HIP
5.2), so that its name is checked before. The versions are those whose LLVM first had the name: a
ROCm before them cannot know it; one after them that does not says so itself.
"""

from __future__ import annotations

import re

from strata_core.errors import DeviceError

FAMILIES = ("gfx906 to gfx950", "gfx103x", "gfx11xx", "gfx12xx")
"""What the kernels are written for; docs/hip.md says what was run and what only compiled."""

KNOWN_SINCE = (
    ("gfx906", (4, 0)),
    ("gfx908", (4, 0)),
    ("gfx90a", (4, 3)),
    ("gfx94[012]", (5, 7)),
    ("gfx950", (6, 3)),
    ("gfx103[0-6]", (5, 0)),
    ("gfx110[0-3]", (5, 3)),
    ("gfx115[0-3]", (6, 0)),
    ("gfx120[01]", (6, 2)),
)
"""Patterns of names, and the first ROCm that can know them."""


def serves(architecture: str) -> bool:
    """Whether there are kernels for an architecture, e.g. "gfx1030"."""
    return _since(architecture) is not None


def check_known(architecture: str, rocm: tuple[int, int]) -> None:
    """Raise DeviceError unless a hiprtc of that version may be asked for the architecture."""
    since = _since(architecture)
    if since is None:
        raise DeviceError(
            f"kernels cannot be compiled for {architecture!r}",
            "it is none of the architectures that there are kernels for",
            f"devices of {', '.join(FAMILIES)} are served",
        )
    if rocm < since:
        raise DeviceError(
            f"kernels cannot be compiled for {architecture}",
            f"this ROCm ({rocm[0]}.{rocm[1]}) is older than that architecture",
            f"install ROCm {since[0]}.{since[1]} or newer",
        )


def _since(architecture: str) -> tuple[int, int] | None:
    for pattern, since in KNOWN_SINCE:
        if re.fullmatch(pattern, architecture):
            return since
    return None
