"""The tables of `moeedge simulate` and `moeedge validate`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from rich import progress
from rich.console import Console

from moeedge.sim.simulate import Result
from moeedge.ui.plots import Chart
from moeedge.ui.progress import Bar

Row = dict[str, Any]

_VARIED = {
    "policy": "policy",
    "ablations": "without",
    "cache_ratio": "ratio",
    "gamma": "gamma",
    "utility_cap": "K",
    "link_factor": "link",
}
_PARTS = {
    "draft_s": "draft",
    "dense_s": "dense",
    "device_s": "experts",
    "stall_cpu_s": "CPU",
    "stall_load_s": "load",
    "stall_link_s": "link",
    "host_s": "host",
}


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """Speed, where the time goes in ms per token, hits and transfers; what does not vary is said once above."""
    same = {key for key in _VARIED if len({row[key] for row in rows}) == 1 and key != "policy"}
    about = [str(rows[0][key]) for key in ("model", "hardware", "trace")]
    said = [f"{_VARIED[key]} {_number(rows[0][key])}" for key in _VARIED if key in same]
    head = ", ".join([*about, *(text for text in said if text not in ("without ", "link 1"))])
    console.print(head, soft_wrap=not console.is_terminal)
    varied = {key: name for key, name in _VARIED.items() if key not in same}
    columns = [*varied.values(), "t/s", "ms/token", *_PARTS.values(), "pair hit", "unique hit", "uploads"]
    cells = [
        [
            *(_number(row[key]) for key in varied),
            f"{row['tg_ts']:.2f}",
            f"{row['tpot_s'] * 1e3:.1f}",
            *(f"{row[key] * 1e3:.1f}" if row[key] else "" for key in _PARTS),
            f"{row['hit_rate_pairs']:.3f}",
            f"{row['hit_rate_unique']:.3f}",
            f"{row['uploads_per_layer_step']:.2f}",
        ]
        for row in rows
    ]
    print_table(columns, cells, console, left=len(varied))
    note = "draft to host: ms per token, of which CPU, load and link are waiting; uploads: per layer and step."
    console.print(note, soft_wrap=not console.is_terminal)


def print_table(columns: Sequence[str], cells: Sequence[Sequence[str]], console: Console, *, left: int = 1) -> None:
    """Columns as wide as they must be, the first `left` flush left; a file keeps its lines whole.

    In a terminal that is too narrow the columns that do not fit come below, beside the first `left` once more.
    """
    lines = [list(columns), *(list(line) for line in cells)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
    for shown in _groups(widths, left, console.width if console.is_terminal else None):
        for line in lines:
            padded = [line[i].ljust(widths[i]) if i < left else line[i].rjust(widths[i]) for i in shown]
            console.print("  ".join(padded).rstrip(), soft_wrap=True)


def _groups(widths: Sequence[int], left: int, room: int | None) -> Iterator[list[int]]:
    """The columns that stand side by side: the first `left`, and as many others as fit `room` (None: all)."""
    group = list(range(left))
    for index in range(left, len(widths)):
        if room is not None and len(group) > left and sum(widths[i] + 2 for i in group) + widths[index] > room:
            yield group
            group = list(range(left))
        group.append(index)
    yield group


def _number(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def chart_of(result: Result) -> Chart:
    """The step whose time is the median of all: what a typical one looks like."""
    order = np.argsort(result.step_s, kind="stable")
    middle = int(order[len(order) // 2])
    setup = result.setup
    title = (
        f"{setup.policy}, ratio {setup.cache_ratio:g}, gamma {result.gamma}: "
        f"{result.step_s[middle] * 1e3:.0f} ms per step, {result.tg_ts:.1f} tokens/s"
    )
    return Chart(title, result.log.of_step(result.first_step + middle))


class SimulateProgress(Bar):
    """Rows that are done."""

    def __init__(self, total: int, console: Console) -> None:
        rows = progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} rows")
        super().__init__("simulating", (rows, progress.TimeElapsedColumn()), console, total)

    def advance(self) -> None:
        """One more."""
        self._update(advance=1)
