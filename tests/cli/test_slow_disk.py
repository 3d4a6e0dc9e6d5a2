"""Ctrl-C in the chat while an answer waits for a slow disk."""

from __future__ import annotations

import sys
import time

import pytest

from tests.conftest import TinyFactory

if sys.platform == "win32":
    pytest.skip("needs a pseudo-terminal", allow_module_level=True)

from tests.cli.terminal import PROMPT, Terminal


@pytest.mark.slow
def test_ctrl_c_takes_effect_at_once(tiny: TinyFactory) -> None:
    """In a prompt, in an answer, and again after it: one batch of the prompt alone would take seconds."""
    path = tiny("qwen3moe", layers=4, embd=256, experts=64, expert_ff=256)
    arguments = ["chat", "-m", str(path), "-md", "none", "-t", "1", "-c", "512", "--temp", "0", "--ram", "4MiB"]
    env = {"TERM": "dumb", "DISK_BYTES_PER_S": "3e6"}
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
