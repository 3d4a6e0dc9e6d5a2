"""Word wrap of growing text."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.cells import cell_len

from moeedge.ui.chat.stream import complete_end, wrap_rows

LINES = st.text(alphabet="ab é你-", max_size=40)


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
