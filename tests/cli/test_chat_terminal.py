"""The interactive chat in a pseudo-terminal: typing, commands, panel, history, Ctrl-C, Ctrl-D, SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from moeedge.cli.app import load_command
from moeedge.cli.spelling import Speller
from moeedge.engine.autosave import Autosave, Origin, unfinished_chats
from moeedge.engine.conversation import Conversation, Message
from tests.conftest import TinyFactory
from tests.support.commands import run

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import PROMPT, Terminal
from tests.support.counting import Unavailable, compile_device

# a terminal that may be painted, but the default at the prompt of tests that look at plain text
PLAIN = {"TERM": "dumb"}


@pytest.fixture
def endless(tiny: TinyFactory) -> list[str]:
    """Options under which an answer runs until it is stopped: random weights hardly ever end one by themselves."""
    options = ["-m", str(tiny("qwen3moe")), "-md", "none", "-t", "1", "-c", "512", "--context-shift", "--temp", "0"]
    return ["chat", *options]


def test_a_conversation_with_commands(pair: list[str], cache: Path, tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal(["chat", *pair, "-n", "12", "--temp", "0"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        assert "Experts: all 48 on the CPU. Drafts: by tiny-qwen3-0.gguf." in terminal.text
        for typed, shown in (
            ("tell me", "12 tokens, "),
            ("/regen", "12 tokens, "),
            ("/set temp 0.5", "temp = 0.5"),
            ("/set temp hot", "temp must be"),
            ("/set gamma 2", "gamma = 2"),
            ("/system be kind", "System prompt"),
            ("/stats", "2 answers"),
            ("/info", "3 layers x 16 experts, top-4"),
            ("/load /missing.json", "/missing.json"),
            (f"/save {saved}", "2 messages"),
            ("/clear", "cleared"),
            (f"/load {saved}", "2 messages"),
            ("/nope", '"/nope"'),
            ("/help", "Ctrl-C"),
        ):
            terminal.ask(typed, shown)
        terminal.type("/bye\r")
        assert terminal.wait() == 0
    document = json.loads(saved.read_text())
    assert (document["schema"], document["version"], document["system"]) == ("moeedge.conversation", 1, "be kind")
    assert [message["role"] for message in document["messages"]] == ["user", "assistant"]
    assert document["messages"][0]["content"] == "tell me"


def test_a_chat_goes_on_after_its_first_message(pair: list[str], tmp_path: Path) -> None:
    """-i: the text of -p is answered, whatever it begins with, and then a message is read."""
    saved = tmp_path / "talk.json"
    with Terminal(["chat", *pair, "-n", "4", "--temp", "0", "-i", "-p", "/tell me"], env=PLAIN) as terminal:
        terminal.expect("4 tokens, ")
        terminal.expect(PROMPT)
        terminal.ask("again", "4 tokens, ")
        terminal.ask(f"/save {saved}", "4 messages")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert [message["content"] for message in json.loads(saved.read_text())["messages"][::2]] == ["/tell me", "again"]


@pytest.mark.slow
def test_several_lines_between_triple_quotes(pair: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal(["chat", *pair, "-n", "4"], env={}) as terminal:
        terminal.expect(PROMPT)
        terminal.type('"""one\r')
        terminal.expect("...")
        terminal.ask('two"""', "4 tokens, ")
        terminal.ask(f"/save {saved}", "messages saved")
        terminal.leave()
    assert json.loads(saved.read_text())["messages"][0]["content"] == "one\ntwo"


def test_ctrl_c_stops_an_answer_and_keeps_its_text(endless: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal(endless, env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect("\n")
        terminal.expect_length(100)  # some of the answer is out
        terminal.type("\x03")
        terminal.expect(", stopped", PROMPT)
        terminal.type("\x03")
        terminal.expect("Use /exit or Ctrl-D to leave.")
        terminal.type(f"/save {saved}\r")
        terminal.expect("2 messages saved")
        terminal.type("and\r")  # the chat goes on, on the same caches
        terminal.expect("and")
        terminal.expect_length(10)
        terminal.type("\x03")
        terminal.expect("stopped", PROMPT)
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    answer = json.loads(saved.read_text())["messages"][1]["content"]
    assert len(answer) > 50


def test_sigterm_within_an_answer_saves_the_conversation(endless: list[str], cache: Path) -> None:
    with Terminal(endless, env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect("\n")
        terminal.expect_length(100)
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143
        assert "--resume" in terminal.text
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    (question,) = left.conversation.messages
    assert question.content == "tell me"
    assert len(left.text) > 50 and left.tokens
    assert "tell me" in (cache / "chat_history").read_text()


@pytest.mark.slow
def test_sigterm_at_the_prompt_saves_the_conversation(pair: list[str], cache: Path) -> None:
    with Terminal(["chat", *pair, "-n", "4"], env={}) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "4 tokens, ")
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    assert len(left.conversation.messages) == 2


@pytest.mark.parametrize("signum", [signal.SIGKILL, pytest.param(signal.SIGABRT, marks=pytest.mark.slow)])
def test_a_chat_that_was_killed_is_offered_and_goes_on(
    signum: signal.Signals, endless: list[str], cache: Path, tmp_path: Path
) -> None:
    with Terminal([*endless, "-n", "250"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect("\n")
        terminal.expect_length(100)
        terminal.send(signum)
        assert terminal.wait() == -signum
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    assert len(left.text) > 50
    saved = tmp_path / "talk.json"
    with Terminal([*endless, "-n", "3"], env=PLAIN) as terminal:
        terminal.expect("ended unexpectedly", "/resume", PROMPT)
        terminal.ask("/resume", "The last answer goes on.", "tokens, ")
        terminal.ask(f"/save {saved}", "2 messages")
        terminal.leave()
    with Terminal([*endless, "-n", "250", "-st"], env=PLAIN) as terminal:  # the answer as it is without an end
        terminal.expect(PROMPT)
        assert "unexpectedly" not in terminal.text
        terminal.type("tell me\r")
        assert terminal.wait() == 0
        answer = json.loads(saved.read_text())["messages"][1]["content"]
        assert answer.split()[0] in terminal.text
    assert answer.startswith(left.text)
    assert unfinished_chats(lambda: cache / "unfinished_chats") == []


@pytest.mark.parametrize(
    "busy", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["in an answer", "at the prompt"]
)
def test_a_closed_terminal_leaves_the_chat(busy: bool, endless: list[str], cache: Path) -> None:
    with Terminal([*endless, *([] if busy else ["-n", "4"])], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        if busy:
            terminal.expect("\n")
            terminal.expect_length(100)
        else:
            terminal.expect("4 tokens, ", PROMPT)
        terminal.hang_up()
        assert terminal.process.wait(15) == 128 + signal.SIGHUP
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    assert left.conversation.messages[0].content == "tell me"
    assert left.conversation.has_question == busy == (len(left.text) > 50)


@pytest.mark.slow
def test_a_gpu_that_ends_the_process(pair: list[str], cache: Path, counting_file: Path) -> None:
    """As ggml's CUDA backend does on every error: the next chat goes on with the answer."""
    options = ["chat", *pair, "--temp", "0", "--no-calibrate", "-n", "200", "--backend", str(counting_file)]
    gpu = ["-dev", "COUNTING0", "-ngl", "99", "--cache-ratio", "0.5"]
    with Terminal([*options, *gpu], env=PLAIN | {"COUNTING_FAIL_GRAPH": "400", "COUNTING_FAIL_MODE": "2"}) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        assert terminal.wait() == -signal.SIGABRT
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    assert 0 < len(left.tokens) < 200
    with Terminal([*options, "--resume", "-st", "-dev", "none"], env=PLAIN) as terminal:
        terminal.expect("The last answer goes on.", f"{200 - len(left.tokens)} tokens")
        assert terminal.wait() == 0


@pytest.fixture
def counting_file() -> Path:
    try:
        return compile_device()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_a_chat_without_autosave_leaves_nothing(pair: list[str], cache: Path) -> None:
    with Terminal(["chat", *pair, "-n", "4", "--no-autosave"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "4 tokens, ")
        terminal.send(signal.SIGKILL)
        terminal.wait()
    assert not (cache / "unfinished_chats").exists()


def test_unfinished_chats_are_listed_without_a_model(cache: Path) -> None:
    folder = cache / "unfinished_chats"
    for text in ("first one", "second one"):
        kept = Autosave(lambda: folder, Origin("m.gguf", 1, raw=False))
        kept.update(Conversation("", [Message("user", text)]), {})
        kept.close(keep=True)
    (folder / "0-damaged.jsonl").write_text('{"schema": "moeedge.autosave"')
    result = run("chat", "--resume", "list")
    assert "0-damaged.jsonl.damaged" in result.stderr
    shown = result.stdout.splitlines()
    assert [line.split()[0] for line in shown] == ["1", "2"]
    assert '"second one"' in shown[0] and "m.gguf" in shown[0]


@pytest.mark.parametrize(("given", "value"), [([], "1"), (["list"], "list"), (["2"], "2"), (["-n", "4"], "1")])
def test_resume_may_stand_without_a_number(given: list[str], value: str) -> None:
    found = Speller("chat", load_command("chat")).translate(["--resume", *given])
    assert found[:2] == ["--resume", value]


@pytest.mark.slow
def test_resume_from_the_command_line(pair: list[str], cache: Path) -> None:
    with Terminal(["chat", *pair, "-n", "4"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "4 tokens, ")
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143
    with Terminal(["chat", *pair, "--resume"], env=PLAIN) as terminal:
        terminal.expect("Resumed: 2 messages", "The last answer is complete.", PROMPT)
        terminal.leave()
    with Terminal(["chat", *pair, "--resume"], env=PLAIN) as terminal:
        terminal.expect("There is no chat to resume.", PROMPT)
        terminal.leave()


@pytest.mark.slow
def test_history_is_kept_across_runs(pair: list[str], cache: Path) -> None:
    with Terminal(["chat", *pair, "-n", "4"], env={}) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("remember this", "4 tokens, ")
        terminal.leave()
    assert (cache / "chat_history").stat().st_mode & 0o077 == 0
    with Terminal(["chat", *pair, "-n", "4", "-st"], env={}) as terminal:
        terminal.expect(PROMPT)
        terminal.type("\x1b[A")
        terminal.expect("remember this")
        terminal.type("\r")
        terminal.expect("4 tokens, ")
        assert terminal.wait() == 0  # -st: one answer


def test_a_wide_terminal_gets_the_panel(endless: list[str]) -> None:
    with Terminal(endless, env={}, columns=100) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect("speed", "tokens", "drafts", "Ctrl-C stops")
        terminal.type("\x03")
        terminal.expect(", stopped", PROMPT)
        terminal.leave()


@pytest.mark.parametrize(
    ("env", "columns"),
    [
        pytest.param({"TERM": "dumb"}, 100, id="dumb"),
        pytest.param({"NO_COLOR": "1"}, 100, id="no-color", marks=pytest.mark.slow),
        pytest.param({}, 39, id="narrow", marks=pytest.mark.slow),
    ],
)
def test_other_terminals_get_plain_text(endless: list[str], env: dict[str, str], columns: int) -> None:
    with Terminal([*endless, "-n", "200"], env=env, columns=columns) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "200 tokens")
        terminal.leave()
    assert "╭" not in terminal.raw
    if env.get("TERM") == "dumb":
        assert "\x1b" not in terminal.raw


@pytest.mark.slow
def test_a_single_answer_in_a_terminal(pair: list[str]) -> None:
    with Terminal(["chat", *pair, "-p", "tell me", "-n", "300"], env={}) as terminal:
        terminal.expect("300 tokens, ")
        assert terminal.wait() == 0


def test_json_needs_a_prompt_in_a_terminal(pair: list[str]) -> None:
    with Terminal(["chat", *pair, "-o", "json"], env=PLAIN) as terminal:
        terminal.expect("-o json")
        assert terminal.wait() == 2
