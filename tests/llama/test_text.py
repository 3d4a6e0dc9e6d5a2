"""Streaming UTF-8: however the bytes are cut, the text is the same and no character is split."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from moeedge.llama.text import StreamDecoder


def feed(data: bytes, cuts: list[int]) -> list[str]:
    decoder = StreamDecoder()
    edges = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [*(decoder.feed(data[a:b]) for a, b in pairwise(edges)), decoder.flush()]


@given(st.text(), st.lists(st.integers(min_value=0)))
def test_any_split_gives_the_same_text(text: str, cuts: list[int]) -> None:
    pieces = feed(text.encode(), cuts)
    assert "".join(pieces) == text
    assert "�" in text or not any("�" in piece for piece in pieces)


@given(st.binary(), st.lists(st.integers(min_value=0)))
def test_invalid_bytes_become_replacement_characters(data: bytes, cuts: list[int]) -> None:
    assert "".join(feed(data, cuts)) == data.decode("utf-8", "replace")


def test_an_emoji_of_four_tokens_is_returned_at_once() -> None:
    decoder = StreamDecoder()
    assert [decoder.feed(bytes([byte])) for byte in "🦙".encode()] == ["", "", "", "🦙"]
    assert decoder.flush() == ""


def test_flush_resets_the_decoder() -> None:
    decoder = StreamDecoder()
    decoder.feed("é".encode()[:1])
    assert decoder.flush() == "�"
    assert decoder.feed(b"a") == "a"
