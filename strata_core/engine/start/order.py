"""The order of a start on devices: which phase comes when, for an allocator's policy.

A driver that pins little lets whoever comes first have it. Contexts of further devices and small
page-locked buffers cannot be done without, bulk memory can; so a policy may ask for them first.
"""

from __future__ import annotations

from typing import Literal

from attrs import frozen

from strata_core.interfaces import StartPolicy

Phase = Literal[
    "contexts",
    "small pins",
    "self-test",
    "dense weights",
    "embedding",
    "slots",
    "bulk",
    "expert cache",
    "helper caches",
    "bind",
]

DOING: dict[Phase, str] = {
    "contexts": "opening the context of {devices}",
    "small pins": "taking the small page-locked buffers",
    "self-test": "testing the kernels of {devices}",
    "dense weights": "placing the dense weights on {devices}",
    "embedding": "placing the token embedding",
    "slots": "taking the slots of {devices}",
    "bulk": "getting host memory for the experts",
    "expert cache": "filling the expert cache of {devices}",
    "helper caches": "filling the expert caches of {devices}",
    "bind": "making the model's rounds",
}
"""What a start is doing in each phase, for its errors."""


@frozen
class Step:
    """One phase, for the devices at these places of the devices in use (0 computes)."""

    phase: Phase
    devices: tuple[int, ...] = (0,)


def start_order(policy: StartPolicy, early: bool | None, helpers: int) -> tuple[Step, ...]:
    """The steps of a start with this many helpers, in order.

    `early` is STRATA_EARLY_REMOTE_CONTEXTS; None leaves it to the policy. Without it the first
    helper's context comes with the first device's, the others' when their caches are filled, and
    their self-test with those. Slots are taken before the bulk where the small buffers are, so that
    the bulk can leave out what they will hold.
    """
    first = policy.contexts_first if early is None else early
    numbers = tuple(range(1, helpers + 1))
    at_once = numbers if first else numbers[:1]
    late = tuple(number for number in numbers if number not in at_once)
    small = Step("small pins", (0, *numbers))
    tested = Step("self-test", (0, *at_once))
    placed = [tested, Step("dense weights"), Step("embedding"), Step("slots", (0, *at_once))]
    steps = [Step("contexts", (0,)), *(Step("contexts", (number,)) for number in at_once)]
    bulk = Step("bulk")
    steps += [small, *placed, bulk] if policy.small_pins_first else [bulk, small, *placed]
    steps.append(Step("expert cache"))
    steps += [Step("contexts", (number,)) for number in late]
    if numbers:
        steps.append(Step("helper caches", numbers))
    return (*steps, Step("bind"))
