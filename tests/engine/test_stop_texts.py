"""Texts that end an answer, however tokens and pieces cut them."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine.answer import StopTexts
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig

texts = st.text("ab", max_size=12)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


def before(text: str, stop_texts: list[str]) -> str:
    """The text up to the first place where one of the texts begins among those that end first."""
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stop_texts if stop in text]
    if not ends:
        return text
    first_end = min(ends)[0]
    return text[: min(begin for end, begin in ends if end == first_end)]


@given(texts, stop_lists)
def test_text_is_cut_before_a_stop_text(text: str, stop_texts: list[str]) -> None:
    stops = StopTexts(stop_texts)
    visible, ended = "", False
    for character in text:  # one at a time: nothing comes after the end
        visible += stops.show(character)
        if stops.find(character.encode()):
            ended = True
            break
    visible += stops.show("", last=True)
    assert visible == before(text, stop_texts)
    assert ended == any(stop in text for stop in stop_texts)


@given(texts, stop_lists)
def test_nothing_of_a_stop_text_is_shown_early(text: str, stop_texts: list[str]) -> None:
    stops = StopTexts(stop_texts)
    assert stops.show(text) + stops.show("", last=True) == StopTexts(stop_texts).show(text, last=True)


def test_an_answer_ends_at_its_stop_text(tiny_moe: Path) -> None:
    sampling = SamplingConfig(temperature=0, grammar='root ::= "one two three four five"')
    with Session.open(EngineConfig(model=tiny_moe, draft="ngram", n_ctx=256, n_threads=1)) as session:
        prompt = list(b"one two three four five. Again: ")
        stopped = SamplingConfig(temperature=0, grammar=sampling.grammar, stop=("hree f", "never"))
        answer = session.generate(prompt, sampling=stopped)
        assert "".join(answer.pieces()) == answer.text == "one two t"
        assert answer.stop_reason == "stop"
        whole = b"".join(map(session.model.piece, answer.tokens)).decode()
        assert "hree f" in whole and "four" not in whole.removeprefix("one two three f")[3:]
        entire = session.generate(prompt, sampling=sampling)
        assert "".join(entire.pieces()) == "one two three four five" and entire.stop_reason == "eos"
