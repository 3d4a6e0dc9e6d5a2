"""The table of `moeedge devices`."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from moeedge.native import Device

_MIB = 1024 * 1024


def print_devices(devices: list[Device]) -> None:
    """One row per device, on standard output."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("name", "type", "description"):
        table.add_column(column)
    for column in ("free MiB", "total MiB"):
        table.add_column(column, justify="right")
    for device in devices:
        table.add_row(
            device.name,
            device.kind,
            device.description,
            f"{device.free_bytes / _MIB:.0f}" if device.total_bytes else "-",
            f"{device.total_bytes / _MIB:.0f}" if device.total_bytes else "-",
        )
    console = Console(highlight=False)
    console.print(table)
    if not any(device.kind in ("GPU", "IGPU") for device in devices):
        console.print(
            "No GPU: this llama-cpp-python was built without GPU support or finds no card. "
            'Rebuild it with CMAKE_ARGS (README, "Use your GPU").'
        )
