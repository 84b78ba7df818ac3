"""Rounds and prompts that did not come to their end: their errors, and waiting for what is left."""

from __future__ import annotations

from strata_core.cache.waiting import happens
from strata_core.errors import DeviceError, EngineError, StrataError
from strata_core.interfaces import Expert
from strata_core.kernels.cpu.hand_over import TIMED_OUT
from strata_core.kernels.device.rounds import Maker


def stopped(maker: Maker, dispatch: str) -> StrataError:
    """Of a round that a launch or a wait ended; the driver is asked for its own error."""
    kind, label = (int(v) for v in maker.hand.failure)
    routed = maker.model.routed
    said = maker.runtime.take_error() or _said_of_the_stream(maker)
    where = f"layer {routed[label]}" if label < len(routed) else "its end"
    why = "the driver did not launch a graph"
    if kind == TIMED_OUT:
        why = f"the device did not answer within {maker.hand.bound:g} s"
    return EngineError(
        f"a round stopped at {where} in {dispatch} mode",
        f"{why}; the driver says: {said or 'nothing'}",
        "if it happens again, look at the system's log for errors of the device",
    )


def _said_of_the_stream(maker: Maker) -> str | None:
    """What the driver says of the round's work, where none of it was waited for; at once."""
    runtime = maker.runtime
    try:
        event = runtime.create_event(maker.device)
        try:
            runtime.record(event, maker.stream)
            runtime.finished(event)
        finally:
            runtime.destroy_event(event)
    except DeviceError as error:
        runtime.take_error()
        return error.why
    return None


def wait_until_idle(maker: Maker) -> None:
    """After a round that failed: wait until devices are idle, at most as long as for a round.

    Raises EngineError, DeviceError; then they may be busy still.
    """
    runtime, bound = maker.runtime, maker.hand.bound
    runtime.take_error()  # the failed round's
    streams = [(maker.device, maker.stream), *((h.device, h.stream) for h in maker.helpers)]
    for device, stream in streams:
        event = runtime.create_event(device)
        try:
            runtime.record(event, stream)
            if not happens(runtime, event, bound):
                raise EngineError(
                    f"{runtime.label}{device} is still busy with a round that failed",
                    f"it did not come to an end within {bound:g} s",
                    "start again",
                )
        finally:
            runtime.destroy_event(event)


def not_at_rest(reading: Expert | None, seconds: float) -> StrataError:
    """Of a prompt whose slots others still use; the next prompt looks again.

    `reading` is the expert that the source still reads.
    """
    why = f"the copies did not come to an end within {seconds:g} s"
    remedy = "try again; if it stays so, look at the system's log for errors of the device"
    if reading is not None:
        why = f"the source did not read {reading} within {seconds:g} s"
        remedy = "try again; if it stays so, check the disk that the model's files are on"
    return EngineError(
        "experts are still on their way into the cache, whose slots a prompt needs", why, remedy
    )
