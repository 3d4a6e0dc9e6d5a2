"""The results of `moeedge doctor`, `devices`, `ps` and `calibrate --disk`: what this machine has and does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from moeedge.ui.console import visible
from moeedge.ui.tables import Column, json_text, print_table, text_column, value_columns
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.hardware.devices import DeviceRow
    from moeedge.health.doctor import Finding, Report
    from moeedge.health.running import RunningProcess
    from moeedge.scheduler.disk import DiskCalibration

_MARKS = {"ok": ("ok", "green"), "info": ("-", "dim"), "warning": ("!", "yellow"), "broken": ("x", "bold red")}
_TOPIC_WIDTH = 10
_ELLIPSIS = "..."
_COMMAND = "pip install"  # in a hint that is to be copied
_WIDE = 72  # columns from which everything known about a device has room


def print_report(report: Report, console: Console) -> None:
    """One line per finding, cut to the terminal's width; below them what to fix, unbroken where it is a command."""
    for finding in report.findings:
        _print_line(finding, console)
    with_hint = [finding for finding in report.findings if finding.hint]
    if with_hint:
        console.print()
    for finding in with_hint:
        mark, style = _MARKS[finding.status]
        cut = f" {visible(finding.text)}" if finding.status == "broken" and _is_cut(finding, console) else ""
        text = f"{mark} {finding.topic}:{cut} {visible(finding.hint)}"
        console.print(Text(text, style=style), soft_wrap=_COMMAND in text or not console.is_terminal)
    console.print()
    console.print(_verdict(report), style="bold")


def _print_line(finding: Finding, console: Console) -> None:
    mark, style = _MARKS[finding.status]
    text = visible(finding.text)
    if _is_cut(finding, console):
        text = set_cell_size(text, _room(console) - len(_ELLIPSIS)) + _ELLIPSIS
    line = Text(f"{mark:<3}", style=style)
    line.append(f"{finding.topic:<{_TOPIC_WIDTH}} ", style="bold")
    line.append(text, style="" if finding.status == "ok" else style)
    console.print(line, soft_wrap=True)


def _room(console: Console) -> int:
    return max(20, console.width - _TOPIC_WIDTH - 4)


def _is_cut(finding: Finding, console: Console) -> bool:
    """Files get every line entire."""
    return console.is_terminal and cell_len(visible(finding.text)) > _room(console)


def _verdict(report: Report) -> str:
    broken = sum(finding.status == "broken" for finding in report.findings)
    warnings = sum(finding.status == "warning" for finding in report.findings)
    if broken:
        return "1 thing is broken." if broken == 1 else f"{broken} things are broken."
    return f"Everything works; {warnings} thing{'s' * (warnings > 1)} to look at." if warnings else "Everything works."


def report_json(report: Report) -> str:
    """One JSON object: whether something is broken, and the findings."""
    return json_text(
        {"is_broken": report.is_broken, "findings": [dataclasses.asdict(each) for each in report.findings]}
    )


_DEVICE_COLUMNS = (
    text_column("name", "name", fold=True),
    text_column("type", "kind", fold=True),
    text_column("description", "description", fold=True),
    Column("free MiB", "free_bytes", ".0f", 2.0**-20),
    Column("total MiB", "total_bytes", ".0f", 2.0**-20),
    text_column("holds experts", lambda entry: "yes" if entry.usable else "the rest" if entry.kind == "CPU" else "no"),
)
_NARROW_TITLES = ("name", "free MiB", "holds experts")


def print_devices(entries: list[DeviceRow], console: Console) -> None:
    """One row per device, then a line for each: its use, or why it cannot be used."""
    wide = console.width >= _WIDE
    columns = [column for column in _DEVICE_COLUMNS if wide or column.title in _NARROW_TITLES]
    print_table(console, columns, entries)
    console.print()
    for entry in entries:
        description = f"{entry.description}; " if not wide and entry.description else ""
        origin = f"; from {visible(entry.file)}" if entry.file else ""
        console.print(f"{entry.name}: {description}{entry.remark}{origin}", soft_wrap=True)  # commands can be copied


_PROCESS_COLUMNS = (
    Column("process", "pid"),
    text_column("command", "command"),
    text_column("models", lambda row: visible(", ".join(Path(path).name for path in row.models)) or "-", fold=True),
    Column("memory", lambda row: format_bytes(row.memory_bytes)),
    Column("GPU", lambda row: "-" if row.gpu_bytes is None else format_bytes(row.gpu_bytes)),
    text_column("since", lambda row: f"{datetime.fromtimestamp(row.started_s):%H:%M:%S}"),
)


def print_running(running: Sequence[RunningProcess], console: Console) -> None:
    """A row per process."""
    if not running:
        console.print("No moeedge process of yours runs. moeedge list shows the models on this machine.")
        return
    print_table(console, _PROCESS_COLUMNS, running)


def print_disk(found: DiskCalibration, console: Console) -> None:
    """A row per size of a read, a column per number of requests at a time, in MB/s; then the best."""
    of = f", {found.file_system}" if found.file_system else ""
    experts = f", an expert {_size(found.expert_bytes)}" if found.expert_bytes else ""
    console.print(f"{found.model} ({format_bytes(found.file_bytes)}{experts}) on {found.mount or 'its disk'}{of}")
    depths = sorted({rate.depth for rate in found.rates})
    rates = {(rate.piece_bytes, rate.depth): rate.bytes_per_s for rate in found.rates}
    pieces = sorted({rate.piece_bytes for rate in found.rates})
    rows = [(_piece(size, found), *(rates[size, depth] for depth in depths)) for size in pieces]
    columns = [text_column("MB/s, requests at a time", 0), *value_columns(depths, ".0f", scale=1e-6)]
    print_table(console, columns, rows)
    best = found.best
    console.print(
        f"Best: {best.depth} requests of {_size(best.piece_bytes)} at a time, {format_rate(best.bytes_per_s)} "
        "with their neighbours in the table; the fewest that reach 95 % of the highest rate. "
        f"Measured in {found.seconds:.0f} s."
    )
    if found.in_memory:
        console.print(f"{found.file_system} keeps its files in memory: these are not the rates of a disk.")
    elif not found.direct:
        console.print("The page cache could not be bypassed: it was emptied before each part, but may have helped.")
    if not found.kept:
        console.print("These figures cannot be saved (folder: MOEEDGE_CACHE).")


def _piece(size: int, found: DiskCalibration) -> str:
    is_matrix = 0 <= size - found.matrix_bytes < 4096
    return f"{_size(size)}, a matrix of an expert" if is_matrix else _size(size)


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 and n_bytes % 2**20 else format_bytes(n_bytes)
