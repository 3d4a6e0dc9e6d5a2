"""The tables of `moeedge calibrate`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moeedge.engine.calibration import Calibration
from moeedge.engine.types import EngineInfo
from moeedge.scheduler.units import Units

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


def _print_units(units: Units, console: Console) -> None:
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
