"""The table of `moeedge ablate`, and what its counts say about the order.

The tables of `moeedge calibrate`.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from moeedge.bench.ablation import AblationRow
from moeedge.engine.types import EngineInfo
from moeedge.policies.cost_model import CostModel
from moeedge.scheduler.calibration import Calibration

_MS, _MB = 1e3, 1e-6
_COLUMNS = ("cutoff", "ms/token", "speed", "hits", "waits", "ahead", "MB", "sends", "stops", "right", "equal")


def print_ablation(rows: Sequence[AblationRow], console: Console) -> None:
    """One line per variant, what each column means, and what changes from each variant to the next."""
    table = Table(box=None, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold")
    table.add_column("variant")
    for name in _COLUMNS:
        table.add_column(name, justify="right")
    for row in rows:
        table.add_row(
            row.variant,
            str(row.cutoff_layer),
            f"{row.tpot_s * _MS:.2f}",
            f"{row.speedup:.2f}x",
            _share(row.hit_rate),
            f"{row.loaded_per_step + row.late_per_step:.1f}",
            f"{row.ahead_per_step:.1f}",
            f"{row.bytes_per_step * _MB:.1f}",
            f"{row.transfers_per_step:.1f}",
            f"{row.draft_stops_per_step:.1f}",
            _share(row.foretold_right),
            f"{row.equal}/{row.answers}",
        )
    console.print(table)
    console.print(
        "hits: experts that were there when their layer came; right: foretold ones that were used; equal: answers that "
        "are stock llama.cpp's. Per step: waits: experts that a layer waited for; ahead: experts brought before that; "
        "MB: of both, in so many sends; stops: draft layers that waited."
    )
    for before, after in itertools.pairwise(rows):
        console.print(difference(before, after), highlight=False)


def difference(before: AblationRow, after: AblationRow) -> str:
    """Where a variant gains and loses time per step against the one before it, and the counts behind that."""
    name = "cutoff {0.cutoff_layer}" if before.variant == after.variant else "{0.variant}"
    return (
        f"{name.format(after)} after {name.format(before)}, ms per step: "
        f"draft {(after.draft_s - before.draft_s) * _MS:+.1f} ("
        f"{_change(before, after, 'planned_s', _MS)} in {after.plans_per_step:.1f} plans, "
        f"{_change(before, after, 'draft_waited_s', _MS)} in {after.draft_stops_per_step:.1f} stops); "
        f"verify {(after.verify_s - before.verify_s) * _MS:+.1f} ("
        f"{_change(before, after, 'waited_s', _MS)} for {_change(before, after, 'loaded_per_step')} experts loaded and "
        f"{_change(before, after, 'late_per_step')} under way, {_change(before, after, 'transfers_per_step')} sends)."
    )


def _change(before: AblationRow, after: AblationRow, name: str, scale: float = 1.0) -> str:
    return f"{(getattr(after, name) - getattr(before, name)) * scale:+.1f}"


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


_TOKENS = (1, 2, 4, 8, 16)  # per expert, of the curves


def print_calibration(calibration: Calibration, info: EngineInfo, console: Console) -> None:
    """What was measured, in microseconds, milliseconds and tokens per second."""
    console.print(f"{info.model} on {info.device}, {info.n_threads} threads, {info.cache_slots:,} slots")
    if calibration.units is None:
        console.print("The backend split no block: there are no unit times.")
    else:
        _print_units(calibration.units, console)
    _print_steps(calibration, console)
    if calibration.prefill_ts:
        table = _table("prompts", *calibration.prefill_ts)
        table.add_row("t/s", *(f"{speed_ts:.0f}" for speed_ts in calibration.prefill_ts.values()))
        console.print(table)
        console.print(f"Chosen for prompts: {calibration.prefill_path}.")


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(columns[0])
    for column in columns[1:]:
        table.add_column(column, justify="right")
    return table


def _print_units(units: CostModel, console: Console) -> None:
    table = _table("us per expert, tokens", *map(str, _TOKENS))
    for name, time_of in (("CPU", units.cpu_s), ("device", units.device_s)):
        table.add_row(name, *(f"{time_of(n) * 1e6:.1f}" for n in _TOKENS))
    console.print(table)
    table = _table("us", "move an expert", "draft a token", "split a block", "rest of a layer")
    values_s = (units.transfer_expert_s, units.draft_token_s, units.block_overhead_s, units.layer_rest_s)
    table.add_row("", *(f"{value_s * 1e6:.1f}" for value_s in values_s))
    console.print(table)
    table = _table("tau", *map(str, range(units.cap + 1)))
    table.add_row("r_c: pairs on the CPU", *(f"{share:.2f}" for share in units.r_c))
    table.add_row("r_g: experts on the device", *(f"{share:.2f}" for share in units.r_g))
    console.print(table)


def _print_steps(calibration: Calibration, console: Console) -> None:
    sizes = sorted(calibration.step_s)
    table = _table("ms per step, tokens", *map(str, sizes))
    table.add_row("without the cache", *(f"{calibration.plain_step_s[n] * 1e3:.2f}" for n in sizes))
    table.add_row("with it", *(f"{calibration.step_s[n] * 1e3:.2f}" for n in sizes))
    speeds = (calibration.plain_step_s[n] / calibration.step_s[n] for n in sizes)
    table.add_row("speed", *(f"{speed:.2f}" for speed in speeds))
    console.print(table)
