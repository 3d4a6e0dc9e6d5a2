"""What `moeedge devices` prints: a table for people, a list of objects for programs."""

from __future__ import annotations

import dataclasses
import json
import sys

from rich.console import Console
from rich.table import Table

from moeedge.hardware.catalog import Entry

_MIB = 1024 * 1024
_WIDE = 72  # columns from which there is room for all that is known of a device


def print_devices(entries: list[Entry]) -> None:
    """One row per device on standard output, then a line for each that says what it is for or why it cannot be used."""
    console = Console(highlight=False, markup=False, emoji=False)  # names and descriptions are the driver's: no markup
    wide = console.width >= _WIDE
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "type", "description") if wide else ("name",):
        table.add_column(column, overflow="fold")
    for column in ("free MiB", "total MiB") if wide else ("free MiB",):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("holds experts", no_wrap=True)
    for entry in entries:
        holds = "yes" if entry.usable else "the rest" if entry.kind == "CPU" else "no"
        about = (entry.kind, entry.description) if wide else ()
        memory = (entry.free_bytes, entry.total_bytes) if wide else (entry.free_bytes,)
        table.add_row(entry.name, *about, *map(_mib, memory), holds)
    console.print(table)
    console.print()
    for entry in entries:
        what = f"{entry.description}; " if not wide and entry.description else ""
        console.print(f"{entry.name}: {what}{entry.remark}", soft_wrap=True)  # commands in it can be copied


def print_devices_json(entries: list[Entry]) -> None:
    """A JSON list on standard output; sizes in bytes, null where not known."""
    json.dump([dataclasses.asdict(entry) for entry in entries], sys.stdout, ensure_ascii=False, indent=2)
    sys.stdout.write("\n")


def _mib(n_bytes: int | None) -> str:
    return "-" if n_bytes is None else f"{n_bytes / _MIB:.0f}"
