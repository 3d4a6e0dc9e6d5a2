"""From a conversation to prompt tokens, from tokens to text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from moeedge.engine.conversation import Conversation, Message, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.lab.widen.vocabulary import IM_START
from moeedge.llama.reasoning import TemplateChoice
from tests.conftest import TinyFactory


@pytest.fixture(scope="module")
def session(tiny: TinyFactory) -> Iterator[Session]:
    with Session.open(EngineConfig(model=tiny("qwen3moe"), draft=tiny("qwen3"), n_ctx=512, n_threads=1)) as session:
        yield session


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


def test_characters_are_never_split(session: Session) -> None:
    answer = session.generate(session.model.tokenize("tell me"), n_predict=1, sampling=SamplingConfig(temperature=0))
    tokens = session.model.tokenize("a🦙b", add_special=False)
    assert len(tokens) == 6
    assert [answer.read([token]) for token in tokens] == ["a", "", "", "", "🦙", "b"]
    assert answer.read(tokens[1:3]) == "" and answer.read([], last=True) == "�"
    answer.close()


def test_an_answer_that_is_closed_keeps_its_text(session: Session) -> None:
    prompt = session.model.tokenize("tell me")
    answer = session.generate(prompt, n_predict=200, sampling=SamplingConfig(temperature=0))
    assert answer.stop_reason is None
    for _ in answer.pieces():
        if len(answer.text) > 10:
            break
    answer.close()
    assert answer.stop_reason == "interrupted"
    assert len(answer.text) > 10


def test_tags_of_reasoning_are_shown_also_where_they_are_control_tokens(tiny_moe: Path) -> None:
    source = (
        "{% for m in messages %}"
        "{% if m.reasoning_content %}{{ '<|im_start|>' + m.reasoning_content + '</t>' }}{% endif %}"
        "{{ m.content }}{% endfor %}"
    )
    sampling = SamplingConfig(temperature=0, logit_bias=((IM_START, 1000.0),))
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=128, n_threads=1)) as session:
        texts = []
        for template in (TemplateChoice(), TemplateChoice(source)):
            session.template = template
            answer = session.generate(list(b"hello"), n_predict=2, sampling=sampling)
            texts.append("".join(answer.pieces()))
            assert answer.reasoning_tags == session.model.reasoning_tags(template)
            assert not answer.begins_in_reasoning
        assert texts == ["", "<|im_start|>" * 2]
        opened = session.generate([*b"hello", IM_START], n_predict=1, sampling=sampling)
        assert opened.begins_in_reasoning


def test_earlier_reasoning_is_given_apart_from_the_answer(tiny_moe: Path) -> None:
    source = (
        "{% for m in messages %}{% if m.reasoning_content and loop.last %}<think>{{ m.reasoning_content }}</think>"
        "{% endif %}[{{ m.content }}]{% endfor %}"
    )
    conversation = Conversation()
    conversation.ask("one")
    conversation.answer("<think>\nhm\n</think>\n\ntwo")
    conversation.ask("three")
    with Session.open(EngineConfig(model=tiny_moe, n_ctx=128, n_threads=1)) as session:
        tokens = prompt_tokens(session.model, conversation, template=TemplateChoice(source))
        assert tokens == session.model.tokenize("[one][two][three]")
        assert conversation.messages[1].content.startswith("<think>")  # as the model wrote it
