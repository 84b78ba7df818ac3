"""What the amdgpu kernel driver shows in files: read, never opened for work.

Source: the kernel's KFD topology below /sys/class/kfd; a node without SIMD units is a processor,
and `gfx_target_version` is major * 10000 + minor * 100 + stepping (90402 is gfx942).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

_NODES = Path("/sys/class/kfd/kfd/topology/nodes")


def can_open(path: str) -> bool:
    """Whether this user may read and write the device file."""
    return os.access(path, os.R_OK | os.W_OK)


def list_gpus(nodes: Path = _NODES) -> list[dict[str, Any]]:
    """The GPUs of the topology by node number: `node`, `architecture` ("gfx942")."""
    found = []
    for folder in nodes.glob("[0-9]*"):
        properties = _properties(folder / "properties")
        version = properties.get("gfx_target_version", 0)
        if properties.get("simd_count", 0) and version:
            major, minor, stepping = version // 10000, version // 100 % 100, version % 100
            name = f"gfx{major}{minor:x}{stepping:x}"
            found.append({"node": int(folder.name), "architecture": name})
    return sorted(found, key=lambda gpu: gpu["node"])


def _properties(path: Path) -> dict[str, int]:
    """A node's properties; empty where the driver keeps them from this container."""
    try:
        lines = path.read_text("ascii", "replace").splitlines()
    except OSError:
        return {}
    pairs = (line.partition(" ") for line in lines)
    return {name: int(value) for name, _, value in pairs if value.isdecimal()}
