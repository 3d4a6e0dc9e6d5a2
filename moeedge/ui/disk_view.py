"""The result of `moeedge calibrate --disk`: rates of random reads by size and number of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.ui.tables import print_table, text_column, value_columns
from moeedge.units import format_bytes, format_rate

if TYPE_CHECKING:
    from moeedge.scheduler.disk import DiskCalibration


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
