"""Columns, declared once, write rows as a table for a terminal or a file, Markdown or CSV; records become JSON."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from moeedge.records import as_dict, figures, record_in, type_of
from moeedge.units import visible

if TYPE_CHECKING:
    from rich.console import Console

NONE = "-"
WITHHELD = "?"  # of a ratio that is not to be trusted
TABLE_WIDTH = 100  # columns of tables in files and pipes
_GAP = 2  # blanks between columns


@dataclass(frozen=True)
class Column:
    """One column: its title, where its value comes from, and how the value is written."""

    title: str
    value: str | int | Callable[[Any], Any]  # attributes ("a.b") or key, index of a tuple, or a function of the row
    form: str | Callable[[Any], str] = ""  # format specification, or a function of the value
    scale: float = 1.0  # from the row's unit to the column's, as 1e3 from seconds to milliseconds
    left: bool = False
    fold: bool = False  # long text may take several lines
    none: str = NONE  # stands for None

    def text(self, row: Any) -> str:
        value = self.read(row)
        if value is None:
            return self.none
        if callable(self.form):
            return self.form(value)
        return format(value * self.scale if self.scale != 1.0 else value, self.form)

    def read(self, row: Any) -> Any:
        if callable(self.value):
            return self.value(row)
        if isinstance(self.value, int) or isinstance(row, Mapping):
            return row[self.value]
        return attrgetter(self.value)(row)


def text_column(title: str, value: str | int | Callable[[Any], Any], *, fold: bool = False) -> Column:
    return Column(title, value, str, left=True, fold=fold, none="")


def value_columns(titles: Sequence[object], form: str, *, scale: float = 1.0) -> list[Column]:
    """Columns of one quantity whose rows are tuples: a name, then a value for each title."""
    return [Column(str(title), index, form, scale) for index, title in enumerate(titles, start=1)]


def figure_columns(record: Any, *names: str) -> list[Column]:
    """The columns that a record declares for its figures; of a record in it: "name.figure"."""
    columns = []
    for name in names:
        holder, _, inner = name.rpartition(".")
        declared = figures(record_in(type_of(record, holder)) if holder else record)[inner]
        columns.append(Column(declared.title, name, declared.form, declared.scale))
    return columns


def ratio_column(title: str, value: str | Callable[[Any], Any], form: str = ".3f") -> Column:
    """A column of ratios between speeds, which are withheld in rows whose samples were disturbed."""
    plain = Column(title, value)

    def read(row: Any) -> Any:
        ratio = plain.read(row)
        return WITHHELD if row.disturbed and ratio is not None else ratio

    return Column(title, read, lambda ratio: ratio if ratio == WITHHELD else format(ratio, form))


def print_table(
    console: Console,
    columns: Sequence[Column],
    rows: Sequence[Any],
    *,
    title: str = "",
    n_keys: int = 1,
    style: Callable[[Any], str] = lambda _row: "",
) -> None:
    """Print the table; `style` names the Rich style of a row.

    A file gets every line unbroken. A terminal that is too narrow gets folded columns where some may fold, otherwise
    further tables below, each with the first `n_keys` columns again.
    """
    from rich import cells, table, text  # commands whose columns are declared here are completed without Rich

    texts = [_texts(column, rows) for column in columns]
    widths = [max(map(cells.cell_len, each)) for each in texts]
    splits = console.is_terminal and not any(column.fold for column in columns)
    if title:
        console.print(title, style="bold", soft_wrap=not console.is_terminal)
    for group in _groups(widths, n_keys, console.width if splits else None):
        grid = table.Table(box=None, pad_edge=False, header_style="bold")
        if not console.is_terminal:
            grid.width = sum(widths[i] + _GAP for i in group) - _GAP
        for column in (columns[i] for i in group):
            justify, overflow = "left" if column.left else "right", "fold" if column.fold else "ellipsis"
            heading = text.Text(column.title)
            grid.add_column(heading, justify=justify, no_wrap=not column.fold, overflow=overflow)  # type: ignore[arg-type]
        for place, row in enumerate(rows, start=1):
            grid.add_row(*(text.Text(texts[i][place]) for i in group), style=style(row))
        console.print(grid, crop=False)


def _texts(column: Column, rows: Sequence[Any]) -> list[str]:
    """Title and cells, without what would drive a terminal: names come from files."""
    return [visible(text).replace("\n", " ") for text in (column.title, *(column.text(row) for row in rows))]


def _groups(widths: Sequence[int], n_keys: int, room: int | None) -> Iterator[list[int]]:
    """Indices of the columns of each table: the keys, and as many others as fit into `room` (None: all)."""
    group = list(range(n_keys))
    for index in range(n_keys, len(widths)):
        if room is not None and len(group) > n_keys and sum(widths[i] + _GAP for i in group) + widths[index] > room:
            yield group
            group = list(range(n_keys))
        group.append(index)
    yield group


def markdown(columns: Sequence[Column], rows: Sequence[Any]) -> str:
    """A Markdown table whose cells are padded, so that it reads well as plain text, too."""
    padded = []
    for column in columns:
        texts = [text.replace("|", "\\|") for text in _texts(column, rows)]
        width = max(map(len, texts))
        title, *cells = (f" {text:{'<' if column.left else '>'}{width}} " for text in texts)
        padded.append([title, "-" * (width + 1) + ("-" if column.left else ":"), *cells])
    return "".join(f"|{'|'.join(line)}|\n" for line in zip(*padded, strict=True))


def narrow_markdown(columns: Sequence[Column], rows: Sequence[Any], *, n_keys: int) -> str:
    """Markdown tables of at most TABLE_WIDTH characters, each with the first `n_keys` columns, none of them empty."""
    filled = [column for column in columns if any(column.text(row) != column.none for row in rows)]
    # a column takes three characters more than its cells: one more than _groups' gap; and " |", "|" of the line's ends
    widths = [max(map(len, _texts(column, rows))) + 1 for column in filled]
    groups = _groups(widths, sum(column in filled for column in columns[:n_keys]), TABLE_WIDTH - 3)
    return "\n".join(markdown([filled[i] for i in group], rows) for group in groups)


def csv_text(records: Sequence[Mapping[str, Any]]) -> str:
    """The records as CSV with a header of all their keys; lists and dicts as JSON, None as an empty field."""
    out = io.StringIO()
    keys = list(dict.fromkeys(key for record in records for key in record))
    writer = csv.DictWriter(out, keys, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: _flat(value) for key, value in record.items()} for record in records)
    return out.getvalue()


def _flat(value: Any) -> Any:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def sql_text(table: str, records: Sequence[Mapping[str, Any]]) -> str:
    """Statements that make the table, unless it exists, and insert the records; lists and dicts as JSON text."""
    keys = list(dict.fromkeys(key for record in records for key in record))
    if not keys:
        return ""
    columns = ", ".join(f'"{key}" {_sql_type(key, records)}' for key in keys)
    names = ", ".join(f'"{key}"' for key in keys)  # some are words of SQL: limit, commit
    lines = [f"CREATE TABLE IF NOT EXISTS {table} ({columns});"]
    for record in records:
        values = ", ".join(_sql_value(record.get(key)) for key in keys)
        lines.append(f"INSERT INTO {table} ({names}) VALUES ({values});")
    return "\n".join(lines) + "\n"


def _sql_type(key: str, records: Sequence[Mapping[str, Any]]) -> str:
    kinds = {type(record.get(key)) for record in records} - {type(None)}
    if not kinds:  # NULL in all: another run may have numbers
        return "NUMERIC"
    return "INTEGER" if kinds <= {int, bool} else "REAL" if kinds <= {int, bool, float} else "TEXT"


def _sql_value(value: Any) -> str:
    if value is None or isinstance(value, (int, float)):
        return "NULL" if value is None else repr(int(value) if isinstance(value, bool) else value)
    return "'" + str(_flat(value)).replace("'", "''") + "'"


def json_text(value: Any, *, indent: int | None = 2) -> str:
    """One JSON document, ending in a newline."""
    return json.dumps(value, ensure_ascii=False, indent=indent) + "\n"


def record_json(record: Any) -> str:
    return json_text(as_dict(record))


def records_json(rows: Sequence[Any]) -> str:
    """A JSON list of dataclasses; sizes in bytes, times in seconds since the epoch, null where not known."""
    return json_text([asdict(row) for row in rows])
