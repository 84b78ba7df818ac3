"""The source of docs/fetching-sources.md passes the suite for sources."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from strata_core.interfaces import Source, SourceContext
from strata_core.testing.conformance import SourceSuite

TEXT = (Path(__file__).parents[2] / "docs" / "fetching-sources.md").read_text("utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)


class TestTheDocumentsSource(SourceSuite):
    def make(self, context: SourceContext) -> Source:
        names: dict[str, Any] = {}
        exec(compile(CODE, "fetching-sources.md", "exec"), names)
        return names["RECORD"].build(context)


def test_it_is_short() -> None:
    assert len(CODE.splitlines()) <= 60
