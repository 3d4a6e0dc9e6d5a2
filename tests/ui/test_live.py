"""The live view on an emulated terminal: Markdown, thinking, windows of changing width."""

from __future__ import annotations

import io
import re
import time
from contextlib import AbstractContextManager
from types import SimpleNamespace
from typing import Any

import pyte
import pytest
from rich.console import Console

from moeedge.llama.reasoning import ReasoningTags
from moeedge.ui.chat import live
from moeedge.ui.chat.interrupt import Interrupt
from moeedge.ui.chat.live import LiveView
from moeedge.ui.chat.settings import Look
from moeedge.ui.chat.single import CacheMeter, answer_view
from moeedge.ui.chat.stream import MarkdownLines, PlainView, ThinkingSplitter, wrap_rows
from moeedge.ui.figures import FigureRow, live_figures
from tests.ui.test_figures import INFO, STATS

TAGS = ReasoningTags("<think>", "</think>")


def view_on(
    console: Console, look: Look, *, tags: ReasoningTags | None = None, panel: bool = True
) -> AbstractContextManager[LiveView | PlainView]:
    """The view of an answer without an engine."""
    answer: Any = SimpleNamespace(
        reasoning_tags=tags, begins_in_reasoning=False, stats=STATS, state=SimpleNamespace(n_cached=None)
    )
    session: Any = SimpleNamespace(run=SimpleNamespace(show=None), placement_stats=lambda: None)
    return answer_view(answer, INFO, CacheMeter(session), Interrupt(), out=console, look=look, panel=panel)


TEXT = """# Title

Some **bold words that cross the end of a row of the window** and `code`, and **open to the end.

- one
- two

```python
def f(x):
    return "a string"  # and a comment that is longer than a row
```
The end."""


def shown_figures() -> list[FigureRow]:
    return live_figures(INFO, STATS, elapsed_s=1.0)


def view_of(file: io.StringIO, look: Look | None = None, thinking: ThinkingSplitter | None = None) -> LiveView:
    console = Console(file=file, force_terminal=True, width=40, height=24, color_system="standard")
    thinking = thinking or ThinkingSplitter(TAGS, n_tokens=lambda: 12)
    return LiveView(console, shown_figures, look=look or Look(), thinking=thinking)


def written(text: str, **given: Any) -> io.StringIO:
    """What the view writes of this text, which may be cut off."""
    file = io.StringIO()
    with view_of(file, **given) as view:
        view.write(text)
    return file


def screen_after(file: io.StringIO) -> pyte.HistoryScreen:
    screen = pyte.HistoryScreen(40, 24, history=1000)
    screen.set_mode(pyte.modes.LNM)  # a newline returns to the first column, as in a terminal
    pyte.Stream(screen).feed(file.getvalue())
    return screen


def lines_after(file: io.StringIO) -> list[str]:
    """All lines that are not empty."""
    screen = screen_after(file)
    above = ["".join(row[x].data for x in range(screen.columns)) for row in screen.history.top]
    return [line.rstrip() for line in [*above, *screen.display] if line.strip()]


@pytest.mark.parametrize("n_characters", [1, 7, 1000])
def test_text_that_streams_ends_up_as_the_entire_text(n_characters: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "REPAINT_S", 0.001)
    file = io.StringIO()
    with view_of(file) as view:
        for at in range(0, len(TEXT), n_characters):
            view.write(TEXT[at : at + n_characters])
            time.sleep(0.003 if n_characters > 1 else 0.0005)
    styler = MarkdownLines()
    expected = [row.rstrip() for line in TEXT.split("\n") for row in wrap_rows(styler.end(line).text, 40)]
    assert lines_after(file) == [row for row in expected if row]


def test_styles_reach_the_terminal() -> None:
    screen = screen_after(written(TEXT))
    assert screen.buffer[0][0].bold and screen.buffer[0][0].underscore  # the title
    row = next(y for y in range(24) if "def f" in screen.display[y])
    assert screen.buffer[row][0].fg not in ("default", screen.buffer[row][screen.display[row].index("(")].fg)


@pytest.mark.parametrize(("markdown", "shown"), [(True, "a bold b"), (False, "a **bold** b")])
def test_markdown_can_be_switched_off(markdown: bool, shown: str) -> None:
    assert lines_after(written("a **bold** b", look=Look(markdown=markdown))) == [shown]


def test_thinking_is_one_line() -> None:
    file = io.StringIO()
    with view_of(file) as view:
        view.write("<think>\nlet me see\n")
        time.sleep(0.3)
        assert "thinking... 0 s, 12 tokens" in file.getvalue()
        view.write("</think>\n\nIt is 4.")
    assert lines_after(file) == ["thought for 0 s, 12 tokens (/set", "show_thinking on)", "It is 4."]
    assert "let me see" not in file.getvalue()
    file = written("<think>\nlet me see")
    assert lines_after(file) == ["thought for 0 s, 12 tokens, no answer", "yet (/set show_thinking on)"]


def test_thinking_can_be_shown() -> None:
    file = written("<think>\nlet **me** see\n</think>\n\nIt **is** 4.", thinking=ThinkingSplitter(TAGS))
    assert lines_after(file) == ["<think>", "let **me** see", "</think>", "It is 4."]


@pytest.mark.parametrize(
    ("thinking", "text"), [("auto", "<think>hm</think>\n\n4\n"), ("on", "<think>hm</think>\n\n4\n"), ("off", "4\n")]
)
def test_a_pipe_gets_the_text_as_written_unless_folding_is_asked_for(thinking: str, text: str) -> None:
    file = io.StringIO()
    look = Look(show_thinking=thinking)  # type: ignore[arg-type]
    with view_on(Console(file=file), look, tags=TAGS) as view:
        assert isinstance(view, PlainView)
        for character in "<think>hm</think>\n\n4":
            view.write(character)
    assert file.getvalue() == text


def test_a_terminal_that_is_not_repainted_folds_too() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40)
    with PlainView(console, ThinkingSplitter(TAGS, n_tokens=lambda: 12)) as view:
        view.write("<think>hm</think>\n\nIt is **4**.")
    assert file.getvalue() == "(thought for 0 s, 12 tokens)\nIt is **4**.\n"


@pytest.mark.parametrize("cuts", [False, True])
def test_a_narrower_window_gets_its_region_back(cuts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The old region, whose rows were broken in two or cut, is erased; a new one comes when the width stays."""
    monkeypatch.delenv("XTERM_VERSION", raising=False)
    monkeypatch.setenv("STY", "1" if cuts else "")
    monkeypatch.setattr(live, "SETTLE_S", 0.2)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    view = LiveView(console, shown_figures)
    view.write("some words that grow")
    view._paint()
    n_wide = len(view._region)
    console.width = 40
    file.truncate(0)
    view._paint()
    [n_above] = re.findall(r"\x1b\[(\d+)A", file.getvalue())
    assert int(n_above) == 1 + (1 if cuts else 2) * (n_wide - 1)  # a short row of text and the panel's
    assert view._region == []
    time.sleep(0.25)
    view._paint()
    assert view._region[0] == len("some words that grow") and max(view._region) == 40
