"""Strata's plugins from this checkout, for a machine where they are not installed.

Entry points are found by the metadata of distributions alone. `describe` writes a folder of such
metadata; with it, the checkout and the plugins' folders on PYTHONPATH a process has them.
"""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("cuda", "hip")


def describe(folder: Path, names: tuple[str, ...] = NAMES) -> Path:
    """Write the metadata of these plugins into a folder, and return it."""
    for name in names:
        described = folder / f"strata_{name}-0.1.0.dist-info"
        described.mkdir(parents=True, exist_ok=True)
        (described / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: strata-{name}\nVersion: 0.1.0\n"
        )
        (described / "entry_points.txt").write_text(f"[strata]\n{name} = strata_{name}.plugin\n")
    return folder


def environment(folder: Path, names: tuple[str, ...] = NAMES) -> dict[str, str]:
    """This process's environment for one that has the checkout, and plugins not installed."""
    missing = tuple(name for name in names if not installed(f"strata-{name}"))
    paths = [ROOT, *(ROOT / "plugins" / name for name in missing)]
    if missing:
        paths.append(describe(folder, missing))
    given = os.environ.get("PYTHONPATH", "")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*map(str, paths), given])}


def installed(name: str) -> bool:
    """Whether a distribution is there already."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True
