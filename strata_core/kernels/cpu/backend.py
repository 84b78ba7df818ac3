"""The backend record `cpu`: compiled kernels that keep docs/arithmetic.md, run by our own pool."""

from __future__ import annotations

from math import floor

from attrs import evolve

from strata_core.builtin import CPU
from strata_core.errors import Degradation
from strata_core.interfaces import (
    Backend,
    BackendContext,
    Capabilities,
    Executor,
    ExpertFiles,
    Limits,
    Progress,
    Source,
    Weights,
)
from strata_core.kernels.code_cache import kernel_folder
from strata_core.kernels.cpu.executor import CpuExecutor
from strata_core.kernels.cpu.jit import Compiler, Report
from strata_core.kernels.cpu.library import Library
from strata_core.kernels.cpu.pool import Pool
from strata_core.kernels.cpu.self_test import check_cpu_lane
from strata_core.kernels.cpu.target import Target, host_target
from strata_core.kernels.program import Program
from strata_core.machine import Machine


class CpuBackend:
    """A compiler, a library of kernels and a pool; executors share them."""

    def __init__(self, compiler: Compiler, threads: int, degrade: Report) -> None:
        self._library = Library(compiler)
        self._pool = Pool(compiler, threads)
        self._degrade = degrade
        self._exact = True

    @property
    def capabilities(self) -> Capabilities:
        """All types and KV types; dense weights stay as stored; exact unless a self-test failed."""
        return evolve(CPU, exact=self._exact, threads=self._pool.threads)

    def bind(
        self,
        program: Program,
        weights: Weights,
        experts: ExpertFiles,
        source: Source,
        limits: Limits,
        progress: Progress,
    ) -> Executor:
        """Lower the program, compile its kernels (or find them in the cache) and test them."""
        executor = CpuExecutor(program, weights, experts, source, limits, self._library, self._pool)
        progress.start("compiling kernels for this processor", 0)
        try:
            executor.prepare("single")
            executor.prepare("prompt")
        except BaseException:
            executor.close()
            raise
        finally:
            progress.done()
        check = check_cpu_lane(self._library, self._pool, self._library.steps)
        self._exact &= check.exact
        for item in check.degradations():
            self._degrade(item)
        return executor

    def close(self) -> None:
        """End the pool's threads; executors must be closed before."""
        self._pool.close()


def threads_of(machine: Machine) -> int:
    """Threads to compute with: physical cores, or what the cgroup grants if that is less."""
    granted = machine.cpu_quota if machine.cpu_quota else float(machine.physical_cores)
    return max(1, min(machine.physical_cores, floor(granted)))


def threads_for(context: BackendContext, *, spare: int = 0) -> int:
    """The threads that were asked for, else the usual number less `spare`, at least one.

    More than there are cores are a degradation: they wait for each other at the end of every step.
    """
    machine = context.machine
    asked: int | None = context.options.get("threads")
    if asked is None:
        return max(1, threads_of(machine) - spare)
    if asked > machine.logical_cores:
        context.degrade(
            Degradation(
                what=f"{asked} threads compute on {machine.logical_cores} cores",
                why="--threads asks for more than this process may use at once",
                cost="at the end of every step all wait for those that are not running",
                remedy=f"give --threads {threads_of(machine)}, or leave it out",
            )
        )
    return asked


def compiler_of(context: BackendContext) -> Compiler:
    """A compiler for this processor, with the cache that the context names."""
    target = host_target()
    _report_slow(target, context.degrade)
    return Compiler(target, kernel_folder(context.options), context.degrade)


def build(context: BackendContext) -> Backend:
    """The backend of the record `cpu`."""
    return CpuBackend(compiler_of(context), threads_for(context), context.degrade)


def _report_slow(target: Target, degrade: Report) -> None:
    if not target.has_fma:
        degrade(
            Degradation(
                what="kernels call the C library for every multiply-add",
                why=f"the processor ({target.cpu}) has no fused multiply-add instruction",
                cost="the same results, many times slower",
                remedy="run on a processor with FMA (x86-64 from 2013 on)",
            )
        )
    elif target.variant == "portable" and target.triple.startswith("x86_64"):
        degrade(
            Degradation(
                what="kernels use no vector instructions of their own",
                why=f"the processor ({target.cpu}) lacks AVX2 or half-precision conversion",
                cost="the same results, several times slower",
                remedy="run on a processor with AVX2 (x86-64 from 2013 on)",
            )
        )
