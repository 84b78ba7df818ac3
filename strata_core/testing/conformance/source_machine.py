"""Random orders of calls against a source, with a plain model of what must hold."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

from strata_core.checkpoint.open import Checkpoint
from strata_core.interfaces import Expert, View
from strata_core.testing.conformance.comparing import same_bytes

if TYPE_CHECKING:
    from strata_core.testing.conformance.source import SourceSuite

PAGE = 4096
MOST_HELD = 8
"""What a round of one layer may hold at a time; a source may count on it."""


class SourceMachine(RuleBasedStateMachine):
    """Announces, acquires, copies and releases; what is held is remembered."""

    def __init__(self, suite: SourceSuite, model: Checkpoint) -> None:
        super().__init__()
        self.suite, self.model = suite, model
        self.case = suite.build(model)
        self.held: list[tuple[Expert, View]] = []
        self.layer = next(iter(model.experts.layouts))

    @rule(data=st.data())
    def announce(self, data: st.DataObject) -> None:
        """A layer and some of its experts."""
        layer = data.draw(st.sampled_from(list(self.model.experts.layouts)), "layer")
        picks = data.draw(
            st.lists(st.integers(0, self.model.experts.count - 1), unique=True, max_size=4), "picks"
        )
        self.layer = layer
        self.case.source.begin_layer(layer, picks)

    @precondition(lambda self: len(self.held) < MOST_HELD)
    @rule(data=st.data())
    def acquire(self, data: st.DataObject) -> None:
        """An expert of the layer announced last."""
        index = data.draw(st.integers(0, self.model.experts.count - 1), "expert")
        expert = Expert(self.layer, index)
        view = self.case.source.view(expert)
        self.suite.compare(self.case, expert, view, "when it was acquired")
        self.held.append((expert, view))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        """Any expert that is held."""
        at = data.draw(st.integers(0, len(self.held) - 1), "which")
        expert, view = self.held.pop(at)
        self.suite.compare(self.case, expert, view, "until it was released")
        self.case.source.release(expert)

    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """Any expert, held or not."""
        expert = data.draw(st.sampled_from(self.case.experts()), "expert")
        size = self.case.blob_size(expert)
        buffer = bytearray(-(-size // PAGE) * PAGE + PAGE)
        pad = self.case.source.read_into(expert, memoryview(buffer))
        have = buffer[pad : pad + size]
        same_bytes(have, self.suite.raw(self.model, expert), f"a copy of {expert} is wrong")

    def teardown(self) -> None:
        """Give everything back."""
        for expert, view in self.held:
            self.suite.compare(self.case, expert, view, "to the end")
            self.case.source.release(expert)
        self.case.source.close()
        left = [r.purpose for r in self.case.allocator.outstanding.values()]
        assert not left, f"a closed source keeps {left}"
        self.case.allocator.close()


def run_machine(suite: SourceSuite, model: Checkpoint, examples: int = 25) -> None:
    """Run the state machine on sources that the suite makes over the model."""

    machine: Any = partial(SourceMachine, suite, model)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=20,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
