"""What the simulated machine has, and which of its verbs are to fail."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from attrs import field, frozen

from strata_core.runtime import WaitClock

MIB = 1 << 20
GIB = 1 << 30

_CLOCK = WaitClock(ticks=1e9)

Aliases = Literal["same", "apart", "none"]

VERBS = (
    "devices", "open_context", "memory", "take_error", "alloc", "free", "host_alloc", "host_free",
    "register", "unregister", "alias", "create_stream", "destroy_stream", "create_event",
    "destroy_event", "record", "wait", "finished", "synchronize", "copy", "fill", "load", "launch",
    "begin_capture", "end_capture", "destroy_graph", "launch_graph", "graph_launcher", "close",
    "create_timed_event", "elapsed",
)  # fmt: skip
"""All verbs that are counted and can be made to fail; "graph_launcher" is a call through it."""

REFUSABLE = frozenset({"open_context", "alloc", "host_alloc", "register"})
"""The verbs that raise Refused where memory is short."""


def _positive(_: object, __: object, sizes: tuple[int, ...]) -> None:
    if not sizes or min(sizes) <= 0:
        raise ValueError("a simulated machine has one device or more, each with memory")


@frozen(kw_only=True)
class SimHardware:
    """The facts of a simulated machine. Sizes are bytes.

    `vram` is the memory of each device. `pin_budget` is what contexts, pinned allocations and
    registrations can hold together (None: any amount), `context_pins` what a context takes of it.
    `aliases` says where devices find page-locked memory: at the "same" address as the CPU; "apart",
    each range in a place of its own where the CPU finds nothing; or nowhere ("none").
    `link` is what the link of each device is said to move, in bytes a second, `launch_s` and
    `block_s` are what a launch and each of its blocks take: the accounting clock goes by them,
    which timed events tell; nothing really waits.
    `clock` is what kernels bound their waits by; it counts nanoseconds where it ticks at all.
    `refusal_line` is what the kernel logs when the budget runs out; a test gives the line of the
    driver that it stands for. `matrix`: whether devices say that they have matrix units, so that
    prompts go by the kernels for these, whose host functions are the same.
    """

    vram: tuple[int, ...] = field(default=(8 * GIB,), validator=_positive)
    pin_budget: int | None = None
    context_pins: int = 64 * MIB
    aliases: Aliases = "same"
    link: float = 25e9
    clock: WaitClock = _CLOCK
    launch_s: float = 5e-6
    block_s: float = 1e-7
    refusal_line: str = "sim: cannot pin host memory: -122"
    matrix: bool = False


def _known(_: object, __: object, refuse: Mapping[str, object]) -> None:
    unknown = sorted(refuse.keys() - set(VERBS))
    if unknown:
        raise ValueError(f"no such verbs: {', '.join(unknown)}")


@frozen
class SimFaults:
    """Calls that fail: of each verb the n-th call, counted from 1, or several.

    A verb that can be refused raises Refused, any other DeviceError; what it was to do is not done
    and the error stays pending. Two of them fail in their own way: a call through `graph_launcher`
    returns nonzero, and `close` frees everything before it raises.

    `lose`: with that call a kernel goes wrong, as where it reads an illegal address, and the
    devices are lost: the call fails, and after it every verb but `take_error` and `close`.
    """

    refuse: Mapping[str, int | Collection[int]] = field(factory=dict, validator=_known)
    lose: Mapping[str, int] = field(factory=dict, validator=_known)

    def hits(self, verb: str, call: int) -> bool:
        """Whether the `call`-th call of `verb` is to fail."""
        chosen = self.refuse.get(verb, ())
        return call == chosen if isinstance(chosen, int) else call in chosen

    def loses(self, verb: str, call: int) -> bool:
        """Whether the devices are lost with the `call`-th call of `verb`."""
        return self.lose.get(verb) == call
