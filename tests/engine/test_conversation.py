"""Conversations: who speaks when, taking back, saving and loading."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from moeedge.engine.conversation import Conversation, Message
from moeedge.errors import EmptyPromptError, InputError


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


def test_the_last_question_can_be_opened_again() -> None:
    conversation = talk()
    assert conversation.reopen() == "zwei, 二 👍"
    with pytest.raises(InputError, match="no answer"):
        conversation.reopen()
    conversation.answer("2")
    assert conversation.messages[-1] == Message("assistant", "2")


def test_clear_keeps_the_system_prompt() -> None:
    conversation = talk()
    conversation.clear()
    assert conversation == Conversation("Be kind.")


@pytest.mark.parametrize("text", ["", "  \n"])
def test_a_blank_question_is_refused(text: str) -> None:
    with pytest.raises(EmptyPromptError):
        Conversation().ask(text)


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
    with pytest.raises(InputError, match="cannot be written"):
        talk().save(tmp_path / "none" / "talk.json")
    with pytest.raises(InputError, match="cannot be written"):
        talk().save(tmp_path)
    assert list(tmp_path.parent.glob(".*.part")) == []
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(InputError, match="not UTF-8 text"):
        Conversation.load(tmp_path / "bytes.json")
