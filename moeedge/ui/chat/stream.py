"""A streaming answer: Markdown, thinking apart from the rest, rows that never change once full, the plain view."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console
from rich.style import Style
from rich.syntax import Syntax

from moeedge.llama.reasoning import ReasoningTags, n_begun
from moeedge.units import visible

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
    """Styles Markdown, line by line.

    A line never changes on the screen once it is certain (`StyledLine.n_certain`), so that full rows may scroll away: a
    marker counts only if its other half follows within MAX_SPAN characters, and until then its text is not certain.
    Styled are headings, bold and italic text, code, lists and quotes; the text itself is not touched.
    """

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


TAB = 4
# a word with the blanks after it; scripts written without blanks may break after every character
_WIDE = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_WORD = re.compile(rf"[{_WIDE}]\s*|[^\s{_WIDE}]+\s*|\s+")


def wrap_rows(line: str, columns: int) -> list[str]:
    """One line of text (no newline) in rows of at most `columns` terminal cells, not counting blanks at their ends.

    The joined rows equal the line. A word longer than a row begins a new row and is cut. There is at least one row.
    """
    rows = [""]
    for word in _WORD.findall(line):
        if cell_len(rows[-1] + word.rstrip()) <= columns or not word.strip():
            rows[-1] += word
            continue
        pieces = chop_cells(word.rstrip(), columns) if cell_len(word.rstrip()) > columns else [word.rstrip()]
        pieces[-1] += word[len(word.rstrip()) :]
        rows = (rows if rows != [""] else []) + pieces
    return rows


def complete_end(line: str) -> int:
    """The end of the last word of `line` that cannot grow any more."""
    words = _WORD.findall(line)
    if not words or words[-1][-1].isspace() or re.fullmatch(f"[{_WIDE}]", words[-1]):
        return len(line)
    return len(line) - len(words[-1])


class Part(NamedTuple):
    is_thinking: bool
    text: str


class ThinkingSplitter:
    """Tells thinking from answer in pieces of text, as `moeedge.llama.reasoning.split_reasoning` does in all of it.

    Thinking begins at the start of the text only, where it has the start tag, or at once with `is_open`. Tags belong to
    the thinking. The parts' texts joined are the text: what may be the beginning of a tag waits for the next piece.
    n_tokens: reads how many tokens the answer has so far; with it thinking is left out, and a line tells of it.
    """

    def __init__(
        self, tags: ReasoningTags | None, *, is_open: bool = False, n_tokens: Callable[[], int] | None = None
    ) -> None:
        self._start, self._end = (tags.start, tags.end) if tags else ("", "")
        self._held = ""
        self.is_thinking = is_open and tags is not None  # whether the newest text is
        self._may_begin = tags is not None and not is_open  # no text but blanks so far
        # of thinking that is left out
        self._read_tokens = n_tokens
        self._start_s = 0.0
        self._figures = ""
        self._has_thought = False  # with any text but tags and blanks
        self._is_told = False
        self._text_begins = True  # blanks between thinking and answer are left out, too

    @property
    def line(self) -> str:
        """About thinking that is left out, so far; empty if there is none."""
        if not self._start_s:  # nothing has been written yet
            return ""
        if self.is_thinking:
            self._measure()
            return f"thinking... {self._figures}"
        return f"thought for {self._figures}" if self._has_thought else ""

    def news(self, *, is_last: bool = False) -> str:
        """The line, once, as soon as thinking that is left out has ended; is_last: no more text comes."""
        line = self.line
        if self._is_told or not line or (self.is_thinking and not is_last):
            return ""
        self._is_told = True
        return f"thought for {self._figures}, no answer yet" if self.is_thinking else line

    def feed(self, piece: str, *, is_last: bool = False) -> list[Part]:
        """The parts that are certain with this piece; is_last: all that are left."""
        parts = list(self._split(piece, is_last=is_last))
        if self._read_tokens is None:
            return parts
        for thought in [part.text for part in parts if part.is_thinking]:
            self._start_s = self._start_s or time.monotonic()
            self._has_thought |= bool(thought.replace(self._start, "").replace(self._end, "").strip())
            self._measure()
        answer = "".join(part.text for part in parts if not part.is_thinking)
        if self._text_begins and self._start_s:
            answer = answer.lstrip()
        self._text_begins &= not answer
        return [Part(False, answer)] if answer else []

    def _split(self, piece: str, *, is_last: bool) -> Iterator[Part]:
        self._held += piece
        if self._may_begin:
            begun = self._held.lstrip()
            if not is_last and begun != self._start and self._start.startswith(begun):
                return  # also blanks alone
            self._may_begin = False
            self.is_thinking = begun.startswith(self._start)
        if self.is_thinking:
            thought, found, rest = self._held.partition(self._end)
            if not found:
                n_waiting = 0 if is_last else n_begun(self._held, self._end)
                thought = self._held[: len(self._held) - n_waiting]
                self._held = self._held[len(thought) :]
                if thought:
                    yield Part(True, thought)
                return
            yield Part(True, thought + found)
            self.is_thinking, self._held = False, rest
        if self._held:
            yield Part(False, self._held)
        self._held = ""

    def _measure(self) -> None:
        n_tokens = self._read_tokens() if self._read_tokens else 0
        self._figures = f"{time.monotonic() - self._start_s:.0f} s, {n_tokens:,} token{'s' * (n_tokens != 1)}"


class PlainView:
    """Writes each piece at once and ends the answer with a newline.

    On a terminal it wraps lines between words, so that a word waits for its end, and shows control characters.
    thinking: leaves it out; on a terminal a line says so.
    """

    def __init__(self, console: Console, thinking: ThinkingSplitter | None = None) -> None:
        self._console, self._stream = console, console.file
        self._thinking = thinking or ThinkingSplitter(None)
        self._row = ""  # text of the terminal's last row
        self._word = ""  # not shown yet
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            self.write("", is_last=True)
            self._wrap(self._word + "\n" if self._row or self._word else "")
            if self._last and not self._last.endswith("\n") and not self._console.is_terminal:
                self._stream.write("\n")
            self._stream.flush()

    def write(self, piece: str, *, is_last: bool = False) -> None:
        """Append `piece`; is_last: and what waited for more."""
        text = "".join(part.text for part in self._thinking.feed(piece, is_last=is_last))
        if self._console.is_terminal and (news := self._thinking.news(is_last=is_last)):
            self._wrap(f"({news})\n")
        if not text:
            return
        self._last = text
        if self._console.is_terminal:
            self._wrap(self._word + visible(text))
        else:
            self._stream.write(text)
        self._stream.flush()

    def _wrap(self, text: str) -> None:
        *lines, last = text.expandtabs(TAB).split("\n")
        for line in lines:
            self._write_words(line)
            self._stream.write("\n")
            self._row = ""
        end = complete_end(last)
        self._write_words(last[:end])
        self._word = last[end:]

    def _write_words(self, words: str) -> None:
        """Write complete words after the last row, in new rows where they do not fit; blanks at a row's end wait."""
        first, *others = wrap_rows(self._row + words, self._console.width)
        self._stream.write(first.rstrip()[len(self._row.rstrip()) :])
        for row in others:
            self._stream.write("\n" + row.rstrip())
        self._row = others[-1] if others else first
