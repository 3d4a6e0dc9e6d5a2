"""Thinking and answer in pieces of text, against the split of the entire text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.llama.reasoning import ReasoningTags, split_reasoning
from moeedge.ui.chat.stream import FoldedThinking, ThinkingSplitter

TAGS = ReasoningTags("<think>", "</think>")
WORDS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", " ", "\n", "<", "think>"]), max_size=8
)


@pytest.mark.parametrize("is_open", [False, True])
@given(words=WORDS, cuts=st.lists(st.integers(1, 4), max_size=30))
def test_pieces_are_split_as_the_entire_text(is_open: bool, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    splitter = ThinkingSplitter(TAGS, is_open=is_open)
    parts, at = [], 0
    for cut in [*cuts, len(text)]:
        parts += splitter.feed(text[at : at + cut])
        at += cut
    parts += splitter.feed("", is_last=True)
    assert "".join(part.text for part in parts) == text
    thinking = "".join(part.text for part in parts if part.is_thinking)
    answer = "".join(part.text for part in parts if not part.is_thinking)
    starts = text.lstrip().startswith(TAGS.start)
    if starts or is_open:
        assert answer == text.partition(TAGS.end)[2]
        if starts and not is_open:
            assert split_reasoning(text, TAGS).content == answer.lstrip()
    else:
        assert (thinking, answer) == ("", text)


def test_a_model_that_does_not_think() -> None:
    splitter = ThinkingSplitter(None, is_open=True)
    assert [part for part in splitter.feed("<think>a</think>")] == [(False, "<think>a</think>")]


def fed(folded: FoldedThinking, piece: str, *, is_last: bool = False) -> str:
    return "".join(part.text for part in folded.feed(piece, is_last=is_last))


def test_folded_thinking_is_counted() -> None:
    n_tokens = 0
    folded = FoldedThinking(TAGS, lambda: n_tokens)
    assert folded.line == ""
    n_tokens = 120
    assert fed(folded, "<think>\nhm") == ""
    assert folded.is_thinking and folded.line == "thinking... 0 s, 120 tokens"
    n_tokens = 150
    assert fed(folded, "</think>\n\nIt is") == "It is"
    n_tokens = 200
    assert fed(folded, " \n\n4", is_last=True) == " \n\n4"
    assert folded.line == "thought for 0 s, 150 tokens"


def test_before_the_first_token_there_is_no_line() -> None:
    """The prompt has ended with the start tag, and is still being read."""
    folded = FoldedThinking(TAGS, lambda: 1, is_open=True)
    assert folded.is_thinking and folded.line == ""
    fed(folded, "hm")
    assert folded.line.startswith("thinking... 0 s, 1 token")


def test_empty_thinking_leaves_no_line() -> None:
    """As of models that are told not to think."""
    folded = FoldedThinking(TAGS, lambda: 3)
    assert fed(folded, "<think>\n\n</think>\n\n4") == "4"
    assert folded.line == ""


def test_an_answer_without_thinking_is_untouched() -> None:
    folded = FoldedThinking(TAGS, lambda: 3)
    assert fed(folded, "\n <") + fed(folded, "b>", is_last=True) == "\n <b>"
    assert folded.line == ""
