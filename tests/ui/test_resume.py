"""Chats that end in the middle, and go on later."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.engine import autosave
from moeedge.engine.autosave import UnfinishedChat, unfinished_chats
from moeedge.engine.conversation import Message
from moeedge.engine.session import Session
from moeedge.engine.types import SamplingConfig
from moeedge.llama.reasoning import TemplateChoice
from moeedge.scheduler.stats import StepRecord
from moeedge.ui.chat.session import origin_of
from moeedge.ui.chat.settings import Settings
from tests.ui.talk import GREEDY, Line, Talk, cut_off, on_step

TEMPLATE = TemplateChoice("{{ messages[-1].content }}{{ mood }}", {"mood": ": "})
CONSTRAINED = SamplingConfig(
    temperature=1.2,
    seed=5,
    grammar='root ::= "[" [a-z]+ "]"',
    samplers=("top_k", "temperature"),
    logit_bias=((93, -9),),
)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_in_mid_answer_leaves_it_to_be_continued(
    signum: signal.Signals, session: Session, tmp_path: Path
) -> None:
    settings = replace(GREEDY, n_predict=60)
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "whole", settings=settings)
    session.reset()
    on_step(session, 3, lambda: signal.raise_signal(signum))
    talk = Talk(session, ["/system be kind", "tell me", "never read"], tmp_path, settings=settings)
    assert talk.code == 128 + signum and "--resume" in talk.err
    (left,) = unfinished_chats(lambda: tmp_path)
    assert left.conversation.messages == talk.messages == [Message("user", "tell me")]
    assert 0 < len(left.tokens) < 60 and left.origin == origin_of(session, raw=False)
    session.reset()
    resumed = Talk(session, ["/resume", "/resume"], tmp_path)
    assert (resumed.messages, resumed.out) == (expected.messages, expected.out)  # with the part before the end
    assert resumed.repl.conversation.system == "be kind"
    assert resumed.repl.settings == replace(settings, ctx=session.info.n_ctx)
    assert resumed.repl.turns[0].stats.generated_tokens == 60 - len(left.tokens)
    assert "There is no chat to resume." in resumed.err
    assert unfinished_chats(lambda: tmp_path) == []


@pytest.mark.parametrize("at_step", [1, 3])
def test_a_signal_after_regen_keeps_an_answer(at_step: int, session: Session, tmp_path: Path) -> None:
    """Until the new answer has a token the old one is on disk, then the new one's tokens are."""
    first = Talk(session, ["tell me"], tmp_path)
    session.reset()

    prompts: list[int] = []  # steps after each
    on_disk: list[UnfinishedChat] = []

    def observe(record: StepRecord, _session: Session) -> None:
        if record.n_verified == 0:
            prompts.append(0)
        prompts[-1] += 1
        if len(prompts) == 2 and prompts[-1] == at_step:
            (path,) = tmp_path.glob("*.jsonl")
            on_disk.append(autosave._read(path))  # what kill -9 would leave
            for _ in range(2):  # the second signal does not wait for the step
                os.kill(os.getpid(), signal.SIGTERM)

    session.observers.append(observe)
    talk = Talk(session, ["tell me", "/regen"], tmp_path)
    assert talk.code == 143
    (left,) = unfinished_chats(lambda: tmp_path)
    assert on_disk[0].conversation == left.conversation
    if at_step == 1:
        assert (left.conversation.messages, left.tokens) == (first.messages, [])
    else:
        assert left.conversation.messages == first.messages[:1]
        assert first.messages[1].content.startswith(left.text) and left.tokens


@pytest.mark.parametrize(
    ("old", "new"),
    [(rb"\Z", b'{"text": "x", "tokens": [-1, 4294967296]}\n'), (rb'"model_bytes": ', b'"model_bytes": 1')],
    ids=["unknown tokens", "another model"],
)
def test_what_the_model_cannot_continue_is_answered_anew(
    old: bytes, new: bytes, session: Session, tmp_path: Path
) -> None:
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "one")
    cut_off(session, tmp_path, 2)
    (path,) = tmp_path.glob("*.jsonl")
    path.write_bytes(re.sub(old, new, path.read_bytes(), count=1))
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.messages == expected.messages
    assert talk.repl.turns[0].stats.generated_tokens == 12


def test_resume_restores_grammar_samplers_and_template(session: Session, tmp_path: Path) -> None:
    settings = Settings(sampling=CONSTRAINED, n_predict=30, gamma=4, template=TEMPLATE)
    expected = Talk(session, ["/system be kind", "tell me"], tmp_path / "one", settings=settings)
    assert expected.messages[-1].content[0] == "["
    session.template = TEMPLATE
    begun = cut_off(session, tmp_path, 3, settings=settings)
    session.template = TemplateChoice()
    assert 0 < len(begun) < 30
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.messages[-1].content.startswith(session.model.piece(begun[0]).decode())
    assert session.template == talk.repl.settings.template == TEMPLATE
    assert talk.repl.settings.sampling == CONSTRAINED
    assert talk.repl.turns[0].stats.generated_tokens == 30 - len(begun)


def test_resume_keeps_the_text_if_it_cannot_go_on(
    session: Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut_off(session, tmp_path, 2)
    (left,) = unfinished_chats(lambda: tmp_path)
    monkeypatch.setattr(session.target, "n_ctx", 8)
    talk = Talk(session, ["/resume"], tmp_path)
    assert talk.messages[-1] == Message("assistant", left.text)
    assert "context" in talk.err


def test_resume_replaces_no_conversation(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1)
    talk = Talk(session, ["hello", "/resume", "and?", "/clear", "/resume"], tmp_path)
    assert "/clear" in talk.err
    assert len(talk.repl.turns) == 3
    assert talk.asked == ["tell me"]


def test_resume_says_that_other_settings_apply(session: Session, tmp_path: Path) -> None:
    for given, is_said in ((replace(GREEDY, n_predict=5), True), (Settings(gamma=4), False)):
        cut_off(session, tmp_path, 1)
        talk = Talk(session, ["/resume"], tmp_path, settings=given)
        assert talk.repl.settings == replace(GREEDY, ctx=session.info.n_ctx)
        assert ("settings apply" in talk.err) == is_said


def test_a_resumed_seed_is_no_promise_where_lengths_follow_times(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 2, settings=Settings(SamplingConfig(temperature=1, seed=3), n_predict=40, gamma=4))
    talk = Talk(session, ["/set gamma auto", "/resume"], tmp_path, settings=Settings(n_predict=5))
    assert talk.err.count("may give other answers") == 1
    assert talk.repl.settings.sampling.seed == 3


def test_resume_lists_and_drops(session: Session, tmp_path: Path) -> None:
    for _ in range(3):
        cut_off(session, tmp_path, 1)
    talk = Talk(session, ["/sessions", "/resume 4", "/resume 2", "/resume drop", "n", "/resume drop", "y"], tmp_path)
    assert talk.err.count("1 message with tiny-qwen3moe") == 4
    assert "There is no unfinished chat 4." in talk.err and '"tell me"' in talk.err
    assert "Nothing is deleted." in talk.err
    assert len(talk.repl.turns) == 1
    assert unfinished_chats(lambda: tmp_path) == []


def test_a_chat_that_is_not_saved_leaves_the_resumed_file(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 1)
    talk = Talk(session, ["/resume"], tmp_path, saves=False)
    assert (talk.code, len(talk.repl.turns)) == (0, 1)
    assert len(unfinished_chats(lambda: tmp_path)) == 1


def test_every_change_is_on_disk(session: Session, tmp_path: Path) -> None:
    """After each line, the file holds what the chat holds."""
    n_seen: list[int] = []

    def look(talk: Talk) -> None:
        (path,) = tmp_path.glob("*.jsonl")
        assert autosave._read(path).conversation == talk.repl.conversation
        n_seen.append(len(talk.messages))

    script: list[Line] = []
    for line in ("tell me", "/set temp 0.5", "and?", "/regen", "/system be kind", "/clear", "again"):
        script += [line, look]
    assert Talk(session, script, tmp_path).code == 0
    assert n_seen == [2, 2, 4, 4, 4, 0, 2]


def test_settings_that_cannot_be_read_are_told(session: Session, tmp_path: Path) -> None:
    cut_off(session, tmp_path, 3, settings=GREEDY)
    (file,) = tmp_path.glob("*.jsonl")
    file.write_text(file.read_text().replace('"n_predict": 12', '"n_predict": "many"'))
    talk = Talk(session, ["/resume"], tmp_path)
    assert "settings cannot be read" in talk.err and talk.repl.settings.n_predict == GREEDY.n_predict
