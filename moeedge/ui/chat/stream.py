"""A streaming answer: thinking apart from the rest, rows that never change once they are full, the plain view."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import NamedTuple

from rich.cells import cell_len, chop_cells
from rich.console import Console

from moeedge.llama.reasoning import ReasoningTags
from moeedge.ui.console import visible

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
    """A piece of an answer's text."""

    is_thinking: bool
    text: str


class ThinkingSplitter:
    """Tells thinking from answer in pieces of text, as `moeedge.llama.reasoning.split_reasoning` does in all of it.

    Thinking begins at the start of the text only, where it has the start tag, or at once with `is_open`. Tags belong to
    the thinking. The parts' texts joined are the text: what may be the beginning of a tag waits for the next piece.
    """

    line = ""  # about thinking that is left out

    def __init__(self, tags: ReasoningTags | None, *, is_open: bool = False) -> None:
        self._start, self._end = (tags.start, tags.end) if tags else ("", "")
        self._held = ""
        self.is_thinking = is_open and tags is not None  # whether the newest text is
        self._may_begin = tags is not None  # no text but blanks so far

    def news(self, *, is_last: bool = False) -> str:
        """The line of thinking that is left out, once, as soon as it has ended; is_last: no more text comes."""
        return ""

    def feed(self, piece: str, *, is_last: bool = False) -> Iterator[Part]:
        """The parts that are certain with this piece; is_last: all that are left."""
        self._held += piece
        if self._may_begin and not self.is_thinking:
            begun = self._held.lstrip()
            if not is_last and begun != self._start and self._start.startswith(begun):
                return  # also blanks alone
            self._may_begin = False
            self.is_thinking = begun.startswith(self._start)
        if self.is_thinking:
            self._may_begin = False
            thought, found, rest = self._held.partition(self._end)
            if not found:
                n_waiting = 0 if is_last else _overlap(self._held, self._end)
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


def _overlap(text: str, tag: str) -> int:
    """Length of the longest beginning of `tag` at the end of `text`."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if text.endswith(tag[:n])), 0)


class FoldedThinking(ThinkingSplitter):
    """Leaves thinking out of an answer and counts it. n_tokens: reads how many tokens the answer has so far."""

    def __init__(self, tags: ReasoningTags, n_tokens: Callable[[], int], *, is_open: bool = False) -> None:
        super().__init__(tags, is_open=is_open)
        self._read_tokens = n_tokens
        self._start_s = 0.0
        self._text_begins = True  # blanks between thinking and answer are left out
        self._figures = ""
        self._has_thought = False  # with any text but tags and blanks
        self._is_told = False

    @property
    def line(self) -> str:  # type: ignore[override]
        """Of the thinking so far; empty if there is none."""
        if not self._start_s:  # nothing has been written yet
            return ""
        if self.is_thinking:
            self._measure()
            return f"thinking... {self._figures}"
        return f"thought for {self._figures}" if self._has_thought else ""

    def news(self, *, is_last: bool = False) -> str:
        """The line, once; is_last: no more text comes."""
        line = self.line
        if self._is_told or not line or (self.is_thinking and not is_last):
            return ""
        self._is_told = True
        return f"thought for {self._figures}, no answer yet" if self.is_thinking else line

    def feed(self, piece: str, *, is_last: bool = False) -> Iterator[Part]:
        """The text of the answer in this piece; is_last: and in what waited for more."""
        answer = ""
        for part in super().feed(piece, is_last=is_last):
            if part.is_thinking:
                self._start_s = self._start_s or time.monotonic()
                self._has_thought |= bool(part.text.replace(self._start, "").replace(self._end, "").strip())
                self._measure()
            else:
                answer += part.text
        if self._text_begins and self._start_s:
            answer = answer.lstrip()
        self._text_begins &= not answer
        return iter([Part(False, answer)] if answer else [])

    def _measure(self) -> None:
        n_tokens = self._read_tokens()
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
