"""Compiling modules of kernels to machine code, with a cache of object files on disk.

The name of a cached object is a hash of the sources that emit kernels, of what is emitted, of the
processor and of LLVM's version, so an entry never goes stale and a hit costs no emitting.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
from attrs import frozen
from llvmlite import ir

from strata_core.errors import Degradation
from strata_core.kernels.code_cache import CodeCache
from strata_core.kernels.cpu.target import Target

Report = Callable[[Degradation], None]


@frozen(eq=False)
class Code:
    """Compiled functions; their addresses hold as long as this object lives."""

    engine: llvm.ExecutionEngine

    def address(self, name: str) -> int:
        """Address of a function."""
        found: int = self.engine.get_function_address(name)
        if not found:
            raise KeyError(f"the compiled module has no function {name}")
        return found


class Compiler:
    """Compiles for one target; `folder` is the cache or None. Used by one thread at a time.

    A cache that cannot be read or written is reported once to `degrade`; everything still works.
    """

    def __init__(self, target: Target, folder: Path | None, degrade: Report) -> None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        llvm.initialize_native_asmparser()
        self.target = target
        self.compiled = 0
        self._cache = CodeCache(folder, degrade)

    def obtain(self, identity: str, emit: Callable[[ir.Module], None]) -> Code:
        """Machine code of the module that `emit` fills; `identity` says what that is."""
        key = self._key(identity)
        found = self._cache.read(key)
        if found is None:
            module = self.module(identity)
            emit(module)
            found = self._object(module)
            self._cache.write(key, found)
        return self._load(found)

    def compile(self, module: ir.Module) -> Code:
        """Machine code of a module, without the cache."""
        return self._load(self._object(module))

    def module(self, name: str) -> ir.Module:
        """An empty module for the target."""
        module = ir.Module(name)
        module.triple = self.target.triple
        return module

    def _object(self, module: ir.Module) -> bytes:
        self.compiled += 1
        machine = _machine(self.target, jit=True)
        made: bytes = machine.emit_object(_optimised(str(module), machine))
        return made

    def _load(self, data: bytes) -> Code:
        machine = _machine(self.target, jit=True)
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        return Code(engine)

    def _key(self, identity: str) -> str:
        target = self.target
        parts = (identity, target.variant, target.triple, target.cpu, target.feature_string)
        return CodeCache.key(*parts, llvmlite.__version__, sources_hash())


@cache
def sources_hash() -> str:
    """A hash of all that decides what is emitted: this package and the contract's constants."""
    here = Path(__file__).parent
    shared = [here.parent / f"{name}.py" for name in ("exact", "exact_math", "exact_quant")]
    types = here.parents[1] / "checkpoint" / "types.py"
    digest = hashlib.sha256()
    for path in [*sorted(here.glob("*.py")), *shared, types]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def assembly(module: ir.Module, target: Target) -> str:
    """The optimised assembly of a module, for any target that LLVM knows; nothing is loaded."""
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    llvm.initialize_native_asmparser()
    machine = _machine(target, jit=False)
    listing: str = machine.emit_assembly(_optimised(str(module), machine))
    return listing


def _machine(target: Target, *, jit: bool) -> llvm.TargetMachine:
    made = llvm.Target.from_triple(target.triple)
    return made.create_target_machine(
        cpu=target.cpu, features=target.feature_string, opt=3, jit=jit
    )


def _optimised(text: str, machine: llvm.TargetMachine) -> llvm.ModuleRef:
    module = llvm.parse_assembly(text)
    module.verify()
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(module, builder)
    return module
