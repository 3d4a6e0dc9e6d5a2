"""Word wrap for text that is still growing: rows that are full never change again, whatever comes after them."""

from __future__ import annotations

import re

from rich.cells import cell_len, chop_cells

# a word with the blanks behind it; scripts written without blanks may break after every character
_WIDE = "\u2e80-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff00-\uff60"
_WORD = re.compile(rf"[{_WIDE}]\s*|[^\s{_WIDE}]+\s*|\s+")


def wrap_rows(line: str, columns: int) -> list[str]:
    """One line of text (no newline) in rows of at most `columns` terminal cells, blanks at their ends not counted.

    The rows joined are the line again. Words longer than a row begin one and are cut. At least one row, perhaps empty.
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
    """Where the last word of `line` that cannot grow any more ends."""
    words = _WORD.findall(line)
    if not words or words[-1][-1].isspace() or re.fullmatch(f"[{_WIDE}]", words[-1]):
        return len(line)
    return len(line) - len(words[-1])
