"""The simulator's verbs of streams and events, and the times that timed events tell."""

from __future__ import annotations

from strata_core.testing.sim.account import StreamAccount
from strata_core.testing.sim.failure import BAD_CAPTURE, BUSY, INVALID_HANDLE, broken
from strata_core.testing.sim.memory_verbs import MemoryVerbs
from strata_core.testing.sim.verbs import verb
from strata_core.testing.sim.work import Event, Stream, Work


class EventVerbs(MemoryVerbs):
    """Streams and events."""

    @verb
    def create_stream(self, device: int) -> int:
        """A stream."""
        self.need_context(device, "create_stream")
        stream = self.queues.new_stream(device, self.label)
        self.account.streams[stream.name] = StreamAccount()
        return stream.handle

    @verb
    def destroy_stream(self, stream: int) -> None:
        """Free a stream that is done."""
        found = self.queues.stream(stream, "destroy_stream")
        outside_capture(found, "destroy_stream")
        if not self.queues.idle(found):
            raise broken(
                f"destroy_stream: stream {found.name} still has a {found.queue[0].what} to do",
                BUSY,
                "a stream is destroyed when its work is done",
                "synchronize it first",
            )
        del self.queues.streams[stream]

    @verb
    def create_event(self, device: int) -> int:
        """An event, not recorded yet."""
        self.need_context(device, "create_event")
        return self.queues.new_event(device).handle

    @verb
    def create_timed_event(self, device: int) -> int:
        """An event whose time by the accounting clock can be asked for."""
        self.need_context(device, "create_timed_event")
        return self.queues.new_event(device, timed=True).handle

    @verb
    def elapsed(self, first: int, last: int) -> float:
        """By the accounting clock."""
        times = []
        for handle in (first, last):
            event = self.queues.event(handle, "elapsed")
            if not event.timed or event.mark is None or not event.mark.done:
                raise broken(
                    f"elapsed: event {handle:#x} tells no time",
                    INVALID_HANDLE,
                    "it was made without timing, or has not happened",
                    "use timed events, once they have happened",
                )
            times.append(event.mark.ends)
        return times[1] - times[0]

    @verb
    def destroy_event(self, event: int) -> None:
        """Free an event."""
        del self.queues.events[self.queues.event(event, "destroy_event").handle]

    @verb
    def record(self, event: int, stream: int) -> None:
        """Mark a place in a stream."""
        found, on = self.queues.event(event, "record"), self.queues.stream(stream, "record")
        outside_capture(on, "record")
        if found.device != on.device:
            raise broken(
                f"record: an event of device {found.device} on a stream of device {on.device}",
                INVALID_HANDLE,
                "an event is recorded on its own device",
                "create the event on the stream's device",
            )
        found.mark = Work("mark of an event", on)
        self.queues.put(found.mark)

    @verb
    def wait(self, stream: int, event: int) -> None:
        """Order what comes behind an event's mark."""
        on, found = self.queues.stream(stream, "wait"), self.queues.event(event, "wait")
        outside_capture(on, "wait")
        self.account.streams[on.name].event_waits += 1
        if found.mark is not None:
            self.queues.put(Work("wait for an event", on, needs=found.mark))

    @verb
    def finished(self, event: int) -> bool:
        """Whether an event has happened: work that nothing else needs is done at the second asking.

        So who asks once learns the worst, and who asks until it is so does not ask forever.
        """
        found = self.queues.event(event, "finished")
        self.account.polls += 1
        happened = self._has_happened(found)
        if happened and found.mark is not None:
            self.queues.waited(found.mark.ends)
        return happened

    @verb
    def synchronize(self, stream: int) -> None:
        """Do what a stream has left."""
        found = self.queues.stream(stream, "synchronize")
        outside_capture(found, "synchronize")
        self.account.streams[found.name].synchronizes += 1
        self.queues.drain(found)
        self.queues.waited(found.ends)

    def _has_happened(self, event: Event) -> bool:
        mark = event.mark
        if mark is None or mark.done:
            return True
        self.queues.settle(mark.stream)
        if not mark.done and self.queues.awaits_thread(mark):
            return False
        if mark.done or event.asked is not mark:
            event.asked = mark
            return mark.done
        self.queues.finish(mark)
        return True


def outside_capture(stream: Stream, verb: str) -> None:
    """Refuse a verb that a capture does not take."""
    if stream.recorded is not None:
        raise broken(
            f"{verb}: stream {stream.name} is in a capture",
            BAD_CAPTURE,
            "a capture holds copies, fills and kernels",
            "end the capture first",
        )
