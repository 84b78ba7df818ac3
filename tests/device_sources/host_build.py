"""The device sources compiled for the host, and a simulated accelerator that runs them.

Many kernels make one library, each in a namespace of its own. Libraries are kept in a folder under
a hash of their text.
"""

from __future__ import annotations

import ctypes
import hashlib
import re
import shutil
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from strata_core.kernels.device.sources import HERE as SOURCES
from strata_core.kernels.device.sources import source_of
from strata_core.runtime import KernelKey, Launch
from strata_core.testing.sim import SimHardware, SimRuntime
from strata_core.testing.sim.args import pointers

HERE = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-fno-strict-aliasing")
PER_LIBRARY = 16

LATE_COPIES = """
#define copy16 send_copy
#define copies_sent end_group
#define copies_done wait_for_groups
"""
"""Stands behind portable.h, whose copies are done at once on a host; emulated.h's arrive late."""


def host_compiler() -> str | None:
    """A C++ compiler, or None."""
    return shutil.which("g++") or shutil.which("clang++")


def _namespace(number: int, key: KernelKey) -> str:
    source, portable = source_of(key), (SOURCES / "portable.h").read_text("utf-8")
    text = source.text.replace(portable, portable + LATE_COPIES)
    assert LATE_COPIES in text, "every kernel has portable.h"
    names = _defined(text) - _defined((HERE / "emulated.h").read_text("utf-8"))
    return "\n".join(
        [
            f"namespace k{number} {{",
            text,
            "}",
            f'extern "C" const char* run_{number}(const int* g, const int* b, const u8* a) {{',
            f"  return launch<k{number}::{source.entry}>(k{number}::{source.entry}, g, b, a);",
            "}",
            *(f"#undef {name}" for name in sorted(names)),
        ]
    )


def _defined(text: str) -> set[str]:
    return set(re.findall(r"^ *#define (\w+)", text, re.MULTILINE))


class HostBuild:
    """Kernels by key as functions of the host. Raises CalledProcessError with the compiler's.

    `define`: what the sources find defined, as for a device of another kind.
    """

    def __init__(self, keys: Sequence[KernelKey], folder: Path, define: str = "") -> None:
        define = define and f"#define {define}\n"
        unique = sorted(set(keys))
        parts = [unique[i : i + PER_LIBRARY] for i in range(0, len(unique), PER_LIBRARY)]
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda part: self._library(part, folder, define), parts))
        self._functions = {
            key: self._function(library, number)
            for library, part in zip(made, parts, strict=True)
            for number, key in enumerate(part)
        }
        self._libraries = {
            key: library for library, part in zip(made, parts, strict=True) for key in part
        }
        self.late: Sequence[tuple[int, bytes, bytes]] = ()
        """What the launch before the next one writes: where, what was there, what it writes."""

    @staticmethod
    def _library(keys: Sequence[KernelKey], folder: Path, define: str) -> ctypes.CDLL:
        prelude = (HERE / "emulated.h").read_text("utf-8") + "\ntypedef unsigned char u8;\n"
        prelude += define
        text = prelude + "\n".join(_namespace(n, key) for n, key in enumerate(keys))
        target = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:24]}.so"
        if not target.exists():
            folder.mkdir(parents=True, exist_ok=True)
            source = target.with_suffix(".cpp")
            source.write_text(text, "utf-8")
            # names of the hardware's: its fma is the instruction where there is one
            command = [host_compiler() or "g++", *OPTIONS, "-march=native", "-w"]
            subprocess.run(
                [*command, str(source), "-o", str(target)],
                check=True,
                capture_output=True,
                timeout=600,
            )
        return ctypes.CDLL(str(target))

    @staticmethod
    def _function(library: ctypes.CDLL, number: int):
        found = library[f"run_{number}"]
        found.argtypes = [ctypes.POINTER(ctypes.c_int)] * 2 + [ctypes.c_char_p]
        found.restype = ctypes.c_char_p
        return found

    def __call__(self, runtime: SimRuntime, device: int, launch: Launch) -> None:
        """The kernel of a launch, at once."""
        three = ctypes.c_int * 3
        self._set_late(self._libraries[launch.kernel])
        problem = self._functions[launch.kernel](
            three(*launch.grid), three(*launch.block), launch.args
        )
        if problem:
            raise AssertionError(problem.decode())

    def _set_late(self, library: ctypes.CDLL) -> None:
        count = len(self.late)
        places = (ctypes.c_void_p * count)(*(at for at, _, _ in self.late))
        stale = (ctypes.c_char_p * count)(*(old for _, old, _ in self.late))
        fresh = (ctypes.c_char_p * count)(*(new for _, _, new in self.late))
        sizes = (ctypes.c_size_t * count)(*(len(new) for _, _, new in self.late))
        library.set_late(count, places, stale, fresh, sizes)

    def load(self, key: KernelKey) -> None:
        """Everything is there already."""
        assert key in self._functions

    def runtime(self, hardware: SimHardware | None = None) -> SimRuntime:
        """A simulated accelerator whose kernels are these."""
        kernels = dict.fromkeys({key.name for key in self._functions}, self)
        return SimRuntime(hardware or SimHardware(), host_kernels=kernels, pointers=pointers)
