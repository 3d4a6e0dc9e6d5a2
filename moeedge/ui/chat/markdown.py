"""Markdown of an answer that streams, styled line by line.

A line never changes on the screen once it is certain (`StyledLine.n_certain`), so that full rows may scroll away: a
marker counts only if its other half follows within MAX_SPAN characters, and until then its text is not certain.
Styled are headings, bold and italic text, code, lists and quotes; the text itself is not touched.
"""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from rich.style import Style
from rich.syntax import Syntax

MAX_SPAN = 300  # characters between the two halves of a marker; of a line of code that is coloured
CONTEXT_LINES = 40  # of code that are read again for the colours of the next one
_PLAIN, _BOLD, _ITALIC, _DIM = Style(), Style(bold=True), Style(italic=True), Style(dim=True)
_CODE, _HEADING, _TITLE = Style(color="cyan"), Style(bold=True), Style(bold=True, underline=True)
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)")
_HEADING_LINE = re.compile(r" {0,3}(#{1,6})\s+(?=\S)")
_ITEM = re.compile(r"(\s*)[-*+]\s+(?=\S)")
_QUOTE = re.compile(r" {0,3}>\s?")
_RULE = re.compile(r"\s*([-*_])(\s*\1){2,}\s*")
_MAY_BEGIN_BLOCK = re.compile(r"[\s#>*+\-_=`~]*")  # what such a line is depends on what follows
_OPENERS = re.compile(r"(?<!\\)(?:(`+)|(\*\*|__|\*|_)(?=\S))")
_NAME = re.compile(r"__\w+__")  # as Python has them; not bold
_THEME = Syntax.get_theme("ansi_dark")  # the terminal's own colours

Segment = tuple[str, Style]


class StyledLine(NamedTuple):
    """A line as it is shown. n_certain: characters of it that cannot change any more."""

    segments: list[Segment]
    n_certain: int

    @property
    def text(self) -> str:
        """Without styles."""
        return "".join(text for text, _ in self.segments)


class PlainLines:
    """Styles the lines of a text in their order: shows text as it is, in one style."""

    def __init__(self, style: Style = _PLAIN) -> None:
        self._style = style

    def show(self, line: str) -> StyledLine:
        """A line whose end has not come yet."""
        return StyledLine([(line, self._style)], len(line))

    end = show  # an entire line; the next call is for the next line


class MarkdownLines(PlainLines):
    """Styles Markdown; see the module."""

    def __init__(self) -> None:
        super().__init__()
        self._fence = ""  # of the code block that is open
        self._lexer: Any = None  # Pygments', of the block's language; None: unknown
        self._code: list[str] = []

    def show(self, line: str) -> StyledLine:
        """A line whose end has not come yet; nothing of a line of code is certain, nor of what may begin a block."""
        if self._fence:
            return StyledLine([(line, _CODE)], 0 if len(line) < MAX_SPAN else len(line))
        if len(line) < MAX_SPAN and (_MAY_BEGIN_BLOCK.fullmatch(line) or _FENCE.match(line)):
            return StyledLine([(line, _PLAIN)], 0)
        return _block(line, is_complete=False)

    def end(self, line: str) -> StyledLine:
        """An entire line."""
        fence = _FENCE.match(line)
        if self._fence:
            if fence and fence[1].startswith(self._fence) and not line[fence.end(1) :].strip():
                self._fence = ""
                return StyledLine([(line, _DIM)], len(line))
            return StyledLine(self._highlight(line), len(line))
        if fence and "`" not in line[fence.end(1) :]:
            self._fence, self._code = fence[1], []
            self._lexer = Syntax("", fence[2]).lexer if fence[2] else None
            return StyledLine([(line, _DIM)], len(line))
        return _block(line, is_complete=True)

    def _highlight(self, line: str) -> list[Segment]:
        """A line of the open block in colours, which what came before it may decide."""
        if self._lexer is None or len(line) >= MAX_SPAN:
            self._code.clear()
            return [(line, _CODE)]
        self._code.append(line)
        n_before = sum(len(earlier) + 1 for earlier in self._code[:-1])
        segments: list[Segment] = []
        at, is_open = 0, False
        for kind, text in self._lexer.get_tokens("\n".join(self._code)):
            part = text[max(n_before - at, 0) : n_before + len(line) - at] if at < n_before + len(line) else ""
            at += len(text)
            if part:
                segments.append((part, _THEME.get_style_for_token(kind)))
                is_open = "String" in kind or "Comment" in kind
        if len(self._code) > CONTEXT_LINES and not is_open:
            self._code.clear()  # begin anew where no string or comment is open
        return segments if "".join(text for text, _ in segments) == line else [(line, _CODE)]


def _block(line: str, *, is_complete: bool) -> StyledLine:
    """A line outside code."""
    if _RULE.fullmatch(line):
        return StyledLine([(line, _DIM)], len(line) if is_complete else 0)
    head, style, start = [], _PLAIN, 0
    if match := _HEADING_LINE.match(line):
        style, start = _TITLE if len(match[1]) == 1 else _HEADING, match.end()
    elif match := _ITEM.match(line):
        head, start = [(f"{match[1]}• ", _PLAIN)], match.end()
    elif match := _QUOTE.match(line):
        head, style, start = [("│ ", _DIM)], _ITALIC, match.end()
    segments, n_certain = _spans(line[start:], style, is_complete=is_complete)
    return StyledLine(head + segments, sum(len(part) for part, _ in head) + n_certain)


def _spans(text: str, style: Style, *, is_complete: bool) -> tuple[list[Segment], int]:
    """The segments of a text, and how many of their characters are certain."""
    segments: list[Segment] = []
    at = 0  # of `text`: what is before is in `segments`
    n_certain = -1  # characters of `segments`; -1: all so far

    def shown() -> int:
        return sum(len(part) for part, _ in segments)

    for match in _OPENERS.finditer(text):
        if match.start() < at:
            continue
        marker, before = match[0], text[: match.start()][-1:]
        is_code = marker.startswith("`")
        if not is_code and before.isascii() and before.isalnum():
            continue  # within a word, as in 2**3 and snake_case; other scripts have no blanks
        segments.append((text[at : match.start()], style))
        if name := _NAME.match(text, match.start()):
            segments.append((name[0], style))
            at = name.end()
            continue
        inside, closing = match.end(), _closing(text, match)
        inner = style + (_CODE if is_code else _BOLD if len(marker) == 2 else _ITALIC)
        if closing is not None:
            content, end = text[inside : closing[0]], closing[1]
            if end == len(text) and not is_complete and n_certain < 0:
                n_certain = shown()
            segments += [(content, inner)] if is_code else _spans(content, inner, is_complete=True)[0]
            at = end
        elif not is_complete and len(text) - inside < MAX_SPAN:
            n_certain = shown() if n_certain < 0 else n_certain
            at = inside  # shown as if the other half came
            style = inner
            if is_code:
                break
        else:
            segments.append((marker, style))
            at = inside
    tail = text[at:]
    segments.append((tail, style))
    if n_certain < 0:
        n_open = 0 if is_complete else len(tail) - len(tail.rstrip("*_`"))
        n_certain = shown() - n_open
    return [segment for segment in segments if segment[0]], n_certain


def _closing(text: str, opener: re.Match[str]) -> tuple[int, int] | None:
    """Start and end of the other half of a marker; None where it does not follow."""
    marker, symbol = opener[0], re.escape(opener[0][0])
    if marker[0] == "`":
        pattern = rf"(?<!`){marker}(?!`)"
    else:
        once = rf"(?<![\s\\{symbol}]){symbol}(?!{symbol})" if len(marker) == 1 else rf"(?<![\s\\]){symbol}{symbol}"
        pattern = once + "(?![A-Za-z0-9])"
    match = re.compile(pattern).search(text, opener.end() + 1)
    if match is None or match.start() >= opener.end() + MAX_SPAN:
        return None
    if marker in ("*", "_"):  # unless another is the nearer one, as the second in "f(*x) and *y*"
        another = rf"(?<![\w\\{symbol}]){symbol}(?=[^\s{symbol}])"
        if re.search(another, text[opener.end() : match.start()]):
            return None
    return match.span()
