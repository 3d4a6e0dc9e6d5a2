"""Markdown of an answer: what is styled, and that nothing changes which was certain."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rich.style import Style

from moeedge.ui.chat.stream import MAX_SPAN, MarkdownLines, PlainLines, StyledLine

ALPHABET = "ab 1*_`#->~.\\(\u4f60"


def shown(line: str, before: tuple[str, ...] = ()) -> list[tuple[str, str]]:
    """Texts and styles of a line, neighbours of one style joined."""
    styler = MarkdownLines()
    for earlier in before:
        styler.end(earlier)
    joined: list[tuple[str, str]] = []
    for text, style in styler.end(line).segments:
        if joined and joined[-1][1] == str(style):
            joined[-1] = (joined[-1][0] + text, str(style))
        else:
            joined.append((text, str(style)))
    return joined


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
        *(
            (text, [(text, "none")])
            for text in ("2**3 a**b", "5 * 3 * 2", "a_b_c", "**open", "`open", "* ", "| a | b |")
        ),
        *(
            (text, [(text, "none")])
            for text in ("use __init__ here", r"\*not\*", r"\`not\`", "f(*x, *y)", "def f(self, *a, **k): b * c")
        ),
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


def test_text_in_one_style() -> None:
    styler = PlainLines(Style(dim=True))
    assert styler.show("**a") == styler.end("**a") == StyledLine([("**a", Style(dim=True))], 3)


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
