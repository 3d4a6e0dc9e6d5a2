"""Streaming text to pipes and terminals: word wrap, thinking apart from the answer, and Markdown, in growing text."""

from __future__ import annotations

import io
import os
import pty
from itertools import groupby

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from moeedge.llama.reasoning import ReasoningTags, split_reasoning
from moeedge.ui.chat.live import LiveView
from moeedge.ui.chat.settings import Look
from moeedge.ui.chat.stream import MAX_SPAN, MarkdownLines, PlainView, ThinkingSplitter, wrap_rows
from moeedge.ui.console import supports_panel, visible
from tests.ui.test_live import view_on

LINES = st.text(alphabet="ab é你-", max_size=40)
UNTOUCHED = (
    *("2**3 a**b", "5 * 3 * 2", "a_b_c", "**open", "`open", "* ", "| a | b |", "use __init__ here", r"\*not\*"),
    *(r"\`not\`", "f(*x, *y)", "def f(self, *a, **k): b * c"),
)
TAGS = ReasoningTags("<think>", "</think>")
ALPHABET = "ab 1*_`#->~.\\(\u4f60"  # of Markdown
WORDS = st.lists(
    st.sampled_from(["<think>", "</think>", "<th", "ink>", "</", "a", " ", "\n", "<", "think>"]), max_size=8
)


def test_control_characters_become_visible() -> None:
    assert visible("a\x1b[31mb\tc\nd\x07\x7f\x9b") == "a␛[31mb\tc\nd␇␡\ufffd"


def test_a_pipe_gets_the_text_untouched_and_at_once() -> None:
    file = io.StringIO()
    with PlainView(Console(file=file, width=5)) as view:
        for piece in ("one two ", "three\x1b", " four"):
            view.write(piece)
            assert file.getvalue().endswith(piece)
    assert file.getvalue() == "one two three\x1b four\n"
    assert not supports_panel(Console(file=io.StringIO(), width=100, height=40))


@given(st.lists(st.text(alphabet="ab é你-\n", max_size=9), max_size=8), st.integers(2, 12))
@settings(deadline=None)
def test_a_plain_terminal_gets_wrapped_words(pieces: list[str], columns: int) -> None:
    file = io.StringIO()
    with PlainView(Console(file=file, force_terminal=True, width=columns)) as view:
        for piece in pieces:
            view.write(piece)
    rows = [row.rstrip() for line in "".join(pieces).split("\n") for row in wrap_rows(line, columns)]
    assert file.getvalue().rstrip("\n") == "\n".join(rows).rstrip("\n")


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


@pytest.mark.parametrize("is_open", [False, True])
@given(words=WORDS, cuts=st.lists(st.integers(1, 4), max_size=30))
def test_pieces_are_split_as_the_entire_text(is_open: bool, words: list[str], cuts: list[int]) -> None:
    text = "".join(words)
    splitter = ThinkingSplitter(TAGS, is_open=is_open)
    parts, at = [], 0
    for cut in [*cuts, len(text)]:
        parts += splitter.feed(text[at : at + cut])
        at += cut
    parts += splitter.feed("", is_last=True)
    assert "".join(part.text for part in parts) == text
    thinking = "".join(part.text for part in parts if part.is_thinking)
    answer = "".join(part.text for part in parts if not part.is_thinking)
    starts = text.lstrip().startswith(TAGS.start)
    if starts or is_open:
        assert answer == text.partition(TAGS.end)[2]
        if starts and not is_open:
            assert split_reasoning(text, TAGS).content == answer.lstrip()
    else:
        assert (thinking, answer) == ("", text)


def fed(folded: ThinkingSplitter, piece: str, *, is_last: bool = False) -> str:
    return "".join(part.text for part in folded.feed(piece, is_last=is_last))


def test_folded_thinking_is_counted() -> None:
    n_tokens = 0
    folded = ThinkingSplitter(TAGS, n_tokens=lambda: n_tokens)
    assert folded.line == ""
    n_tokens = 120
    assert fed(folded, "<think>\nhm") == ""
    assert folded.is_thinking and folded.line == "thinking... 0 s, 120 tokens"
    n_tokens = 150
    assert fed(folded, "</think>\n\nIt is") == "It is"
    n_tokens = 200
    assert fed(folded, " \n\n4", is_last=True) == " \n\n4"
    assert folded.line == "thought for 0 s, 150 tokens"


def test_where_nothing_was_thought_there_is_no_line() -> None:
    folded = ThinkingSplitter(TAGS, n_tokens=lambda: 1, is_open=True)  # the prompt is being read
    assert folded.is_thinking and folded.line == ""
    fed(folded, "hm")
    assert folded.line.startswith("thinking... 0 s, 1 token")
    folded = ThinkingSplitter(TAGS, n_tokens=lambda: 3)  # of a model that is told not to think
    assert (fed(folded, "<think>\n\n</think>\n\n4"), folded.line) == ("4", "")
    folded = ThinkingSplitter(TAGS, n_tokens=lambda: 3)
    assert (fed(folded, "\n <") + fed(folded, "b>", is_last=True), folded.line) == ("\n <b>", "")


def shown(line: str, before: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Texts and styles of a line, neighbours of one style joined."""
    styler = MarkdownLines()
    for earlier in before:
        styler.end(earlier)
    groups = groupby(styler.end(line).segments, key=lambda segment: str(segment[1]))
    return [("".join(text for text, _ in segments), style) for style, segments in groups]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("one **two** three", [("one ", "none"), ("two", "bold"), (" three", "none")]),
        ("*one* and _two_", [("one", "italic"), (" and ", "none"), ("two", "italic")]),
        ("**a `b` c**", [("a ", "bold"), ("b", "bold cyan"), (" c", "bold")]),
        ("f(*x) and *y*", [("f(*x) and ", "none"), ("y", "italic")]),
        ("`**a**`", [("**a**", "cyan")]),
        ("这是**重点**内容", [("这是", "none"), ("重点", "bold"), ("内容", "none")]),
        ("## Title", [("Title", "bold")]),
        ("# Title", [("Title", "bold underline")]),
        ("#hashtag", [("#hashtag", "none")]),
        ("  - item", [("  • item", "none")]),
        ("* **item**: x", [("• ", "none"), ("item", "bold"), (": x", "none")]),
        ("1. first", [("1. first", "none")]),
        ("> said", [("│ ", "dim"), ("said", "italic")]),
        ("---", [("---", "dim")]),
        ("```python", [("```python", "dim")]),
        *((text, [(text, "none")]) for text in UNTOUCHED),
        ("**" + "a" * (MAX_SPAN + 1) + "**", [("**" + "a" * (MAX_SPAN + 1) + "**", "none")]),
    ],
)
def test_what_is_styled(line: str, expected: list[tuple[str, str]]) -> None:
    assert shown(line) == expected


def test_code_is_coloured_and_its_text_stays() -> None:
    before = ("```python",)
    line = "def f(x):  # **no**"
    segments = shown(line, before)
    assert "".join(text for text, _ in segments) == line
    assert len({style for _, style in segments}) > 2
    inside_string = shown("def", (*before, 'text = """'))  # what came before decides
    assert inside_string != shown("def", before)
    assert shown("**x**", (*before, "pass", "```")) == [("x", "bold")]
    assert shown("**x**", ("```nolanguage",)) == [("**x**", "cyan")]


@pytest.mark.parametrize("before", [(), ("```python",), ("~~~",)])
@given(line=st.text(ALPHABET, max_size=24))
@example(line="**a** b")
@example(line="a *b*c d* e")
@example(line="``a`b``")
@settings(deadline=None)
def test_what_is_certain_never_changes(before: tuple[str, ...], line: str) -> None:
    styler = MarkdownLines()
    for earlier in before:
        styler.end(earlier)
    growing = [styler.show(line[:n]) for n in range(len(line) + 1)]
    last = styler.end(line)
    assert last.n_certain == len(last.text)
    final = [(character, style) for text, style in last.segments for character in text]
    for part in growing:
        characters = [(character, style) for text, style in part.segments for character in text]
        assert characters[: part.n_certain] == final[: part.n_certain]
        assert part.n_certain <= len(characters)


def test_most_of_a_line_is_certain_while_it_grows() -> None:
    """Otherwise full rows could not scroll away."""
    styler = MarkdownLines()
    assert styler.show("word " * 200).n_certain == 1000
    assert styler.show("**bold** " * 100).n_certain >= 480
    assert styler.show("**open " * 200).n_certain > 1400 - 2 * MAX_SPAN
