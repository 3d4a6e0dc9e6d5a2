"""From a conversation to prompt tokens, from tokens to text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from moeedge.engine.conversation import Conversation, Message, prompt_tokens
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
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
