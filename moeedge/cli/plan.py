"""`moeedge plan`: how much memory a model takes and what fits, before any of it is loaded."""

from __future__ import annotations

import typer

from moeedge.cli.common import gpu_memory, memory_size, names
from moeedge.cli.engine_options import LlamaOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.units import parse_rate

declare(
    """
    * --vram SIZE  Plan for a GPU of this size; this machine need not have one. 12GB: what a card sold with 12 GB has;
        12GiB, 12000MB: exactly so much free memory. Default: what is measured.
    * --ram LIST  Plan for a machine with this much free memory, such as 16GiB; further sizes, separated by commas, are
        compared for a model larger than the memory. Default: what is measured.
    --cache-ratio R  Share of all expert bytes that the device holds, 0 to 1; 0: no cache. Default: what fits.
    [Expert placement]
    * --reserve SIZE  Device memory to leave free, in addition to the usual reserve.
    [Hardware]
    * --disk-rate LIST  Random reads of the disk, as 1GB/s, for a model larger than the memory; several, separated by
        commas, are compared. Default: what moeedge calibrate --disk measured.
    """,
    "plan",
    read={
        gpu_memory: "vram",
        memory_size: "reserve",
        lambda text, option: [memory_size(size, option) for size in names(text, option)]: "ram",
        lambda text, option: [float(parse_rate(rate)) for rate in names(text, option)]: "disk_rate",
    },
)


@flatten
def plan(
    context: typer.Context,
    engine: LlamaOptions,
    *,
    vram: int | None = None,
    ram: list[int] | None = None,
    cache_ratio: float | None = None,
    reserve: int | None = None,
    disk_rate: list[float] | None = None,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Show how much memory a model needs, and what fits, before it is downloaded or loaded.

    A model need not be here: the beginning of its file (the header) is read from the hub. Prints what takes memory on
    the GPU and in RAM, how many of the experts the GPU can hold, the largest context (tokens that the model remembers),
    and the command that runs the model this way. For a model larger than RAM: what is read from the disk per token, and
    which speed that allows.
    """
    from moeedge.cli.plan_run import show_plan

    show_plan(context, engine, vram, ram or [], cache_ratio, reserve or 0, disk_rate, output)
