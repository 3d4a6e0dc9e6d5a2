"""Conversations: who speaks when, taking back, saving; from them to prompt tokens, and from tokens to text."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine.answer import StopTexts
from moeedge.engine.conversation import Conversation, Message, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EmptyPromptError, InputError
from moeedge.lab.widen.random_model import IM_START
from moeedge.llama.reasoning import MODEL_TEMPLATE, TemplateChoice
from tests.support.sessions import GREEDY


def talk() -> Conversation:
    conversation = Conversation("Be kind.")
    for question, answer in (("one?", "1"), ("two?\n", "zwei, 二 👍")):
        conversation.ask(question)
        conversation.answer(answer)
    return conversation


def test_messages_for_the_template_start_with_the_system_prompt() -> None:
    messages = talk().chat_messages()
    assert messages[0] == {"role": "system", "content": "Be kind."}
    assert [message["role"] for message in messages[1:]] == ["user", "assistant"] * 2
    assert Conversation("", [Message("user", "one?")]).chat_messages() == [{"role": "user", "content": "one?"}]


def test_questions_and_answers_take_turns() -> None:
    conversation = talk()
    with pytest.raises(ValueError, match="assistant"):
        conversation.answer("again")
    conversation.ask("three?")
    with pytest.raises(ValueError, match="user"):
        conversation.ask("four?")
    assert conversation.take_back() == "three?"
    assert conversation.take_back() is None
    assert conversation == talk()
    assert conversation.reopen() == "zwei, 二 👍"
    with pytest.raises(InputError, match="no answer"):
        conversation.reopen()
    conversation.answer("2")
    assert conversation.messages[-1] == Message("assistant", "2")
    conversation.clear()
    assert conversation == Conversation("Be kind.")
    for text in ("", "  \n"):
        with pytest.raises(EmptyPromptError):
            conversation.ask(text)


def test_what_is_saved_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    talk().save(path, model="target.gguf")
    assert Conversation.load(path) == talk()
    assert json.loads(path.read_text(encoding="utf-8"))["model"] == "target.gguf"
    assert [entry.name for entry in tmp_path.iterdir()] == ["talk.json"]  # nothing half-written is left


def document(**changes: Any) -> str:
    return json.dumps(json.loads(talk().to_json()) | changes)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{,", "line 1, column 2"),
        ("[]", "not a saved conversation"),
        (document(schema="other"), "not a saved conversation"),
        (document(version=2), "version 2, this program reads 1"),
        (document(messages={}), 'lacks "system"'),
        (document(system=None), 'lacks "system"'),
        (document(messages=[{"role": "assistant", "content": "hi"}]), "Message 1"),
        (document(messages=[{"role": "user", "content": "hi"}, {"role": "user", "content": "hi"}]), "Message 2"),
        (document(messages=[{"role": "user", "content": 1}]), "Message 1"),
    ],
)
def test_a_damaged_document_is_one_sentence(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "talk.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InputError) as caught:
        Conversation.load(path)
    assert message in caught.value.message
    assert str(path) in caught.value.message


def test_files_that_cannot_be_used(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="No such file"):
        Conversation.load(tmp_path / "none.json")
    with pytest.raises(InputError, match="Cannot write the conversation"):
        talk().save(tmp_path / "none" / "talk.json")
    with pytest.raises(InputError, match="Cannot write the conversation"):
        talk().save(tmp_path)
    assert list(tmp_path.parent.glob(".*.part")) == []
    (tmp_path / "link.json").symlink_to("linked.json")
    talk().save(tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink() and Conversation.load(tmp_path / "linked.json") == talk()
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8 text"):
        Conversation.load(tmp_path / "bytes.json")


@pytest.fixture(scope="module")
def opened(pair: tuple[Path, Path]) -> Iterator[Session]:
    with Session.open(EngineConfig(model=pair[0], draft=pair[1], n_ctx=512, n_threads=1)) as session:
        yield session


@pytest.fixture
def session(opened: Session) -> Iterator[Session]:
    yield opened
    opened.template = MODEL_TEMPLATE


def test_the_prompt_is_the_template_or_the_bare_text(session: Session) -> None:
    conversation = Conversation("Be kind.", [Message("user", "one"), Message("assistant", "two"), Message("user", "x")])
    text = (
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\none<|im_end|>\n<|im_start|>assistant\n"
        "two<|im_end|>\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
    )
    assert prompt_tokens(session.model, conversation) == session.model.tokenize(text)
    assert prompt_tokens(session.model, conversation, raw=True) == session.model.tokenize("onetwox")


def test_the_text_is_that_of_the_tokens(session: Session) -> None:
    prompt = session.model.tokenize("tell me")
    sampling = SamplingConfig(temperature=1.5, top_k=0, top_p=1, min_p=0, seed=1)
    answer = session.generate(prompt, n_predict=200, sampling=sampling)
    pieces = list(answer.pieces())
    data = b"".join(session.model.piece(token) for token in answer.tokens)
    assert answer.text == "".join(pieces) == data.decode("utf-8", "replace")
    assert "" not in pieces
    assert answer.stats.generated_tokens == len(answer.tokens)
    assert answer.stop_reason in ("length", "eos")


def test_characters_are_never_split_and_a_closed_answer_keeps_its_text(session: Session) -> None:
    answer = session.generate(session.model.tokenize("tell me"), n_predict=200, sampling=GREEDY)
    tokens = session.model.tokenize("a🦙b", add_special=False)
    assert len(tokens) == 6
    assert [answer.read([token]) for token in tokens] == ["a", "", "", "", "🦙", "b"]
    assert answer.read(tokens[1:3]) == "" and answer.read([], last=True) == "�"
    assert answer.stop_reason is None
    for _ in answer.pieces():
        if len(answer.text) > 14:
            break
    answer.close()
    assert answer.stop_reason == "interrupted"
    assert len(answer.text) > 14


def test_tags_of_reasoning_are_shown_also_where_they_are_control_tokens(session: Session) -> None:
    source = (
        "{% for m in messages %}"
        "{% if m.reasoning_content %}{{ '<|im_start|>' + m.reasoning_content + '</t>' }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    sampling = SamplingConfig(temperature=0, logit_bias=((IM_START, 1000.0),))
    texts = []
    for template in (TemplateChoice(), TemplateChoice(source)):
        session.template = template
        answer = session.generate(list(b"hello"), n_predict=2, sampling=sampling)
        texts.append("".join(answer.pieces()))
        assert answer.reasoning_tags == session.model.reasoning_tags(template)
        assert not answer.begins_in_reasoning
    assert texts == ["", "<|im_start|>" * 2]
    answer = session.generate([*b"hello", IM_START], n_predict=1, sampling=sampling)
    assert answer.begins_in_reasoning


def test_earlier_reasoning_is_given_apart_from_the_answer(session: Session) -> None:
    source = (
        "{% for m in messages %}{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    conversation = Conversation()
    conversation.ask("one")
    conversation.answer("<think>\nhm\n</think>\n\ntwo")
    conversation.ask("three")
    tokens = prompt_tokens(session.model, conversation, template=TemplateChoice(source))
    assert tokens == session.model.tokenize("[one][two][three]")
    assert conversation.messages[1].content.startswith("<think>")  # as the model wrote it


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
    assert stops.show(text) + stops.show("", last=True) == StopTexts(stop_texts).show(text, last=True)
    stops = StopTexts(stop_texts)
    visible, ended = "", False
    for character in text:  # one at a time: nothing comes after the end
        visible += stops.show(character)
        if stops.find(character.encode()):
            ended = True
            break
    visible += stops.show("\ufffd" if ended else "", last=True)  # of a character whose other bytes do not come
    assert visible == before(text, stop_texts)
    assert ended == any(stop in text for stop in stop_texts)


def test_an_answer_ends_at_its_stop_text(session: Session) -> None:
    grammar = 'root ::= "one two three four five"'
    prompt = list(b"one two three four five. Again: ")
    sampling = SamplingConfig(temperature=0, grammar=grammar, stop=("hree f", "never"))
    stopped = session.generate(prompt, sampling=sampling)
    assert "".join(stopped.pieces()) == stopped.text == "one two t"
    assert stopped.stop_reason == "stop"
    whole = b"".join(map(session.model.piece, stopped.tokens)).decode()
    assert "hree f" in whole and "four" not in whole.removeprefix("one two three f")[3:]
    entire = session.generate(prompt, sampling=SamplingConfig(temperature=0, grammar=grammar))
    assert "".join(entire.pieces()) == "one two three four five" and entire.stop_reason == "eos"
