"""`moeedge plan`: how much memory a model takes and what fits, before any of it is loaded."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from moeedge.cli.common import emit, gpu_memory, memory_size, names
from moeedge.cli.engine_options import CacheOptions, LlamaOptions, check_device, layer_notes
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import DownloadError
from moeedge.run import Run
from moeedge.ui.tables import record_json
from moeedge.units import parse_rate

if TYPE_CHECKING:
    from moeedge.cli.model_files import ModelFiles

# not about what runs, of another meaning in chat, or a secret: the suggested command does not repeat them
_NOT_REPEATED = {*("vram", "ram", "cache_ratio", "reserve", "disk_rate"), *("output", "verbose", "hf_token", "offline")}
_OF_LAYERS = {"n_gpu_layers", "n_cpu_moe", "cpu_moe"}

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
    from moeedge.planning.memory_map import this_machine
    from moeedge.planning.planner import Planner
    from moeedge.planning.session_plan import known_tier, make_session_plan
    from moeedge.ui.model_views import print_plan

    placement = CacheOptions(cache_ratio=cache_ratio).config()
    check_device(engine.device)
    with ExitStack() as resources:
        try:
            files, pull_names = _find(engine.model, engine.model_draft, resources)
        except DownloadError as error:
            from moeedge.hub.catalog import load_catalog

            if load_catalog().find(str(engine.model)) is not None:
                error.hint = f"{error.hint} moeedge list --all --fits auto estimates from the catalog alone."
            raise
        config = engine.config(placement, files=files, auto_gamma=engine.draft_max is None)
        machine = this_machine(config, vram_bytes=vram, ram_bytes=ram[0] if ram else None)
        ignored = [] if vram is not None else layer_notes(config)
        if ignored:
            machine = replace(machine, notes=(*machine.notes, *ignored))
            config = replace(config, n_gpu_layers=0 if config.n_gpu_layers == 0 else None, n_cpu_moe=None)
        with Planner(config, machine, reserve=reserve or 0, names=pull_names) as planner:
            beyond_ram = known_tier(planner.facts, planner.file.original, disk_rate, tuple(ram[1:]) if ram else ())
            repeated = _repeated(context, _NOT_REPEATED | _OF_LAYERS if ignored else _NOT_REPEATED)
            session_plan = make_session_plan(planner, given=repeated, beyond_ram=beyond_ram)
        emit(output, record_json, print_plan, session_plan)


def _repeated(context: typer.Context, without: set[str]) -> list[str]:
    """The options on the command line as typed, but for these parameters."""
    params = {spelling: param for param in context.command.params for spelling in (*param.opts, *param.secondary_opts)}
    words = iter(() if context.obj is None else context.obj.arguments)
    repeated: list[str] = []
    for word in words:
        if (param := params.get(word)) is not None:
            option = [word] if getattr(param, "is_flag", False) else [word, next(words)]
            repeated += option if param.name not in without else []
    return repeated


def _find(model: Path | None, draft: str | None, resources: ExitStack) -> tuple[ModelFiles, dict[Path, str]]:
    """The files of -m and -md as chat takes them; of those not on this machine the headers, and their pull names."""
    from moeedge.cli.model_files import resolve_models
    from moeedge.hub.catalog import Choice, find, load_catalog
    from moeedge.hub.local import LocalModel
    from moeedge.planning.headers import locate_or_fetch
    from moeedge.ui.console import notifier, stderr_console

    pull_names: dict[Path, str] = {}

    def fetch_header(text: str, with_draft: bool) -> LocalModel:
        path, pull_name = locate_or_fetch(text, resources, Run(notifier(stderr_console())))
        if pull_name:
            pull_names[path] = pull_name
        choice = find(load_catalog(), text)
        return LocalModel(path, choice if isinstance(choice, Choice) else None)

    return resolve_models(model, draft or "auto", fetch=fetch_header), pull_names
