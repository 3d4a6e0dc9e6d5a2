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
from moeedge.cli.declare import Output, derive, flatten, option
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
Reserve = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--reserve SIZE",
        "Device memory to leave free in addition to the usual reserve.",
    ),
]
DiskRates = Annotated[
    str | None,
    option(
        options.HARDWARE,
        "--disk-rate LIST",
        "For a model larger than the memory: random reads of the disk, as 1GB/s; several, separated by commas, are "
        "compared. Default: what moeedge calibrate --disk measured.",
    ),
]
# not about what runs, of another meaning in chat, or a secret: the suggested command does not repeat them
_NOT_REPEATED = {
    "vram",
    "ram",
    "cache_ratio",
    "reserve",
    "disk_rate",
    "output",
    "verbose",
    "hf_token",
    "offline",
}
_OF_LAYERS = {"n_gpu_layers", "n_cpu_moe", "cpu_moe"}


@flatten
def plan(
    context: typer.Context,
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
    ctx_size: options.CtxSize = 0,
    n_gpu_layers: options.NGpuLayers = None,
    n_cpu_moe: options.NCpuMoe = None,
    cpu_moe: options.CpuMoe = False,
    device: options.Device = "auto",
    backend: options.Backend = None,
    hf_token: options.HfToken = None,
    offline: options.Offline = False,
    *,
    llama: LlamaOptions,
    vram: FreeVram = None,
    ram: FreeRam = None,
    cache_ratio: CacheRatio = None,
    reserve: Reserve = None,
    disk_rate: DiskRates = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show how much memory a model needs, and what fits, before it is downloaded or loaded.

    A model need not be here: the beginning of its file (the header) is read from the hub, and without network the
    catalog's facts give an estimate. Prints what takes memory on the GPU and in RAM, how many of the experts the GPU
    can hold, the largest context (tokens that the model remembers), and the command that runs the model this way. For
    a model larger than RAM: what is read from the disk per token, and which speed that allows.
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
    check_device(device)
    if verbose:
        show_log()
    engine = EngineOptions(
        model=model,
        model_draft=model_draft,
        draft_max=None if draft_max is None else str(draft_max),
        ctx_size=ctx_size,
        n_gpu_layers=n_gpu_layers,
        n_cpu_moe=n_cpu_moe,
        cpu_moe=cpu_moe,
        device=device,
    )
    given = _given(context)
    with ExitStack() as resources:
        try:
            files, pull_names = _find(model, model_draft, resources)
        except DownloadError as error:
            memory = {"vram_bytes": vram_bytes, "ram_bytes": ram_bytes}
            unused = {"--disk-rate": disk_rate, "--cache-ratio": cache_ratio, "--reserve": reserve,
                      "-ngl": n_gpu_layers, "-ncmoe": n_cpu_moe}  # fmt: skip
            without = [*(name for name, value in unused.items() if value is not None), *llama.given]
            repeated = _words(given, _NOT_REPEATED)
            _print_estimate(
                str(model),
                error,
                output,
                device=device,
                n_ctx=ctx_size,
                given=repeated,
                without=without,
                draft="none" if draft_max == 0 else model_draft,
                **memory,
            )
            return
        config = llama.apply(engine.config(placement, files=files, auto_gamma=draft_max is None))
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


def _print_estimate(
    name: str,
    error: DownloadError,
    output: Output,
    *,
    device: str,
    n_ctx: int,
    given: list[str],
    without: list[str],
    draft: str | None,
    vram_bytes: int | None,
    ram_bytes: int | None,
) -> None:
    """The estimate of a model whose header cannot be read. Raises `error` where the catalog does not have the model.

    given: options that the suggested command repeats. without: options that need the header. draft: the value of -md.
    """
    from moeedge.hub.cache import find_variant
    from moeedge.hub.catalog import load_catalog
    from moeedge.hub.local import chat_draft
    from moeedge.planning.estimate import free_memory, make_estimated_plan
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.plan_view import estimate_json, print_estimate

    catalog = load_catalog()
    choice = catalog.find(name)
    if choice is None or find_variant(choice.variant) is not None:  # the draft's header is what cannot be read
        raise error
    memory = free_memory(device, vram_bytes=vram_bytes, ram_bytes=ram_bytes)
    drafts = chat_draft(catalog, choice) if draft in (None, "auto") else catalog.find(str(draft))
    if drafts is None and draft not in (None, "auto", *get_args(DraftWord), "none"):
        without = ["-md", *without]
    found = make_estimated_plan(
        choice,
        memory,
        draft=drafts,
        n_ctx=n_ctx,
        given=given,
        vram_given=vram_bytes is not None,
        reason=error.message,
    )
    if without:
        say(stderr_console(), f"Without the header {', '.join(without)} has no effect.", style="yellow")
    emit(output, estimate_json, print_estimate, found)


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
    from moeedge.hub.catalog import Choice, load_catalog
    from moeedge.hub.names import find
    from moeedge.planning.headers import locate_or_fetch
    from moeedge.ui.console import say, stderr_console

    folder = Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-plan-")))
    err, catalog = stderr_console(), load_catalog()
    found = [locate_or_fetch(str(model), folder, lambda line: say(err, line))]
    choice = None if model.exists() else find(catalog, str(model))
    entry = choice.entry if isinstance(choice, Choice) else None
    if draft == "auto" and drafts_for_itself(found[0].path):
        draft = "mtp"
    elif draft == "auto":
        best = catalog.best_draft(choice) if isinstance(choice, Choice) else None
        draft = "ngram" if best is None else best.name
    draft_file: Path | DraftWord | None = draft if draft in get_args(DraftWord) else None  # type: ignore[assignment]
    if draft not in ("none", *get_args(DraftWord)):
        found.append(locate_or_fetch(draft, folder, lambda line: say(err, line)))
        draft_file = found[1].path
    suits = DEFAULT_GAMMA if entry is None or entry.draft_max is None or draft == "mtp" else entry.draft_max
    pulls = {file.path: file.remote_name for file in found if file.remote_name}
    return ModelFiles(found[0].path, draft_file, suits), pulls
