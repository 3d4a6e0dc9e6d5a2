"""Growing text in rows that never change once they are full, and the plain view of a streaming answer."""

from __future__ import annotations

import re
from contextlib import suppress

from rich.cells import cell_len, chop_cells
from rich.console import Console

from moeedge.ui.chat.thinking import FoldedThinking
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


class PlainView:
    """Writes each piece at once and ends the answer with a newline.

    On a terminal it wraps lines between words, so that a word waits for its end, and shows control characters.
    folded: leaves thinking out; on a terminal a line says so.
    """

    def __init__(self, console: Console, folded: FoldedThinking | None = None) -> None:
        self._console = console
        self._stream = console.file
        self._folded = folded
        self._row = ""  # text of the terminal's last row
        self._word = ""  # not shown yet
        self._last = ""

    def __enter__(self) -> PlainView:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(OSError):  # the terminal or the reader of a pipe may be gone
            if self._folded is not None:
                self._show(self._folded.feed("", is_last=True), is_last=True)
            self._wrap(self._word + "\n" if self._row or self._word else "")
            if self._last and not self._last.endswith("\n") and not self._console.is_terminal:
                self._stream.write("\n")
            self._stream.flush()

    def write(self, piece: str) -> None:
        """Append `piece`."""
        self._show(piece if self._folded is None else self._folded.feed(piece))

    def _show(self, text: str, *, is_last: bool = False) -> None:
        if self._folded is not None and self._console.is_terminal and (news := self._folded.news(is_last=is_last)):
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
        """Write the words of `text` that are complete."""
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
