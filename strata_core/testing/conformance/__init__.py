"""Suites that a plugin's author runs on his own part, with public interfaces only."""

import pytest

pytest.register_assert_rewrite(
    "strata_core.testing.conformance.runtime",
    "strata_core.testing.conformance.runtime_base",
    "strata_core.testing.conformance.runtime_memory",
)
