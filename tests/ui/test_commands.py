"""Commands of the chat that change conversation, model or context, on a real engine, with a scripted user."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.cli.model_files import resolve_models
from moeedge.engine.autosave import unfinished_chats
from moeedge.engine.conversation import Conversation, Message
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.paths import user_path
from moeedge.run import Run
from moeedge.ui.chat import session as chat_session
from moeedge.ui.chat.commands import LEAVING, first_words, last_messages, run_command
from moeedge.ui.chat.session import FULL, ModelSwitch
from tests.conftest import TinyFactory
from tests.support.machine import Here
from tests.support.sessions import plain_config
from tests.ui.talk import GREEDY, Line, Talk

N_CTX = 256
LONG = "tell me " * 20


def test_undo_and_edit_take_the_last_question_and_answer_back(session: Session, tmp_path: Path) -> None:
    expected = Talk(session, ["one", "three"], tmp_path).messages  # as if "two" had not been asked
    talk = Talk(session, ["/undo", "one", "two", "/undo", "three"], tmp_path)
    assert "There is no message to take back." in talk.err and talk.messages == expected
    assert 'Taken back, with its answer: "two"' in talk.err
    talk = Talk(session, ["/edit", "one", "two", "/edit", "three"], tmp_path)
    assert "There is no message to edit." in talk.err and talk.messages == expected
    assert talk.begun == ["", "", "", "", "two", ""]  # what the prompt begins with


@pytest.mark.parametrize("line", [KeyboardInterrupt, "", "/stats"])
def test_an_edit_that_is_given_up_changes_nothing(line: Line, session: Session, tmp_path: Path) -> None:
    talk = Talk(session, ["one", "/edit", line, "two"], tmp_path)
    assert talk.asked == ["one", "two"]


def test_an_edit_that_is_given_up_sends_no_file(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "file.txt"
    file.write_text("some text")
    talk = Talk(session, ["one", f"/read {file}", "/edit", "", "two"], tmp_path / "chats")
    assert talk.asked == ["one", "some text\ntwo"]


def test_quoted_text_is_no_command(session: Session, tmp_path: Path) -> None:
    quoted = ["/usr/bin/env", "exit", "// a comment"]
    talk = Talk(session, [*(f'"""{text}"""' for text in quoted), "/edit"], tmp_path)
    assert [message.content for message in talk.messages[::2]] == quoted
    assert talk.begun[-1] == '"""// a comment"""'


def test_a_file_is_read_in_part_and_refused(session: Session, tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(1 << 40)  # no text fills the memory
    talk = Talk(session, [f"/read {large}", "/read /dev/zero", f"/save {tmp_path / 'a.json'}"], tmp_path)
    assert talk.err.count("is too large") == 2 and "saved" in talk.err


@pytest.mark.parametrize("line", [KeyboardInterrupt, EOFError])
def test_a_file_is_kept_where_the_question_gets_no_answer(line: Line, session: Session, tmp_path: Path) -> None:
    file = tmp_path / "kept.json"
    file.write_text("mine")
    talk = Talk(session, [f"/save {file}", line], tmp_path / "chats")
    assert file.read_text() == "mine" and "Not saved." in talk.err


def test_an_edited_message_without_an_answer_leaves_the_earlier_one(session: Session, tmp_path: Path) -> None:
    before = Talk(session, ["one"], tmp_path).messages
    talk = Talk(session, ["one", "/edit", "word " * 600], tmp_path)  # does not fit
    assert talk.messages == before
    assert "The earlier one and its answer stay" in talk.err


def test_words_that_leave(session: Session, tmp_path: Path) -> None:
    for word in LEAVING:
        talk = Talk(session, [word.upper(), "never read"], tmp_path)
        assert (talk.code, talk.messages) == (0, [])


def test_save_asks_before_it_replaces_a_file(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    file.write_text("mine")
    kept = Talk(session, [f"/save {file}", "n"], tmp_path / "a")
    assert file.read_text() == "mine" and "Not saved." in kept.err and kept.messages == []
    Talk(session, [f"/save {file}"], tmp_path / "b")  # Ctrl-D is no answer
    assert file.read_text() == "mine"
    Talk(session, ["tell me", f"/save {file}", "y"], tmp_path / "c")
    assert Conversation.load(file).messages[0].content == "tell me"


def test_load_restores_a_conversation_and_shows_its_end(session: Session, tmp_path: Path) -> None:
    file = tmp_path / "talk.json"
    messages = [Message("assistant" if i % 2 else "user", f"message {i}") for i in range(9)]
    Conversation("Be kind.", messages).save(file)
    talk = Talk(session, [f"/load {file}", "tell me"], tmp_path)
    assert "8 messages loaded" in talk.err and "no answer and was left out" in talk.err
    shown = talk.err[: talk.err.index("message 7") + 9].splitlines()
    assert shown[-5:] == ["(4 earlier messages)", ">>> message 4", "message 5", ">>> message 6", "message 7"]
    assert (talk.repl.conversation.system, talk.messages[:8]) == ("Be kind.", messages[:8])
    assert talk.asked[-1] == "tell me"


def test_long_messages_are_shortened() -> None:
    long = [Message("user", "word " * 200), Message("assistant", "row\n" * 9)]
    question, answer = last_messages(long)
    assert len(question) < 310 and question.endswith("...")
    assert answer == "row\nrow\nrow\nrow..."
    assert first_words([Message("user", "one\n\ntwo")]) == "one two"
    assert len(first_words(long)) <= 43


@pytest.mark.parametrize(
    ("line", "name", "value"),
    [
        ("/set parameter temperature 0.5", "temperature", 0.5),  # ollama's
        *((f"/set temp{equals}0.5", "temperature", 0.5) for equals in ("=", " = ", "= ", " =")),
        ("/set verbose", "stats", "full"),
        ("/set quiet", "stats", "off"),
        ("/set show_thinking on", "show_thinking", "on"),
        ("/set show-thinking off", "show_thinking", "off"),
        ("/set thinking show", "show_thinking", "on"),
        ("/set thinking fold", "show_thinking", "off"),
        ("/set markdown off", "markdown", False),
    ],
)
def test_ways_to_set(line: str, name: str, value: object, session: Session, tmp_path: Path) -> None:
    settings = Talk(session, [line], tmp_path).repl.settings
    assert getattr(settings.sampling if name == "temperature" else settings.look, name) == value


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("/sav x", "/save"),
        ("/undoo", "/undo"),
        ("/image cat.png", "/read FILE"),
        ("/glob *.py", "/read FILE"),
        ("/models", "/model NAME"),
        ("/set format json", "/set grammar"),
        ("/set wordwrap", "wrapped"),
        ("/load llama3", "/model NAME"),
        ("/zzz", "/help"),
    ],
)
def test_an_unknown_command_names_the_right_one(line: str, hint: str, session: Session, tmp_path: Path) -> None:
    repl = Talk(session, [], tmp_path).repl
    with pytest.raises(InputError) as caught:
        run_command(repl, line)
    assert hint in caught.value.hint


@pytest.fixture
def switch(tiny: TinyFactory) -> Iterator[ModelSwitch]:
    config = plain_config(tiny("qwen3moe"), tiny("qwen3"), n_ctx=N_CTX, gamma=2)

    def configure(name: str) -> EngineConfig:
        return replace(config, model=resolve_models(user_path(name), None).target)

    with ModelSwitch(config, configure, Run()) as found:
        yield found


def switched(switch: ModelSwitch, lines: list[Line], folder: Path) -> Talk:
    return Talk(switch.session, lines, folder, settings=replace(GREEDY, n_predict=20, gamma=2), switch=switch)


def test_another_model_goes_on_with_the_conversation(switch: ModelSwitch, tiny: TinyFactory, tmp_path: Path) -> None:
    other = tiny("glm4moe")
    on_exit: list[str] = []

    def peek(talk: Talk) -> None:
        (left,) = [path.read_text() for path in tmp_path.glob("*.jsonl")]
        on_exit.append(left)

    first = switch.session
    talk = switched(switch, ["tell me", "/set gamma 1", f"/model {other}", "and?", peek, "/model"], tmp_path)
    assert "No longer as /set: gamma." in talk.err
    assert first.target.is_closed and not switch.session.target.is_closed
    assert [turn.info.architecture for turn in talk.repl.turns] == ["qwen3moe", "glm4moe"]
    assert talk.asked == ["tell me", "and?"]
    assert talk.repl.session is switch.session
    assert other.name in talk.err.splitlines()[-1]
    assert '"tell me"' in on_exit[0] and other.name in on_exit[0].splitlines()[0]  # kept as a chat with that model
    assert unfinished_chats(lambda: tmp_path) == []


def test_ctrl_c_while_another_model_loads(
    switch: ModelSwitch, tiny: TinyFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[EngineConfig] = []
    real = chat_session.open_session

    def interrupted(config: EngineConfig, *, run: Run) -> Session:
        opened.append(config)
        if len(opened) == 1:
            raise KeyboardInterrupt
        return real(config, run=run)

    monkeypatch.setattr(chat_session, "open_session", interrupted)
    talk = switched(switch, [f"/model {tiny('glm4moe')}", "and?"], tmp_path)
    assert [turn.info.architecture for turn in talk.repl.turns] == ["qwen3moe"]
    assert "Stopped. " in talk.err and len(opened) == 2


def test_set_takes_the_text_as_it_is(session: Session, tmp_path: Path) -> None:
    for line, system in {
        "/set system a = b": "a = b",
        "/set system=x=1 y": "x=1 y",
        "/set system 'a=b'": "'a=b'",
        '/set system "a b"': "a b",
        "/set system": "kind",  # shown, and kept
        '/set system ""': "",
    }.items():
        assert Talk(session, ["/system kind", line], tmp_path).repl.conversation.system == system


@pytest.mark.parametrize("name", ["~no-such-user/x", "x" * 300])
def test_a_name_that_cannot_be_a_file_does_not_end_the_chat(name: str, switch: ModelSwitch, tmp_path: Path) -> None:
    commands = ["/load", "/save", "/read", "/model", "/set grammar"]
    talk = switched(switch, [f"{command} {name}" for command in commands], tmp_path)
    assert talk.code == 0
    assert talk.err.count(name) == len(commands)


@pytest.mark.parametrize("text", ["[" * 60_000, ""])
def test_a_broken_file_leaves_the_conversation(text: str, session: Session, tmp_path: Path) -> None:
    file = tmp_path / "broken.json"
    file.write_text(text)
    talk = Talk(session, ["one", f"/load {file}", "/undo", "/undo", "/edit", "/regen"], tmp_path)
    assert (talk.code, talk.messages) == (0, [])
    assert str(file) in talk.err


def test_ctrl_c_twice_in_a_change_of_model_ends_the_chat_which_stays(tiny: TinyFactory, tmp_path: Path) -> None:
    """The old model was being opened again: there is none to go on with."""
    with Session.open(plain_config(tiny("qwen3moe"))) as session:

        def switch(name: str) -> Session:
            session.close()
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            Talk(session, ["one", "/model other", "two"], tmp_path, switch=switch)


def test_a_full_context_says_what_helps(switch: ModelSwitch, tmp_path: Path) -> None:
    no_shift: list[Line] = ["/set context_shift on", "/set context_shift off"]
    found = switched(switch, [*no_shift, LONG, "/set n -1", "and?", "and more?"], tmp_path)
    assert found.repl.turns[1].stop_reason == "context"
    assert found.err.count(FULL) == 2  # after that answer, and for the message that no longer fits
    for word in ("/clear", "/set ctx", "/set context_shift on"):
        assert word in FULL


def test_a_larger_context_reads_the_conversation_again(switch: ModelSwitch, tmp_path: Path) -> None:
    first = switch.session
    lines: list[Line] = ["tell me", "/set gamma 1", "/set temp 0", "/set ctx 512", "and?", "/set"]
    found = switched(switch, lines, tmp_path)
    assert first.target.is_closed and switch.session.info.n_ctx == 512
    assert found.repl.session is switch.session and switch.session.gamma == 1
    assert found.repl.settings.ctx == 512
    stats = found.repl.turns[1].stats
    assert (stats.cached_tokens, stats.prefill_tokens) == (0, stats.prompt_tokens)
    assert len(found.messages) == 4


@pytest.mark.parametrize(
    ("failing", "message"),
    [
        *(("/set ctx x", "whole number"), ("/set ctx -1", "from 0"), ("/set ctx 999999999999", "from 0")),
        *(("/set ctx 16000", "The context keeps 256 tokens."), ("/model missing.gguf", "missing.gguf")),
        ("/model broken.gguf", "qwen3moe-0.gguf stays."),
    ],
)
def test_the_old_session_stays_where_there_can_be_no_other(
    failing: str, message: str, switch: ModelSwitch, tmp_path: Path, here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For want of memory, or of a model that can be read; what was set stays as well."""
    monkeypatch.chdir(tmp_path)
    Path("broken.gguf").write_bytes(b"GGUF" + bytes(64))
    here.set_memory(1 << 20)
    found = switched(switch, ["tell me", "/set gamma 1", failing, "and?"], tmp_path / "chats")
    assert switch.session.info.n_ctx == N_CTX == found.repl.settings.ctx
    assert found.repl.session is switch.session and switch.session.gamma == 1
    assert [turn.info.architecture for turn in found.repl.turns] == ["qwen3moe"] * 2
    assert message in found.err


def test_another_conversation_is_seen_whole(switch: ModelSwitch, tmp_path: Path) -> None:
    """Messages that a full context left out belong to that conversation."""
    talk, file = Conversation(), tmp_path / "talk.json"
    for number in range(3):
        talk.ask(f"My number {number}.")
        talk.answer("I see.")
    talk.save(file, model="m")
    lines: list[Line] = ["/set context_shift on", f"/load {file}", LONG + LONG[:80], f"/load {file}", "hi"]
    found = switched(switch, lines, tmp_path / "chats")
    whole = switched(switch, [f"/load {file}", "hi"], tmp_path / "chats")
    assert "no longer sees" in found.err
    assert found.repl.turns[-1].stats.prompt_tokens == whole.repl.turns[-1].stats.prompt_tokens


def test_a_shift_drops_the_oldest_messages(switch: ModelSwitch, tmp_path: Path) -> None:
    lines: list[Line] = ["/set context_shift on", *[f"{number} {LONG[:60]}" for number in range(12)]]
    found = switched(switch, lines, tmp_path)
    assert len(found.messages) == 24, "every message is answered"
    assert [turn.stop_reason for turn in found.repl.turns] == ["length"] * 12
    assert "no longer sees the oldest" in found.err
    assert max(turn.stats.prompt_tokens for turn in found.repl.turns) < N_CTX
    cached = [turn.stats.cached_tokens for turn in found.repl.turns]
    assert sum(count > 0 for count in cached) >= 6, "between two shifts the KV cache stays useful"
