"""How many copies bring a blob, and that they are its bytes and no others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from strata_core.cache.runs import runs
from strata_core.interfaces import BlobLayout, BlobPart

sizes, gaps = st.integers(1, 50), st.integers(0, 2)


@given(st.tuples(sizes, sizes, sizes), st.tuples(gaps, gaps), st.tuples(gaps, gaps))
def test_each_byte_of_each_part_goes_to_its_place_alone(sizes, inside, outside) -> None:
    """Distances of parts in the blob and in memory are drawn apart, often equal."""
    offsets = [0, sizes[0] + inside[0], sizes[0] + inside[0] + sizes[1] + inside[1]]
    places = [1000, 1000 + sizes[0] + outside[0]]
    places.append(places[1] + sizes[1] + outside[1])
    gate, up, down = zip(offsets, sizes, strict=True)
    parts = (
        BlobPart("gate", "Q8_0", 1, 1, *gate),
        BlobPart("up", "Q8_0", 1, 1, *up),
        BlobPart("down", "Q8_0", 1, 1, *down),
    )
    layout = BlobLayout(parts, offsets[2] + sizes[2])
    found = runs(layout, places)
    copied = {(o + i, a + i) for o, a, n in found for i in range(n)}
    assert sum(n for *_, n in found) == len(copied)
    assert copied == {
        (o + i, a + i) for o, a, n in zip(offsets, places, sizes, strict=True) for i in range(n)
    }
    together = [a == b == 0 for a, b in zip(inside, outside, strict=True)]
    assert len(found) == 3 - sum(together)
