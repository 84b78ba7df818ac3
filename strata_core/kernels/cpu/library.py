"""All steps by name: which emitter makes a step, compiled once for each set of parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from attrs import frozen
from llvmlite import ir

from strata_core.kernels.cpu import (
    attention,
    elementwise,
    expert_plan,
    hand_over,
    linear,
    mailbox,
    page_steps,
)
from strata_core.kernels.cpu.crew import emit_crew
from strata_core.kernels.cpu.jit import Code, Compiler
from strata_core.kernels.cpu.target import Target
from strata_core.kernels.exact_quant import TWO_PLANES

Parameter = str | int | tuple[str, ...]


@frozen(order=True)
class Step:
    """A step and what it is compiled for: types, a KV type, a head size, last "tiles" if so."""

    name: str
    parameters: tuple[Parameter, ...] = ()


def _shared(module: ir.Module, target: Target, largest: int) -> None:
    """The steps that depend on nothing."""
    hand_over.emit_launch(module)
    hand_over.emit_wait(module, target)
    hand_over.emit_tally(module)
    hand_over.emit_answer(module)
    hand_over.emit_stamp(module, target)
    mailbox.emit_ask(module)
    page_steps.emit_advise(module)
    mailbox.emit_take(module, target)
    elementwise.emit_rms_norm(module)
    elementwise.emit_rope(module)
    elementwise.emit_add(module)
    elementwise.emit_silu_mul(module)
    elementwise.emit_gate_add(module)
    elementwise.emit_combine(module)
    elementwise.emit_gather(module)
    elementwise.emit_route(module)
    elementwise.emit_quantise(module, "quantise", largest, "rows")
    elementwise.emit_quantise(module, "quantise_tiles", largest, "tiles")
    expert_plan.emit_plan(module)


SHARED = frozenset(
    {
        "rms_norm",
        "rope",
        "add",
        "silu_mul",
        "gate_add",
        "combine",
        "gather",
        "route",
        "quantise",
        "quantise_tiles",
        "plan",
        "launch",
        "wait",
        "tally",
        "answer",
        "stamp",
        "ask",
        "take",
        "advise",
    }
)


def _emit(module: ir.Module, target: Target, step: Step, largest: int) -> None:
    p = step.parameters
    layout: elementwise.Layout = "tiles" if p and p[-1] == "tiles" else "rows"
    makers: dict[str, Callable[[], None]] = {
        "linear": lambda: linear.emit_linear(module, target, str(p[0]), layout),
        "embed": lambda: linear.emit_embed(module, target, str(p[0])),
        "gate_up": lambda: linear.emit_gate_up(
            module, target, (str(p[0]), str(p[1]), str(p[2])), largest, layout
        ),
        "down": lambda: linear.emit_down(module, target, str(p[0]), layout),
        "kv_append": lambda: attention.emit_kv_append(module, target, str(p[0])),
        "attention": lambda: attention.emit_attention(module, target, str(p[0]), int(str(p[1]))),
        "whole_attention": lambda: attention.emit_whole_attention(
            module, target, str(p[0]), int(str(p[1]))
        ),
        "merge": lambda: attention.emit_merge(module, int(str(p[0]))),
    }
    makers[step.name]()


class Library:
    """Compiled steps. `largest` is the largest |q| of an activation. Used by one thread."""

    def __init__(self, compiler: Compiler, largest: int = TWO_PLANES) -> None:
        self._compiler = compiler
        self._largest = largest
        self._codes: dict[Step, Code] = {}

    @property
    def compiler(self) -> Compiler:
        """What compiles them."""
        return self._compiler

    @property
    def target(self) -> Target:
        """What the steps are compiled for."""
        return self._compiler.target

    @property
    def steps(self) -> tuple[Step, ...]:
        """What has been mentioned so far; steps that depend on nothing are one, "shared"."""
        return tuple(self._codes)

    def address(self, step: Step) -> int:
        """Address of a step's function, compiled or read from the cache at its first mention."""
        key = Step("shared") if step.name in SHARED else step
        if key not in self._codes:
            identity = "_".join([key.name, *map(str, key.parameters), str(self._largest)])
            self._codes[key] = self._compiler.obtain(
                identity, lambda module: self._emit(module, key)
            )
        return self._codes[key].address(step.name)

    def runner(self) -> Callable[[int, int, int, int], None]:
        """Runs a step by its address: `(function, args, begin, end)`, on the calling thread.

        Floats are as docs/arithmetic.md wants them, and the interpreter's lock is not held.
        """
        key = Step("crew")
        if key not in self._codes:
            self._codes[key] = self._compiler.obtain(
                "crew", lambda module: emit_crew(module, self.target)
            )
        kind = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)
        made: Callable[[int, int, int, int], None] = kind(self._codes[key].address("run_step"))
        return made

    def _emit(self, module: ir.Module, key: Step) -> None:
        if key.name == "shared":
            _shared(module, self.target, self._largest)
        else:
            _emit(module, self.target, key, self._largest)
