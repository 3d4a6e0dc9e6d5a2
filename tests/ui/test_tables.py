"""One table in several widths, in a file, as Markdown, CSV, SQL and JSON."""

from __future__ import annotations

import csv
import io
import json
import re
import sqlite3
from contextlib import closing
from dataclasses import dataclass, replace

import pytest
from rich.console import Console

from moeedge.hardware.devices import DeviceRow
from moeedge.hub.catalog import HubFile, Variant
from moeedge.hub.remote import RemoteFile, WantedModel
from moeedge.scheduler.disk import ReadRate
from moeedge.ui.machine_views import print_devices, print_disk
from moeedge.ui.model_views import download_lines, files_json
from moeedge.ui.tables import Column, csv_text, json_text, markdown, print_table, sql_text, text_column
from tests.test_decisions import DISK


@dataclass
class Row:
    policy: str
    ratio: float
    tg_ts: float
    tpot_s: float
    uploads: float | None


ROWS = [Row("spac", 0.17, 11.31, 0.0884, 3.29), Row("lru", 0.5, 12.86, 0.0777, None)]
COLUMNS = (
    text_column("policy", "policy"),
    Column("ratio", "ratio", "g", left=True),
    Column("t/s", "tg_ts", ".2f"),
    Column("ms/token", "tpot_s", ".1f", 1e3),
    Column("uploads", "uploads", ".2f"),
)
LINES = [
    "policy  ratio    t/s  ms/token  uploads",
    "spac    0.17   11.31      88.4     3.29",
    "lru     0.5    12.86      77.7        -",
]


def console_of(width: int, *, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=width, force_terminal=terminal, highlight=False, color_system=None)


def printed(console: Console) -> list[str]:
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]


@pytest.mark.parametrize(("width", "terminal"), [(20, False), (200, True)])
@pytest.mark.parametrize("rows", [ROWS, [vars(row) for row in ROWS]], ids=["dataclasses", "dicts"])
def test_a_file_keeps_its_lines(width: int, terminal: bool, rows: list[object]) -> None:
    console = console_of(width, terminal=terminal)
    print_table(console, COLUMNS, rows, n_keys=2)
    assert printed(console) == LINES


@pytest.mark.parametrize("width", [24, 31, 38])
def test_columns_that_do_not_fit_come_below(width: int) -> None:
    console = console_of(width, terminal=True)
    print_table(console, COLUMNS, ROWS, n_keys=2)
    lines = printed(console)
    assert max(map(len, lines)) <= width
    for row in (line.split() for line in LINES):
        own = [line.split() for line in lines if line.split()[:2] == row[:2]]
        assert [cell for line in own for cell in line[2:]] == row[2:]


def test_csv_and_json_hold_every_key() -> None:
    records: list[dict[str, object]] = [{"a": 1, "b": None}, {"a": [1, {"x": "ä"}], "c": "s"}]
    assert json.loads(json_text(records)) == records
    assert [json.loads(json_text(record, indent=None)) for record in records] == records
    first, second = csv.DictReader(io.StringIO(csv_text(records)))
    assert first == {"a": "1", "b": "", "c": ""}
    assert (json.loads(second["a"]), second["b"], second["c"]) == ([1, {"x": "ä"}], "", "s")


@pytest.mark.parametrize("width", [40, 80])
def test_devices_keep_their_names_unbroken(width: int) -> None:
    gpu = DeviceRow("CUDA0", "GPU", "NVIDIA GeForce RTX 4060", 7 << 30, 8 << 30, True, "for experts")
    worker = DeviceRow("rpc://HOST:PORT", "RPC", "another machine's device", None, None, False, "without RPC")
    console = console_of(width, terminal=True)
    print_devices([gpu, worker], console)
    lines = printed(console)
    table = lines[: lines.index("")]
    assert max(map(len, table)) <= width
    assert all(any(line.startswith(name) for line in table) for name in ("CUDA0 ", "rpc://HOST:PORT "))
    assert any("7168" in line for line in table) and any("RTX" in line for line in lines)


def test_sizes_of_reads_are_exact() -> None:
    output = io.StringIO()
    rates = tuple(ReadRate(1, size, 1e9, 1) for size in (2**18, 2**20, 3 * 2**19))
    print_disk(replace(DISK, rates=rates, matrix_bytes=2**20), Console(file=output, width=100))
    named = [line.split("  ")[0].strip() for line in output.getvalue().splitlines()]
    assert {"256 KiB", "1 MiB, a matrix of an expert", "1.5 MiB"} <= set(named)


def test_columns_of_sql_take_the_numbers_of_another_run() -> None:
    first = sql_text("t", [{"name": 'o\'neill "x"; --', "spread": None, "n": 1, "limit": [1]}])
    second = sql_text("t", [{"name": "b", "spread": 2.5, "n": 2, "limit": None}])
    types = re.search(r"\((.*)\)", first.splitlines()[0])
    assert types is not None and types[1] == '"name" TEXT, "spread" NUMERIC, "n" INTEGER, "limit" TEXT'
    with closing(sqlite3.connect(":memory:")) as base:
        base.executescript(first + second)
        assert base.execute("SELECT * FROM t").fetchall() == [('o\'neill "x"; --', None, 1, "[1]"), ("b", 2.5, 2, None)]


def test_missing_files_as_json_and_unconfirmed_facts_in_words() -> None:
    wanted = [WantedModel("target", "big", "mit", Variant("q4", "me/x", files=(HubFile("a.gguf"),)), local=None)]
    missing = [RemoteFile("me/x", "main", "c" * 40, "a.gguf", 7, "tag", None, have_bytes=3)]
    (row,) = json.loads(files_json(wanted, missing))
    file = {"file": "a.gguf", "commit": "c" * 40, "size_bytes": 7, "sha256": None, "have_bytes": 3}
    assert (row["role"], row["repo"], row["path"], row["missing"]) == ("target", "me/x", None, [file])
    sure = WantedModel("draft", "sure", "mit", Variant("", "me/x"), local=None)
    unsure = replace(sure, name="unsure", variant=Variant("", "me/x", verified=False))
    said = download_lines([unsure, sure], [])
    assert [(text.startswith("draft"), "sure" in text, "confirmed" in text) for text in said] == [
        (True, True, False), (False, True, True), (True, True, False)
    ]  # fmt: skip


def test_names_drive_neither_terminal_nor_table() -> None:
    row = replace(ROWS[0], policy="a\x1b[31m|b\nc")
    (line,) = markdown(COLUMNS[:1], [row]).splitlines()[2:]
    assert "\x1b" not in line and line.count("|") - line.count("\\|") == 2
    console = Console(file=io.StringIO(), width=80)
    print_table(console, COLUMNS[:1], [row])
    assert "\x1b" not in console.file.getvalue()  # type: ignore[attr-defined]
