"""The results of `moeedge doctor`, `devices`, `ps` and `calibrate`: what this machine has and does."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.text import Text

from moeedge.policies.cost_model import CostModel, expert_seconds
from moeedge.run import Decision
from moeedge.ui.tables import Column, print_table, text_column, value_columns
from moeedge.units import format_bytes, visible

if TYPE_CHECKING:
    from moeedge.bench.budget_choice import BudgetChoice
    from moeedge.engine.types import EngineInfo
    from moeedge.hardware.devices import DeviceRow
    from moeedge.health.doctor import Report
    from moeedge.health.running import RunningProcess
    from moeedge.scheduler.calibration import Calibration
    from moeedge.scheduler.disk import DiskCalibration

_MARKS = {"ok": ("ok", "green"), "info": ("-", "dim"), "warning": ("!", "yellow"), "broken": ("x", "bold red")}
_TOPIC_WIDTH = 10
_MS, _US = 1e3, 1e6  # from seconds
_WIDE = 72  # columns from which everything known about a device has room


def print_report(report: Report, console: Console) -> None:
    """One line per finding, cut to the terminal's width; below them what to fix, unbroken where it is a command."""
    room = max(20, console.width - _TOPIC_WIDTH - 4) if console.is_terminal else sys.maxsize
    hints = []
    for finding in report.findings:
        mark, style = _MARKS[finding.status]
        text = visible(finding.text)
        is_cut = cell_len(text) > room
        shown = set_cell_size(text, room - 3) + "..." if is_cut else text
        body_style = "" if finding.status == "ok" else style
        topic = f"{finding.topic:<{_TOPIC_WIDTH}} "
        console.print(Text.assemble((f"{mark:<3}", style), (topic, "bold"), (shown, body_style)), soft_wrap=True)
        if finding.hint:
            entire = f" {text}" if finding.status == "broken" and is_cut else ""
            hints.append(Text(f"{mark} {finding.topic}:{entire} {visible(finding.hint)}", style))
    if hints:
        console.print()
    for hint in hints:
        console.print(hint, soft_wrap="pip install" in hint.plain or not console.is_terminal)  # to be copied
    counts = Counter(finding.status for finding in report.findings)
    broken, warnings = counts["broken"], counts["warning"]
    look = f"; {warnings} thing{'s' * (warnings > 1)} to look at" if warnings else ""
    verdict = f"{broken} things are broken." if broken > 1 else "1 thing is broken."
    console.print(f"\n{verdict if broken else f'Everything works{look}.'}", style="bold")


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
    Column("memory", "memory_bytes", format_bytes),
    Column("GPU", "gpu_bytes", format_bytes),
    text_column("since", lambda row: f"{datetime.fromtimestamp(row.started_s):%H:%M:%S}"),
)


def print_running(running: Sequence[RunningProcess], console: Console) -> None:
    if running:
        print_table(console, _PROCESS_COLUMNS, running)
    else:
        console.print("No moeedge process of yours runs. moeedge list shows the models on this machine.")


def print_disk(found: DiskCalibration, console: Console) -> None:
    """A row per size of a read, a column per number of requests at a time, in MB/s; then the best."""

    def name(size: int) -> str:
        return _size(size) + (", a matrix of an expert" if 0 <= size - found.matrix_bytes < 4096 else "")

    system = f", {found.file_system}" if found.file_system else ""
    experts = f", an expert {_size(found.expert_bytes)}" if found.expert_bytes else ""
    console.print(f"{found.model} ({format_bytes(found.file_bytes)}{experts}) on {found.mount or 'its disk'}{system}")
    depths, pieces = (sorted({getattr(rate, key) for rate in found.rates}) for key in ("depth", "piece_bytes"))
    rates = {(rate.piece_bytes, rate.depth): rate.bytes_per_s for rate in found.rates}
    rows = [(name(size), *(rates[size, depth] for depth in depths)) for size in pieces]
    columns = [text_column("MB/s, requests at a time", 0), *value_columns(depths, ".0f", scale=1e-6)]
    print_table(console, columns, rows)
    console.print(found.decision().sentence(), soft_wrap=True)
    if found.in_memory:
        console.print(f"{found.file_system} keeps its files in memory: these are not the rates of a disk.")
    elif not found.direct:
        console.print("The page cache could not be bypassed: it was emptied before each part, but may have helped.")


def _size(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB" if n_bytes >= 2**20 and n_bytes % 2**20 else format_bytes(n_bytes)


_TOKENS = (1, 2, 4, 8, 16)  # per expert, of the curves


def print_calibration(
    calibration: Calibration, info: EngineInfo, console: Console, decisions: Iterable[Decision] = ()
) -> None:
    """The measured times in microseconds and milliseconds, the prompt's speed in tokens per second, and decisions."""
    console.print(f"{info.model} on {info.device}, {info.n_threads} threads, {info.cache_slots:,} slots")
    if calibration.units is None:
        console.print("No layer was shared between CPU and device: there are no times of experts.")
    else:
        _print_cost_model(calibration.units, console)
    sizes = sorted(calibration.step_s)
    plain_ms, cached_ms = (
        [times_s[n] * _MS for n in sizes] for times_s in (calibration.plain_step_s, calibration.step_s)
    )
    speeds = (plain / cached for plain, cached in zip(plain_ms, cached_ms, strict=True))
    steps = [("without the cache", *plain_ms), ("with the cache", *cached_ms), ("speed", *speeds)]
    print_table(console, [text_column("ms per step, tokens", 0), *value_columns(sizes, ".2f")], steps)
    if calibration.prefill_ts:
        columns = [text_column("prompts", 0), *value_columns(list(calibration.prefill_ts), ".0f")]
        print_table(console, columns, [("t/s", *calibration.prefill_ts.values())])
    for decision in decisions:
        console.print(decision.sentence(), soft_wrap=True)


def _print_cost_model(costs: CostModel, console: Console) -> None:
    by_side = (("CPU", costs.cpu_expert_s), ("device", costs.device_expert_s))
    curves = [(side, *(float(expert_seconds(curve_s, n)) for n in _TOKENS)) for side, curve_s in by_side]
    print_table(console, [text_column("us per expert, tokens", 0), *value_columns(_TOKENS, ".1f", scale=_US)], curves)
    titles = ("move an expert", "draft a token", "split a block", "rest of a layer")
    units = ("", costs.transfer_expert_s, costs.draft_token_s, costs.block_overhead_s, costs.layer_rest_s)
    print_table(console, [text_column("us", 0), *value_columns(titles, ".1f", scale=_US)], [units])
    shares = [("r_c: pairs on the CPU", *costs.r_c), ("r_g: experts on the device", *costs.r_g)]
    print_table(console, [text_column("tau", 0), *value_columns(range(costs.cap + 1), ".2f")], shares)


def print_budget_choice(choice: BudgetChoice, console: Console) -> None:
    """A line per budget that was tried, and the choice with its reason."""
    is_text = choice.score_kind == "likelihood"
    columns = [
        text_column("expert budget", lambda trial: "off" if trial.budget is None else str(trial.budget)),
        Column("log-likelihood" if is_text else "score", "score", ".3f"),
        Column("+-", "score_stddev", ".3f"),
        Column("tokens" if is_text else "tasks", "n_scored", ",d"),
        Column("t/s", "tg_ts", ".1f"),
        Column("speed", "ratio", ".3f"),
        Column("tokens/step", "tokens_per_step", ".2f"),
        Column("experts/layer", "experts", ".1f"),
    ]
    print_table(console, columns, choice.trials)
    console.print(choice.decision.sentence(), soft_wrap=True)
