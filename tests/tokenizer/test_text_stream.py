"""Streams show whole characters and nothing of a stop string, however tokens cut the text."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strata_core.errors import UsageError
from strata_core.tokenizer.stream import TextStream


def run(pieces: list[bytes], stop: list[str]) -> tuple[list[str], TextStream]:
    stream = TextStream(lambda i: pieces[i], stop)
    shown = [stream.push(i) for i in range(len(pieces))]
    return [*shown, stream.flush()], stream


def cut(data: bytes, places: list[int]) -> list[bytes]:
    ends = [0, *sorted(p % (len(data) + 1) for p in places), len(data)]
    return [data[a:b] for a, b in pairwise(ends)]


def oracle(text: str, stop: list[str]) -> tuple[str, str | None]:
    """The first stop string to be complete when the text grows character by character."""
    for end in range(1, len(text) + 1):
        done = [s for s in stop if text[:end].endswith(s)]
        if done:
            longest = max(done, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(data=st.binary(max_size=40), places=st.lists(st.integers(0, 99), max_size=12))
@example(data="aé日😀".encode(), places=list(range(11)))
@example(data=b"\xf0\x9f\x98", places=[1, 2])
@example(data=b"\xff\xfe\x80", places=[1, 2])
def test_any_bytes_in_any_pieces(data: bytes, places: list[int]) -> None:
    shown, stream = run(cut(data, places), [])
    assert "".join(shown) == data.decode("utf-8", "replace")
    assert not stream.finished


@given(text=st.text(max_size=20), places=st.lists(st.integers(0, 99), max_size=20))
def test_valid_text_never_shows_half_a_character(text: str, places: list[int]) -> None:
    shown, _ = run(cut(text.encode(), places), [])
    so_far = ""
    for part in shown:
        so_far += part
        assert text.startswith(so_far)


LETTERS = st.text(st.sampled_from("abé"), max_size=24)
STOPS = st.lists(st.text(st.sampled_from("abé"), min_size=1, max_size=4), max_size=4)


@given(text=LETTERS, stop=STOPS, places=st.lists(st.integers(0, 99), max_size=24))
@example(text="aabb", stop=["abc", "bb"], places=[1, 2, 3])
@example(text="abab", stop=["b", "ab"], places=[2])
def test_stop_strings(text: str, stop: list[str], places: list[int]) -> None:
    shown, stream = run(cut(text.encode(), places), stop)
    expected, by = oracle(text, stop)
    assert "".join(shown) == expected
    assert stream.finished is (by is not None)


@given(text=LETTERS, stop=STOPS, places=st.lists(st.integers(0, 99), max_size=24))
def test_nothing_of_a_stop_string_is_ever_shown(
    text: str, stop: list[str], places: list[int]
) -> None:
    expected, _ = oracle(text, stop)
    so_far = ""
    for part in run(cut(text.encode(), places), stop)[0]:
        so_far += part
        assert expected.startswith(so_far)


def test_text_is_held_back_no_longer_than_needed() -> None:
    stream = TextStream(lambda i: [b"hel", b"lo ", b"wor", b"th"][i], ["world"])
    assert [stream.push(i) for i in range(4)] == ["hel", "lo ", "", "worth"]


def test_after_a_stop_nothing_is_shown() -> None:
    stream = TextStream(lambda _: b"ab", ["b"])
    assert stream.push(0) == "a"
    assert stream.finished
    assert stream.push(0) == stream.flush() == ""


@pytest.mark.parametrize("stop", ["", "x" * 70_000])
def test_stop_strings_that_cannot_be_used(stop: str) -> None:
    with pytest.raises(UsageError, match="stop string"):
        TextStream(lambda _: b"", [stop])
