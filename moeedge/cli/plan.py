"""`moeedge plan`: how much memory a model takes and what fits, before any of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, Any, get_args

import typer

from moeedge.cli import options
from moeedge.cli.common import emit, gpu_memory, memory_size, names, show_log
from moeedge.cli.declare import Output, declare, derive, flatten, option
from moeedge.cli.engine_options import (
    EngineOptions,
    PlacementOptions,
    check_device,
    layer_notes,
)
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.model_files import ModelFiles, drafts_for_itself, resolve_models
from moeedge.engine.types import DEFAULT_GAMMA, DraftWord
from moeedge.errors import DownloadError, ModelNameError
from moeedge.hub.catalog import Choice, load_catalog
from moeedge.units import parse_rate

if TYPE_CHECKING:
    from moeedge.planning.beyond_ram import RamTierRequest
    from moeedge.planning.planner import Planner

FreeVram = Annotated[
    str | None,
    derive(
        options.Vram,
        help="Plan for a GPU of this size; this machine need not have one. 12GB: what a card sold with 12 GB has; "
        "12GiB, 12000MB: exactly so much free memory. Default: what is measured.",
    ),
]
FreeRam = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--ram LIST",
        "Plan for a machine with this much free memory, such as 16GiB; further sizes, separated by commas, are "
        "compared for a model larger than the memory. Default: what is measured.",
    ),
]
CacheRatio = Annotated[
    float | None,
    derive(
        options.CacheRatio,
        help="Share of all expert bytes that the device holds, 0 to 1; 0: no cache. Default: what fits.",
    ),
]
declare(
    options.PLACEMENT,
    """
    --reserve SIZE  Device memory to leave free in addition to the usual reserve.
    """,
)
declare(
    options.HARDWARE,
    """
    --disk-rate LIST  For a model larger than the memory: random reads of the disk, as 1GB/s; several, separated by
        commas, are compared. Default: what moeedge calibrate --disk measured.
    """,
)
# not about what runs, of another meaning in chat, or a secret: the suggested command does not repeat them
_NOT_REPEATED = {
    *("vram", "ram", "cache_ratio", "reserve", "disk_rate"),
    *("output", "verbose", "hf_token", "offline"),
}
_OF_LAYERS = {"n_gpu_layers", "n_cpu_moe", "cpu_moe"}


@flatten
def plan(
    context: typer.Context,
    engine: EngineOptions,
    *,
    llama: LlamaOptions,
    vram: FreeVram = None,
    ram: FreeRam = None,
    cache_ratio: CacheRatio = None,
    reserve: str | None = None,
    disk_rate: str | None = None,
    output: options.TextOrJson = Output.TEXT,
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
    from moeedge.planning.session_plan import make_session_plan
    from moeedge.ui.plan_view import plan_json, print_plan

    placement = PlacementOptions(cache_ratio=cache_ratio).config()
    vram_bytes = None if vram is None else gpu_memory(vram, "--vram")
    reserve_bytes = None if reserve is None else memory_size(reserve, "--reserve")
    sizes = [] if ram is None else [memory_size(size, "--ram") for size in names(ram, "--ram")]
    ram_bytes = sizes[0] if sizes else None
    check_device(engine.device)
    if verbose:
        show_log()
    given = _given(context)
    with ExitStack() as resources:
        try:
            files, pull_names = _find(engine.model, engine.model_draft, resources)
        except DownloadError as error:
            if load_catalog().find(str(engine.model)) is not None:
                error.hint = f"{error.hint} moeedge list --all --fits auto estimates from the catalog alone."
            raise
        config = llama.apply(engine.config(placement, files=files, auto_gamma=engine.draft_max is None))
        machine = this_machine(config, vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        ignored = [] if vram_bytes is not None else layer_notes(config)
        if ignored:
            machine = replace(machine, notes=(*machine.notes, *ignored))
            config = replace(config, n_gpu_layers=0 if config.n_gpu_layers == 0 else None, n_cpu_moe=None)
        with Planner(config, machine, reserve=reserve_bytes or 0, names=pull_names) as planner:
            beyond_ram = _beyond_ram(planner, disk_rate, tuple(sizes[1:]))
            repeated = _words(given, _NOT_REPEATED | _OF_LAYERS if ignored else _NOT_REPEATED)
            found = make_session_plan(planner, given=repeated, beyond_ram=beyond_ram)
        emit(output, plan_json, print_plan, found)


def _given(context: typer.Context) -> list[tuple[str, list[str]]]:
    """The options on the command line: the parameter's name, and the words as typed."""
    known: Mapping[str, Any] = {
        spelling: param for param in context.command.params for spelling in (*param.opts, *param.secondary_opts)
    }
    words = iter(() if context.obj is None else context.obj.arguments)
    return [
        (str(known[word].name), [word] if known[word].is_flag else [word, next(words)])
        for word in words
        if word in known
    ]


def _words(given: Sequence[tuple[str, list[str]]], without: set[str]) -> list[str]:
    return [word for name, words in given if name not in without for word in words]


def _beyond_ram(planner: Planner, disk_rate: str | None, sizes: tuple[int, ...]) -> RamTierRequest:
    """What is known of the disk, and of the routing by what earlier runs have used. sizes: of other memory."""
    from moeedge.planning.beyond_ram import ASSUMED_DISK_BYTES_PER_S, Disk, RamTierRequest, kept_hits
    from moeedge.scheduler.disk import read_kept
    from moeedge.scheduler.kept_activations import KeptActivations

    measured = read_kept(planner.file.original) if planner.facts.is_here else None
    if disk_rate is not None:
        disks = [Disk(float(parse_rate(rate)), "given") for rate in names(disk_rate, "--disk-rate")]
    elif measured is not None:
        disks = [Disk(measured.best.bytes_per_s, "measured")]
    else:
        disks = [Disk(ASSUMED_DISK_BYTES_PER_S, "assumed")]
    base = RamTierRequest(tuple(disks), sizes=sizes)
    facts = planner.facts
    if not facts.is_here or not facts.n_experts:
        return base
    kept = KeptActivations.open(planner.file.original, facts.n_layers, facts.n_experts)
    earlier = kept.earlier_runs
    if earlier is None:
        return base
    return replace(base, hits=kept_hits(kept.counts), source="kept", n_tokens=earlier.n_tokens)


def _find(model: Path | None, draft: str | None, resources: ExitStack) -> tuple[ModelFiles, dict[Path, str]]:
    """The files of -m and -md as chat takes them; of those not on this machine the headers, and their pull names."""
    draft = draft or "auto"
    try:
        return resolve_models(model, draft), {}
    except ModelNameError:
        if model is None:
            raise
    from moeedge.hub.names import find
    from moeedge.planning.headers import locate_or_fetch
    from moeedge.ui.console import say, stderr_console

    folder = Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-plan-")))
    err, catalog = stderr_console(), load_catalog()
    target, name = locate_or_fetch(str(model), folder, lambda line: say(err, line))
    names_by_path = {target: name}
    choice = None if model.exists() else find(catalog, str(model))
    entry = choice.entry if isinstance(choice, Choice) else None
    if draft == "auto" and drafts_for_itself(target):
        draft = "mtp"
    elif draft == "auto":
        best = catalog.best_draft(choice) if isinstance(choice, Choice) else None
        draft = "ngram" if best is None else best.name
    draft_file: Path | DraftWord | None = draft if draft in get_args(DraftWord) else None  # type: ignore[assignment]
    if draft not in ("none", *get_args(DraftWord)):
        draft_file, name = locate_or_fetch(draft, folder, lambda line: say(err, line))
        names_by_path[draft_file] = name
    suits = DEFAULT_GAMMA if entry is None or entry.draft_max is None or draft == "mtp" else entry.draft_max
    return ModelFiles(target, draft_file, suits), {path: name for path, name in names_by_path.items() if name}
