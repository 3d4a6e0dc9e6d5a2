"""The chat in a pseudo-terminal: typing, commands, panel, history, Ctrl-C, SIGTERM; progress; the recorded start."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from docs import record_start
from moeedge.engine.autosave import Autosave, Origin, UnfinishedChat, unfinished_chats
from moeedge.engine.conversation import Conversation, Message
from tests.cli.terminal import PROMPT, Terminal
from tests.conftest import TinyFactory
from tests.support.commands import run
from tests.support.counting import Unavailable, compile_device

# a terminal that may be painted, but the default at the prompt of tests that look at plain text
PLAIN = {"TERM": "dumb"}
OPTIONS = ["-t", "1", "--temp", "0"]


@pytest.fixture
def endless(tiny_moe: Path) -> list[str]:
    """Options under which an answer runs until it is stopped: random weights hardly ever end one by themselves."""
    return ["chat", "-m", str(tiny_moe), "-md", "none", *OPTIONS, "-c", "512", "--context-shift"]


@pytest.fixture
def cached(pair: list[str]) -> list[str]:
    """The same with drafts, and experts on the emulated device."""
    device = ["-dev", "emulated:link=1GB/s", "--cache-ratio", "0.5", "--no-calibrate", "--keep-cache"]
    return ["chat", *pair, *device, "--context-shift", "--temp", "0"]


def begin_answer(terminal: Terminal) -> None:
    """Ask, and wait until some of the answer is out."""
    terminal.expect(PROMPT)
    terminal.type("tell me\r")
    terminal.expect("\n")
    terminal.expect_length(100)


def left_in(cache: Path) -> UnfinishedChat:
    """The only unfinished chat."""
    (left,) = unfinished_chats(lambda: cache / "unfinished_chats")
    return left


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
        terminal.expect("4 tokens, ", PROMPT)
        terminal.ask("again", "4 tokens, ")
        terminal.ask(f"/save {saved}", "4 messages")
        terminal.leave()
    assert [message["content"] for message in json.loads(saved.read_text())["messages"][::2]] == ["/tell me", "again"]


def test_ctrl_c_stops_an_answer_and_keeps_its_text(endless: list[str], tmp_path: Path) -> None:
    saved = tmp_path / "talk.json"
    with Terminal(endless, env=PLAIN) as terminal:
        begin_answer(terminal)
        terminal.type("\x03")
        terminal.expect(", stopped", PROMPT)
        terminal.type("\x03")
        terminal.expect("Use /exit or Ctrl-D to leave.")
        terminal.type(f"/save {saved}\r")
        terminal.expect("2 messages saved")
        terminal.type("and\r")  # the chat goes on, on the same caches
        terminal.expect("and")
        terminal.expect_length(10)
        terminal.type("nobody reads this\r")
        time.sleep(0.1)
        terminal.send(signal.SIGINT)  # Ctrl-C itself makes the terminal forget what was typed before it
        terminal.expect("stopped", PROMPT)
        terminal.ask("/stats", "all 2 answers")
        assert "nobody" not in terminal.text
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert len(json.loads(saved.read_text())["messages"][1]["content"]) > 50


def test_sigterm_within_an_answer_saves_the_conversation_which_goes_on(endless: list[str], cache: Path) -> None:
    with Terminal(endless, env=PLAIN) as terminal:
        begin_answer(terminal)
        terminal.send(signal.SIGTERM)
        assert terminal.wait() == 143
        assert "--resume" in terminal.text
    left = left_in(cache)
    assert [message.content for message in left.conversation.messages] == ["tell me"]
    assert len(left.text) > 50 and left.tokens
    assert "tell me" in (cache / "chat_history").read_text()
    with Terminal([*endless, "--resume"], env=PLAIN) as terminal:
        terminal.expect("The last answer goes on.")
        terminal.type("\x03")
        terminal.expect(PROMPT)
        terminal.leave()


def test_a_chat_that_was_killed_is_offered_and_goes_on(endless: list[str], cache: Path, tmp_path: Path) -> None:
    with Terminal([*endless, "-n", "250"], env=PLAIN) as terminal:
        begin_answer(terminal)
        terminal.send(signal.SIGKILL)
        assert terminal.wait() == -signal.SIGKILL
    left = left_in(cache)
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


def test_a_closed_terminal_leaves_the_chat(endless: list[str], cache: Path) -> None:
    with Terminal(endless, env=PLAIN) as terminal:
        begin_answer(terminal)
        terminal.hang_up()
        assert terminal.process.wait(15) == 128 + signal.SIGHUP
    left = left_in(cache)
    assert left.conversation.messages[0].content == "tell me"
    assert left.conversation.has_question and len(left.text) > 50


@pytest.mark.slow
def test_a_gpu_whose_backend_aborts(pair: list[str], cache: Path) -> None:
    """As ggml's CUDA backend does on every error: the CPU goes on, be it in llama.cpp's graph or in one of ours."""
    try:
        options = ["chat", *pair, "--temp", "0", "--no-calibrate", "-n", "200", "--backend", str(compile_device())]
    except Unavailable as error:
        pytest.skip(str(error))
    gpu = ["-dev", "COUNTING0", "-ngl", "99", "--cache-ratio", "0.5"]
    with Terminal([*options, *gpu], env=PLAIN | {"COUNTING_FAIL_GRAPH": "400", "COUNTING_FAIL_MODE": "2"}) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect_all("CPU", "200 tokens")
        terminal.leave()


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


def test_the_panel_shows_the_cache(cached: list[str]) -> None:
    with Terminal(cached, env={}, columns=40, rows=15) as terminal:
        terminal.expect(PROMPT)
        assert "24 of 48" in terminal.text  # of 3 x 16 experts
        terminal.type("tell me\r")
        terminal.expect_all("speed", "tokens", "drafts accepted", "emulated GPU", "CPU", "Ctrl-C stops")
        terminal.type("\x03")
        terminal.expect("stopped", PROMPT)
        terminal.ask(
            *("/stats", "pair hits", "expert hits", "slots", "24/24", "uploads/layer", "memory of slots", "tau", "CPU")
        )
        terminal.leave()
    # rows never run over the window's edge
    assert {len(line) for line in terminal.text.split("\n") if line.startswith("╭")} == {40}


def test_plain_terminals_get_the_figures_behind_the_answer(cached: list[str]) -> None:
    with Terminal([*cached, "-n", "60"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.ask("tell me", "60 tokens, ")
        answered = terminal.raw
        terminal.ask("/stats", "pair hits", "memory of slots")
        terminal.leave()
    assert "╭" not in terminal.raw and "\x1b" not in answered


def test_a_pipe_gets_the_answer_alone(cached: list[str]) -> None:
    result = run(*cached, "-p", "tell me", "-n", "40")
    assert result.exit_code == 0
    assert "pair hits" not in result.stdout
    assert "24 of 48" in result.stderr and "40 tokens, " in result.stderr
    assert "pair hits" in run(*cached, "-p", "tell me", "-n", "40", "--verbose").stderr
    assert "\x1b" not in result.stdout + result.stderr


@pytest.mark.slow
def test_a_single_answer_in_a_terminal(pair: list[str]) -> None:
    with Terminal(["chat", *pair, "-p", "tell me", "-n", "300"], env={}) as terminal:
        terminal.expect("300 tokens, ")
        assert terminal.wait() == 0


def test_json_needs_a_prompt_in_a_terminal(pair: list[str]) -> None:
    with Terminal(["chat", *pair, "-o", "json"], env=PLAIN) as terminal:
        terminal.expect("-o json")
        assert terminal.wait() == 2


@pytest.mark.flaky(reruns=2)
@pytest.mark.slow
def test_ctrl_c_takes_effect_at_once_on_a_slow_disk(tiny: TinyFactory) -> None:
    """In a prompt, in an answer, and again after it: one batch of the prompt alone would take seconds."""
    path = tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)
    arguments = ["chat", "-m", str(path), "-md", "none", *OPTIONS, "-c", "512", "--ram", "4MiB"]
    env = PLAIN | {"DISK_BYTES_PER_S": "3e6"}
    with Terminal(arguments, env=env, module="tests.support.slow_disk") as terminal:
        terminal.expect(PROMPT)
        for line, wait_s in (("tell me about " * 20, 0.7), ("go on", 2.0), ("tell me about " * 20, 0.7)):
            terminal.type(line + "\r")
            time.sleep(wait_s)
            before = terminal.text.count("stopped")
            start_s = time.monotonic()
            terminal.type("\x03")
            terminal.expect("stopped", PROMPT)
            assert time.monotonic() - start_s < 0.6, "a share of it is the terminal's"
            assert terminal.text.count("stopped") == before + 1
            assert "failed" not in terminal.text and "Traceback" not in terminal.text
        terminal.leave()


@pytest.mark.parametrize(
    ("rows", "command", "shown"),
    [
        (40, ["bench", "-p", "16", "-r", "2"], ["━", "| pp16"]),
        pytest.param(5, ["bench", "-p", "16", "-r", "2"], ["| pp16"], marks=pytest.mark.slow),
        (40, ["profile", "--layer", "1", "-p", "hello"], ["profiling", "layer 1: 16 experts"]),
    ],
)
def test_progress_is_a_bar_where_it_fits(rows: int, command: list[str], shown: list[str], tiny_moe: Path) -> None:
    """It is there while a command works; only the result stays."""
    env = {"TERM": "xterm", "LANG": "C.UTF-8", "PYTHONIOENCODING": "utf-8"}
    with Terminal([*command, "-m", str(tiny_moe), "-md", "none", "-n", "8", "-t", "1"], env=env, rows=rows) as terminal:
        assert terminal.wait() == 0, terminal.text
        assert all(text in terminal.text for text in shown)
        assert rows == 40 or "━" not in terminal.text


def shown(cast: Path) -> str:
    """The text of a recording."""
    header, *events = [json.loads(line) for line in cast.read_text(encoding="utf-8").splitlines()]
    assert header["version"] == 2 and header["width"] == record_start.COLUMNS
    times_s = [event[0] for event in events]
    assert times_s == sorted(times_s)
    return "".join(event[2] for event in events)


def test_the_recording_shows_every_command() -> None:
    text = shown(Path(record_start.__file__).parent / "start.cast")
    assert "Traceback" not in text and "error:" not in text
    for command in record_start.COMMANDS:
        assert command.line in text
        assert all(message in text for message, _ in command.messages)
