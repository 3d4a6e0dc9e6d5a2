"""Records the first minutes with moeedge in a real terminal: `python -m docs.record_start`, in the top folder.

start.cast: an asciicast (`asciinema play docs/start.cast`) with the times as they were. start.svg: the same as an
animated picture, with long waits shortened. Every command runs as it is shown, on this machine, by the moeedge that is
installed next to this Python, with an empty home.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

import pyte

from tests.cli.terminal import PROMPT, Terminal

FOLDER = Path(__file__).parent
COLUMNS, ROWS = 100, 30
SHELL_PROMPT = "$ "
TIMEOUT_S = 300.0
KEY_S = 0.04  # between two typed characters
PAUSE_S = 1.5  # after each command, to read
LONGEST_PAUSE_S, FRAME_S = 2.0, 0.2  # of the picture
REPAINT_S = 0.01  # events closer to each other belong together
CHARACTER_W, ROW_H, MARGIN = 8.4, 18, 12
FONTS = "ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace"
PAPER, INK = "#1c1e22", "#d8dbe0"
COLOURS = {
    "black": "#5c6370",
    "red": "#e0707a",
    "green": "#98c379",
    "brown": "#e5c07b",  # pyte's name for ANSI yellow
    "blue": "#61afef",
    "magenta": "#c678dd",
    "cyan": "#56b6c2",
    "white": "#d8dbe0",
    "brightblack": "#8a92a0",
}


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


def write_svg(events: Sequence[tuple[float, str]], path: Path) -> None:
    """The screens as frames of a strip that moves past a window; each distinct row is stored once."""
    frames = _frames(events)
    rows: dict[str, int] = {}
    width, height = COLUMNS * CHARACTER_W + 2 * MARGIN, ROWS * ROW_H + 2 * MARGIN
    placed = []
    for i, (_at_s, screen) in enumerate(frames):
        uses = [
            f'<use href="#r{rows.setdefault(row, len(rows))}" y="{y * ROW_H}"/>' for y, row in enumerate(screen) if row
        ]
        placed.append(f'<g transform="translate({i * width:g})">{"".join(uses)}</g>')
    total_s = frames[-1][0] + LONGEST_PAUSE_S
    steps = "".join(
        f"{100 * at_s / total_s:.2f}%{{transform:translateX(-{i * width:g}px)}}" for i, (at_s, _) in enumerate(frames)
    )
    defined = "".join(f'<text id="r{i}">{row}</text>' for row, i in rows.items())
    path.write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}">'
        f"<style>@keyframes play{{{steps}}} .strip{{animation:play {total_s:.1f}s steps(1,end) infinite}}"
        f"text{{font:14px {FONTS};fill:{INK};white-space:pre}}.b{{font-weight:bold}}</style>"
        f'<defs>{defined}</defs><rect width="100%" height="100%" rx="6" fill="{PAPER}"/>'
        f'<g transform="translate({MARGIN},{MARGIN + ROW_H - 4})"><g class="strip">{"".join(placed)}</g></g></svg>\n',
        encoding="utf-8",
    )


def _frames(events: Sequence[tuple[float, str]]) -> list[tuple[float, list[str]]]:
    """Times in s, with long pauses shortened, and the screen's rows as SVG text; at most one each FRAME_S."""
    screen = pyte.Screen(COLUMNS, ROWS)
    stream = pyte.Stream(screen)
    frames: list[tuple[float, list[str]]] = []
    at_s = before_s = 0.0
    for i, (event_s, text) in enumerate(events):
        at_s += min(event_s - before_s, LONGEST_PAUSE_S)
        before_s = event_s
        stream.feed(text)
        is_last = i + 1 == len(events)
        if not is_last and events[i + 1][0] - event_s < REPAINT_S:  # a part of one repaint
            continue
        if not is_last and frames and at_s - frames[-1][0] < FRAME_S:
            continue
        rows = [_row(screen, y) for y in range(ROWS)]
        if not frames or rows != frames[-1][1]:
            frames.append((at_s, rows))
    return frames


def _row(screen: pyte.Screen, y: int) -> str:
    """A row of the screen as spans of one style each."""
    spans: list[tuple[tuple[str, bool], str]] = []
    for x in range(COLUMNS):
        cell = screen.buffer[y][x]
        style = (cell.fg, cell.bold)
        if spans and spans[-1][0] == style:
            spans[-1] = (style, spans[-1][1] + cell.data)
        else:
            spans.append((style, cell.data))
    if spans and spans[-1][0] == ("default", False):
        spans[-1] = (spans[-1][0], spans[-1][1].rstrip())
    return "".join(_span(text, *style) for style, text in spans if text)


def _span(text: str, colour: str, bold: bool) -> str:
    if colour == "default" and not bold:
        return f"<tspan>{escape(text)}</tspan>"
    fill = COLOURS.get(colour, INK if colour == "default" else f"#{colour}")
    weight = ' class="b"' if bold else ""
    return f'<tspan fill="{fill}"{weight}>{escape(text)}</tspan>'


if __name__ == "__main__":
    recorded = record(COMMANDS)
    write_cast(recorded, FOLDER / "start.cast")
    write_svg(recorded, FOLDER / "start.svg")
