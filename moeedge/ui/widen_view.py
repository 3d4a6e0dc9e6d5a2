"""What `moeedge widen` shows: a progress bar, and the shape before and after."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rich import progress
from rich.console import Console
from rich.table import Table

from moeedge.hardware.size import format_bytes
from moeedge.ui.bar import Bar
from moeedge.ui.console import say, stderr_console, stdout_console, visible
from moeedge.widen.plan import Plan
from moeedge.widen.shape import SIZE_NAMES


class WidenProgress(Bar):
    """`step` fits `write`'s on_bytes."""

    def __init__(self, plan: Plan, console: Console) -> None:
        columns = (progress.DownloadColumn(binary_units=True), progress.TransferSpeedColumn())
        super().__init__("widening", (*columns, progress.TimeRemainingColumn()), console, plan.data_bytes)

    def step(self, n_bytes: int) -> None:
        """So many more bytes are written."""
        self._update(advance=n_bytes)


def print_plan(plan: Plan, out: Path | None) -> None:
    """The table on standard output, notes on standard error; out: the written file, None where nothing was written."""
    err = stderr_console()
    for note in plan.notes:
        say(err, note)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    for heading in ("source", "widened"):
        table.add_column(heading, justify="right", no_wrap=True)
    before, after = dataclasses.asdict(plan.source_shape), dataclasses.asdict(plan.shape)
    for name, label in SIZE_NAMES.items():
        if before[name]:
            table.add_row(label, f"{before[name]:,}", f"{after[name]:,}")
    table.add_row("feed-forward types", ", ".join(plan.source_types), ", ".join(plan.types))
    if plan.expert_bytes:
        table.add_row("bytes of experts", format_bytes(plan.source_expert_bytes), format_bytes(plan.expert_bytes))
    table.add_row("file", format_bytes(plan.source.stat().st_size), format_bytes(_file_bytes(plan, out)))
    console = stdout_console()
    console.print(table)
    console.print(visible(f"{out} is written." if out else "Nothing was written (--dry-run)."), soft_wrap=True)


def print_plan_json(plan: Plan, out: Path | None) -> None:
    """One JSON object on standard output; sizes in bytes."""
    about = {
        "source": str(plan.source),
        "out": None if out is None else str(out),
        "bytes": _file_bytes(plan, out),
        "expert_bytes": plan.expert_bytes,
        "types": plan.types,
        "source_shape": dataclasses.asdict(plan.source_shape),
        "shape": dataclasses.asdict(plan.shape),
        "notes": plan.notes,
    }
    sys.stdout.write(json.dumps(about) + "\n")


def _file_bytes(plan: Plan, out: Path | None) -> int:
    """Of the written file, or as far as its tensors tell."""
    return plan.data_bytes if out is None else out.stat().st_size
