"""Markdown tables of a command's output as rows of cells."""

from __future__ import annotations


def table_rows(text: str, first: str = "test") -> list[dict[str, str]]:
    """The rows of all tables whose first heading is `first`; tables below each other hold columns of the same rows."""
    tables = [part.splitlines() for part in text.split("\n\n") if part.startswith(f"| {first} ")]
    found: list[dict[str, str]] = [{} for line in tables[0][2:] if line.startswith("|")] if tables else []
    for heads, rule, *lines in tables:
        assert set(rule) <= set("|-:")
        lines = [line for line in lines if line.startswith("|")]
        assert all(len(line) == len(heads) <= 100 for line in lines)
        names = [cell.strip() for cell in heads.strip("|").split("|")]
        for row, line in zip(found, lines, strict=True):
            row |= zip(names, (cell.strip() for cell in line.strip("|").split("|")), strict=True)
    return found
