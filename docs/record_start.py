"""Records the first minutes with moeedge in a real terminal: `python -m docs.record_start`, in the top folder.

start.cast: an asciicast (`asciinema play docs/start.cast`) with the times as they were. Every command runs as it is
shown, on this machine, by the moeedge that is installed next to this Python, with an empty home. start.svg, the same as
an animated picture with long waits shortened, is made from it by termtosvg (PyPI):

    termtosvg render docs/start.cast docs/start.svg -t gjm8 -m 200 -M 2000 -D 2000
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.cli.terminal import PROMPT, Terminal

FOLDER = Path(__file__).parent
COLUMNS, ROWS = 100, 30
SHELL_PROMPT = "$ "
TIMEOUT_S = 300.0
KEY_S = 0.04  # between two typed characters
PAUSE_S = 1.5  # after each command, to read


@dataclass(frozen=True)
class Command:
    """A line typed to the shell, and what is typed to the program that it starts."""

    line: str
    messages: Sequence[tuple[str, str]] = ()  # to the chat, and the end of what it shows then


COMMANDS = (
    Command("moeedge doctor"),
    Command(
        "moeedge chat",
        (
            ("Tell me a short story about an owl.", "accepted"),
            ("What is 12 + 30?", "accepted"),
            ("/stats", "the rest"),
            ("/help", "Stops an answer"),
            ("/exit", ""),
        ),
    ),
    Command("moeedge chat -q -p 'What is the capital of France?'"),
    Command("moeedge bench --dataset toy --limit 7 -r 2"),
    Command("moeedge list --all --fits 12G"),
    Command("moeedge plan --offline -m qwen3-30b-a3b --vram 12GB"),
)


def record(commands: Sequence[Command]) -> list[tuple[float, str]]:
    """Types the commands into a shell. Returns what the terminal showed: seconds from the start, and text."""
    with tempfile.TemporaryDirectory() as home:
        scripts = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        # nothing else of this shell's settings
        settings = {"HOME": home, "PATH": scripts, "PS1": SHELL_PROMPT, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
        shell = ["env", "-i", *(f"{name}={value}" for name, value in settings.items()), "bash", "--noprofile", "--norc"]
        with Terminal((), env={}, columns=COLUMNS, rows=ROWS, program=shell, timeout_s=TIMEOUT_S) as terminal:
            begin_s = time.monotonic()
            terminal.expect(SHELL_PROMPT)
            for command in commands:
                _type(terminal, command.line)
                for message, shown in command.messages:
                    terminal.expect(PROMPT)
                    terminal.rest(PAUSE_S)
                    _type(terminal, message)
                    terminal.expect(shown)
                terminal.expect("\n" + SHELL_PROMPT)
                terminal.rest(PAUSE_S)
            return [(at_s - begin_s, text.replace(home, "~")) for at_s, text in terminal.events]


def _type(terminal: Terminal, line: str) -> None:
    for key in line:
        terminal.type(key)
        terminal.rest(KEY_S)
    terminal.type("\r")


def write_cast(events: Sequence[tuple[float, str]], path: Path) -> None:
    """An asciicast, version 2: a header, then a line per event."""
    header = {"version": 2, "width": COLUMNS, "height": ROWS, "title": "The first minutes with moeedge"}
    lines = [json.dumps(header)] + [json.dumps([round(at_s, 3), "o", text]) for at_s, text in events]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_cast(record(COMMANDS), FOLDER / "start.cast")
