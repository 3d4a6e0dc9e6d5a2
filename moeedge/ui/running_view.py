"""The result of `moeedge ps`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.console import visible
from moeedge.ui.tables import Column, json_text, print_table, text_column
from moeedge.units import format_bytes

if TYPE_CHECKING:
    from moeedge.health.running import RunningProcess

_COLUMNS = (
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
    print_table(console, _COLUMNS, running)


def running_json(running: Sequence[RunningProcess]) -> str:
    """A JSON list; sizes in bytes, times in seconds since the epoch."""
    return json_text([dataclasses.asdict(row) for row in running])
