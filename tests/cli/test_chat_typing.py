"""What is typed while the chat computes, and Ctrl-C in a long prompt, in a pseudo-terminal."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import TinyFactory

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import PROMPT, Terminal

PLAIN = {"TERM": "dumb"}
OPTIONS = ("-md", "none", "-t", "1", "--temp", "0")


def test_what_is_typed_during_an_answer_is_not_sent(tiny: TinyFactory) -> None:
    path = tiny("qwen3moe", layers=6, embd=256, experts=16, expert_ff=512)
    with Terminal(["chat", "-m", str(path), *OPTIONS, "-c", "8192", "--context-shift"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.type("tell me\r")
        terminal.expect("\n")
        time.sleep(0.5)  # the answer is under way
        terminal.type("and more\r")
        time.sleep(0.1)
        terminal.send(signal.SIGINT)  # Ctrl-C itself makes the terminal forget what was typed before it
        terminal.expect("stopped", PROMPT)
        terminal.type("/stats\r")
        terminal.expect("experts on", PROMPT)
        assert "all 2 answers" not in terminal.text
        assert "and more" not in terminal.text
        terminal.leave()


def test_ctrl_c_in_a_long_prompt(tiny: TinyFactory, tmp_path: Path) -> None:
    path = tiny("qwen3moe", layers=4, embd=512, experts=32, expert_ff=1024)
    text = tmp_path / "long.txt"
    text.write_text("abcdefgh " * 900)
    with Terminal(["chat", "-m", str(path), *OPTIONS, "-c", "16384", "-n", "4"], env=PLAIN) as terminal:
        terminal.expect(PROMPT)
        terminal.ask(f"/read {text}", "characters read")
        terminal.type("what is it?\r")
        terminal.expect("\n")
        time.sleep(0.5)
        terminal.type("nobody reads this\r")
        time.sleep(0.1)
        start_s = time.monotonic()
        terminal.send(signal.SIGINT)
        terminal.expect("stopped")
        assert time.monotonic() - start_s < 0.6  # the line is printed afterwards, by a busy machine
        terminal.expect(PROMPT)
        assert " kept" not in terminal.text.split("what is it?")[1], "nothing was in the KV cache before"
        assert "of the prompt" in terminal.text
        terminal.ask("/stats", "experts on")
        assert "nobody" not in terminal.text
        terminal.leave()
