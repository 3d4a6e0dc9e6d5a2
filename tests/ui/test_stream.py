"""Streaming text to pipes and terminals; word wrap of growing text."""

from __future__ import annotations

import io
import os
import pty
import re
import sys
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from moeedge.ui.chat.live import LiveView
from moeedge.ui.chat.settings import Look
from moeedge.ui.chat.stream import PlainView, complete_end, wrap_rows
from moeedge.ui.console import supports_panel, visible
from tests.ui.test_figures import INFO, STATS
from tests.ui.test_live import view_on

LINES = st.text(alphabet="ab é你-", max_size=40)


def test_control_characters_become_visible() -> None:
    assert visible("a\x1b[31mb\tc\nd\x07\x7f\x9b") == "a␛[31mb\tc\nd␇␡\ufffd"


def test_a_pipe_gets_the_text_untouched() -> None:
    file = io.StringIO()
    with PlainView(Console(file=file, width=5)) as view:
        for piece in ("one two ", "three\x1b", " four"):
            view.write(piece)
    assert file.getvalue() == "one two three\x1b four\n"


def test_a_pipe_gets_each_piece_at_once() -> None:
    file = io.StringIO()
    with PlainView(Console(file=file)) as view:
        view.write("incompl")
        assert file.getvalue() == "incompl"


@given(st.lists(st.text(alphabet="ab é你-\n", max_size=9), max_size=8), st.integers(2, 12))
@settings(deadline=None)
def test_a_plain_terminal_gets_wrapped_words(pieces: list[str], columns: int) -> None:
    file = io.StringIO()
    with PlainView(Console(file=file, force_terminal=True, width=columns)) as view:
        for piece in pieces:
            view.write(piece)
    rows = [row.rstrip() for line in "".join(pieces).split("\n") for row in wrap_rows(line, columns)]
    assert file.getvalue().rstrip("\n") == "\n".join(rows).rstrip("\n")


def test_the_live_view_leaves_the_entire_text() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=80, height=24, color_system=None)
    words = [f"word{i} " for i in range(120)]
    with LiveView(console, INFO, lambda: STATS) as view:
        for word in words:
            view.write(word)
            time.sleep(0.002)
    shown = re.split(r"\x1b\[[0-9;?]*[A-Za-z]|\r", file.getvalue())
    rows = [row.rstrip() for row in wrap_rows("".join(words), 80)]
    lines = [line.rstrip() for part in shown for line in part.split("\n")]
    at = -1
    for row in rows:  # every row is there, in order
        at = lines.index(row, at + 1)
    assert any("drafts accepted 75 %" in line for line in lines)


@pytest.mark.skipif(sys.platform == "win32", reason="needs a pseudo-terminal")
@pytest.mark.parametrize(
    ("env", "columns", "rows", "live"),
    [
        ({}, 80, 24, True),
        ({}, 40, 24, True),
        ({}, 39, 24, False),
        ({}, 80, 9, False),
        ({"TERM": "dumb"}, 80, 24, False),
        ({"NO_COLOR": "1"}, 80, 24, False),
    ],
)
def test_which_terminals_get_a_panel(
    env: dict[str, str], columns: int, rows: int, live: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    master, slave = pty.openpty()
    with os.fdopen(slave, "w", encoding="utf-8") as stream:
        assert supports_panel(Console(file=stream, width=columns, height=rows)) is live
        console = Console(file=stream, width=columns, height=rows)
        with view_on(console, Look()) as view:
            assert isinstance(view, LiveView) is live
        with view_on(console, Look(), panel=False) as view:
            assert isinstance(view, PlainView)
    os.close(master)


def test_a_pipe_gets_no_panel() -> None:
    assert not supports_panel(Console(file=io.StringIO(), width=100, height=40))


@pytest.mark.parametrize(
    ("line", "columns", "rows"),
    [
        ("", 5, [""]),
        ("hello big world", 10, ["hello big ", "world"]),
        ("hello     world", 5, ["hello     ", "world"]),  # blanks at a row's end need no room
        ("abcdefghijkl m", 5, ["abcde", "fghij", "kl m"]),
        ("a abcdefg", 5, ["a ", "abcde", "fg"]),
        ("你好世界hello", 6, ["你好世", "界", "hello"]),
        ("  indented", 20, ["  indented"]),
    ],
)
def test_rows(line: str, columns: int, rows: list[str]) -> None:
    assert wrap_rows(line, columns) == rows


@given(LINES, st.integers(2, 12))
def test_rows_fit_and_lose_nothing(line: str, columns: int) -> None:
    rows = wrap_rows(line, columns)
    assert "".join(rows) == line
    assert all(cell_len(row.rstrip()) <= columns for row in rows)


@given(st.lists(LINES, max_size=8), st.integers(2, 12))
@settings(deadline=None)
def test_full_rows_never_change_while_text_grows(pieces: list[str], columns: int) -> None:
    shown: list[str] = []
    growing = ""
    for piece in pieces:
        *full, growing = wrap_rows(growing + piece, columns)
        shown += full
    expected = wrap_rows("".join(pieces), columns)
    assert [row.rstrip() for row in [*shown, growing]] == [row.rstrip() for row in expected]


@pytest.mark.parametrize(("line", "end"), [("", 0), ("one two", 4), ("one ", 4), ("one", 0), ("你好", 2)])
def test_where_the_last_complete_word_ends(line: str, end: int) -> None:
    assert complete_end(line) == end
