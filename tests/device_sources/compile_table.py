"""Compiles the device kernels with no device, and shows what they need.

    python tests/device_sources/compile_table.py hiprtc gfx906 gfx90a gfx1030
    python tests/device_sources/compile_table.py clang gfx1100 gfx942 gfx1200
    python tests/device_sources/compile_table.py nvrtc sm_75 sm_80 sm_86 sm_89 sm_90 sm_120

`compilers.py` says what each of the three is. For hiprtc ROCM_PATH names the library, else it is
the one of Debian's libamdhip64-dev. A line for each kernel and architecture, or with --compact one
for each kernel name: how many variants, the most registers of any, what fails or spills. Leaves
with 1 where one does not compile, with 77 and the reason where there is nothing to compile with.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from attrs import frozen

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "plugins/hip"), str(ROOT / "plugins/cuda"), str(HERE)]

from compilers import COMPILERS, Compile, Missing, Needs, NotCompiled, every_key, kept  # noqa: E402

from strata_core.errors import StrataError  # noqa: E402
from strata_core.kernels.code_cache import CodeCache  # noqa: E402
from strata_core.runtime import KernelKey  # noqa: E402

SKIPPED = 77
DEBIAN = Path("/usr/lib/x86_64-linux-gnu/libamdhip64.so")
COLUMNS = "{:28} {:8} {:>9} {:>6} {:>6} {:>7}  {}"


@frozen
class Row:
    """One kernel for one architecture: what it needs, or why it did not compile."""

    key: KernelKey
    arch: str
    needs: Needs | None
    error: str = ""

    def __str__(self) -> str:
        name = " ".join(map(str, (self.key.name, *self.key.parameters)))
        if self.needs is None:
            return f"{name:28} {self.arch:8} does not compile: {self.error}"
        n = self.needs
        return COLUMNS.format(
            name, self.arch, n.registers, n.spills, n.shared, n.private, n.more
        ).rstrip()


def sample(keys: list[KernelKey], archs: list[str]) -> list[tuple[KernelKey, str]]:
    """One of each kernel, for one architecture after the other."""
    chosen: dict[str, list[KernelKey]] = {}
    for key in keys:
        chosen.setdefault(key.name, []).append(key)
    middle = [of_name[len(of_name) // 2] for of_name in chosen.values()]
    return [(key, archs[i % len(archs)]) for i, key in enumerate(middle)]


def first_whole(keys: list[KernelKey], archs: list[str]) -> list[tuple[KernelKey, str]]:
    """All for the first architecture, and one of each kernel for each of the others."""
    found = [(key, archs[0]) for key in keys]
    return found + [(key, arch) for arch in archs[1:] for key, _ in sample(keys, [arch])]


def rows(compile_: Compile, work: list[tuple[KernelKey, str]], jobs: int) -> Iterator[Row]:
    """Compile all, in order."""

    def one(what: tuple[KernelKey, str]) -> Row:
        key, arch = what
        try:
            return Row(key, arch, compile_(key, arch))
        except (NotCompiled, StrataError, ValueError, RuntimeError) as error:
            return Row(key, arch, None, " ".join(str(error).split())[:600])

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(one, work)


def compact(found: Sequence[Row], archs: Sequence[str]) -> Iterator[str]:
    """A Markdown table: kernels by name, and a column for each architecture."""
    yield "| kernel | variants | " + " | ".join(archs) + " |"
    yield "|---|---" + "|---" * len(archs) + "|"
    for name in dict.fromkeys(row.key.name for row in found):
        mine = [row for row in found if row.key.name == name]
        cells = [cell([row for row in mine if row.arch == arch]) for arch in archs]
        variants = len({row.key for row in mine})
        yield f"| {name} | {variants} | " + " | ".join(cells) + " |"


def cell(mine: Sequence[Row]) -> str:
    """The most registers of some rows; what fails and what spills is told."""
    needs = [row.needs for row in mine if row.needs]
    if not mine:
        return "-"
    if not needs:
        return "fails"
    failed, spills = len(mine) - len(needs), max(n.spills for n in needs)
    said = [str(max(n.registers for n in needs))]
    said += [f"{failed} fail"] if failed else []
    said += [f"spills {spills}"] if spills else []
    return ", ".join(said)


def with_debians() -> None:
    """Begin again with a ROCM_PATH of links to Debian's library, where none is named."""
    if os.environ.get("ROCM_PATH") or not DEBIAN.exists():
        return
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "lib"
        library.mkdir()
        for name in ("libamdhip64.so", "libhiprtc.so"):  # this HIP has both in one file
            (library / name).symlink_to(DEBIAN)
        environment = {**os.environ, "ROCM_PATH": folder, "LD_LIBRARY_PATH": str(library)}
        command = [sys.executable, __file__, *sys.argv[1:]]
        raise SystemExit(subprocess.run(command, env=environment, check=False).returncode)


def main() -> int:
    """Parse, compile, print."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("compiler", choices=sorted(COMPILERS))
    options.add_argument("architectures", nargs="+")
    options.add_argument("--only", default="", help="kernels whose name begins so")
    options.add_argument("--sample", action="store_true", help="each kernel once")
    options.add_argument(
        "--first-whole",
        action="store_true",
        help="all for the first architecture, each kernel once for the others",
    )
    options.add_argument("--compact", action="store_true", help="a line for each kernel name")
    options.add_argument("--jobs", type=int, default=2, help="kernels at once (not with hiprtc)")
    options.add_argument("--cache", type=Path, help="a folder of what was compiled before")
    asked = options.parse_args()
    if asked.compiler == "hiprtc":
        with_debians()
    try:
        tools = COMPILERS[asked.compiler]()
    except (Missing, ImportError) as error:
        print(f"nothing is compiled: {error}")
        return SKIPPED
    keys = [key for key in every_key(matrix=tools.matrix) if key.name.startswith(asked.only)]
    work = [(key, arch) for arch in asked.architectures for key in keys]
    if asked.sample:
        work = sample(keys, asked.architectures)
    elif asked.first_whole:
        work = first_whole(keys, asked.architectures)
    print(tools.name, flush=True)
    compile_, known = kept(tools, CodeCache(asked.cache, print))
    begin, found = time.perf_counter(), []
    if not asked.compact:
        print(COLUMNS.format("kernel", "arch", "registers", "spills", "shared", "private", ""))
    for row in rows(compile_, work, 1 if asked.compiler == "hiprtc" else asked.jobs):
        found.append(row)
        if row.needs is None or not asked.compact:
            print(row, flush=True)
    if asked.compact:
        print("\n".join(compact(found, asked.architectures)))
    good = [row.needs for row in found if row.needs]
    spilling = sum(bool(needs.spills) for needs in good)
    print(f"{asked.compiler}: {len(good)} of {len(found)} compiled, {spilling} spill")
    print(f"in {time.perf_counter() - begin:.0f} s, {len(known)} of them known from before")
    return 0 if len(good) == len(found) else 1


if __name__ == "__main__":
    sys.exit(main())
