"""Suites that a plugin's author runs on his own part, with public interfaces only.

Subclass a suite in a test module and supply what is to be tested; pytest does the rest:

    from strata_core.testing.conformance import SourceSuite

    class TestMine(SourceSuite):
        def make(self, context):
            return MySource(context.experts, context.allocator)

What a part can do beyond the least is found on the object itself; the tests of an ability that it
does not have are skipped with the reason. Needs the extra `conformance` (pytest and hypothesis).
"""

import pytest

pytest.register_assert_rewrite(
    "strata_core.testing.conformance.allocator",
    "strata_core.testing.conformance.backend",
    "strata_core.testing.conformance.memory",
    "strata_core.testing.conformance.runtime",
    "strata_core.testing.conformance.runtime_base",
    "strata_core.testing.conformance.runtime_memory",
    "strata_core.testing.conformance.source",
    "strata_core.testing.conformance.source_machine",
)

from strata_core.testing.conformance.allocator import AllocatorSuite  # noqa: E402
from strata_core.testing.conformance.backend import BackendSuite  # noqa: E402
from strata_core.testing.conformance.source import SourceSuite  # noqa: E402

__all__ = ["AllocatorSuite", "BackendSuite", "SourceSuite"]
