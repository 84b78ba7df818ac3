"""Memory that is page-locked up to the middle of an expert: prompts borrow all the same.

No copy engine may cross the end of a registration, so what lies across it goes through a buffer.
"""

from __future__ import annotations

from pathlib import Path

import strata_core
from strata_core.engine.messages import Finished
from strata_core.testing.tiny import tiny_hyper, write_tiny_gguf

PROMPT = tuple((7 * k + 5) % 60 + 3 for k in range(70))


def tokens(model: Path, **options: object) -> tuple[int, ...]:
    """What comes after a prompt that is computed in chunks, twice: slots are lent twice."""
    given = {"threads": 1, "max_context": 96, **options}
    found: tuple[int, ...] = ()
    with strata_core.load(model, learn=False, **given) as running:
        for _ in range(2):
            *_, done = running.generate(PROMPT, max_tokens=4, ignore_eos=True)
            assert isinstance(done, Finished)
            found += tuple(done.token_ids)
    return found


def test_prompts_with_experts_across_the_end_of_what_is_page_locked(tmp_path: Path) -> None:
    model = tmp_path / "tiny.gguf"
    write_tiny_gguf(model, hyper=tiny_hyper(layers=2, context=128), seed=3)
    wanted = tokens(model, backend="cpu", source="mmap")
    resident = {"backend": "sim", "source": "sliced-pinned", "adapt_every": 0}
    for kib in (100, 460, 820):  # an expert has 108 KiB
        options = {**resident, "expert_cache": 8, "complement_pin_gib": kib / 2**20}
        assert tokens(model, **options) == wanted, f"{kib} KiB"
