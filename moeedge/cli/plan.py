"""`moeedge plan`: how much memory a model takes and what fits, before any of it is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from moeedge.cli import options
from moeedge.cli.common import memory_size, names, show_log
from moeedge.cli.declare import Output, derive, flatten, option
from moeedge.cli.engine_options import (
    EngineOptions,
    PlacementOptions,
    check_device,
    layer_notes,
)
from moeedge.cli.llama_options import LlamaOptions
from moeedge.cli.model_files import ModelFiles, resolve_models
from moeedge.engine.types import DraftWord
from moeedge.errors import DownloadError, InputError, ModelNameError
from moeedge.units import parse_rate

if TYPE_CHECKING:
    from moeedge.planning.beyond_ram import RamTierRequest
    from moeedge.planning.planner import Planner

FreeVram = Annotated[
    str | None,
    derive(
        options.Vram,
        help="Plan for a GPU with this much free memory, for instance 8G; this machine need not have one. Default: "
        "what is measured.",
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
TraceOption = Annotated[
    Path | None,
    option(
        options.TRACE,
        "--trace FILE",
        "For a model larger than the memory: its routing (moeedge profile --trace-out), to count hits in RAM.",
    ),
]


@flatten
def plan(
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
    trace: TraceOption = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show how much memory a model takes, and what fits, before it is downloaded or loaded.

    A model need not be here: the beginning of its file (the header) is read from the hub, and without network the
    catalog's facts give an estimate. Prints what takes memory on the GPU and in RAM, how many of the experts the GPU
    can hold, the largest context (tokens that the model remembers), and the command that runs the model this way. For
    a model larger than RAM: what is read from the disk per token, and which speed that allows.
    """
    from moeedge.planning.memory_map import this_machine
    from moeedge.planning.planner import Planner
    from moeedge.planning.session_plan import make_session_plan
    from moeedge.ui.console import stdout_console
    from moeedge.ui.plan_view import plan_json, print_plan

    placement = PlacementOptions(cache_ratio=cache_ratio).config()
    vram_bytes = None if vram is None else memory_size(vram, "--vram")
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
    with ExitStack() as resources:
        try:
            files, pull_names = _find(model, model_draft, resources)
        except DownloadError as error:
            memory = {"vram_bytes": vram_bytes, "ram_bytes": ram_bytes}
            unused = {"--trace": trace, "--disk-rate": disk_rate, "--cache-ratio": cache_ratio, "--reserve": reserve,
                      "-ngl": n_gpu_layers, "-ncmoe": n_cpu_moe, "-md": model_draft}  # fmt: skip
            without = [*(name for name, value in unused.items() if value is not None), *llama.given]
            _print_estimate(str(model), error, output, device=device, n_ctx=ctx_size, without=without, **memory)
            return
        config = llama.apply(engine.config(placement, files=files, auto_gamma=draft_max is None))
        machine = this_machine(config, vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        if vram_bytes is None and (ignored := layer_notes(config)):
            machine = replace(machine, notes=(*machine.notes, *ignored))
            config = replace(config, n_gpu_layers=0 if config.n_gpu_layers == 0 else None, n_cpu_moe=None)
        with Planner(config, machine, reserve=reserve_bytes or 0, names=pull_names) as planner:
            model_name = None if model is None else os.fspath(model)
            beyond_ram = _beyond_ram(planner, disk_rate, trace, tuple(sizes[1:]))
            found = make_session_plan(planner, model_name=model_name, draft_name=model_draft, beyond_ram=beyond_ram)
        if output is Output.JSON:
            typer.echo(plan_json(found), nl=False)
        else:
            print_plan(found, stdout_console())


def _print_estimate(
    name: str,
    error: DownloadError,
    output: Output,
    *,
    device: str,
    n_ctx: int,
    without: list[str],
    vram_bytes: int | None,
    ram_bytes: int | None,
) -> None:
    """The estimate of a model whose header cannot be read. Raises `error` where the catalog does not have the model.

    without: options that need the header.
    """
    from moeedge.hub.cache import find_variant
    from moeedge.hub.catalog import load_catalog
    from moeedge.planning.estimate import free_memory, make_estimated_plan
    from moeedge.ui.console import say, stderr_console, stdout_console
    from moeedge.ui.plan_view import estimate_json, print_estimate

    catalog = load_catalog()
    choice = catalog.find(name)
    if choice is None or find_variant(choice.variant) is not None:  # the draft's header is what cannot be read
        raise error
    memory = free_memory(device, vram_bytes=vram_bytes, ram_bytes=ram_bytes)
    found = make_estimated_plan(catalog, choice, memory, n_ctx=n_ctx, reason=error.message)
    if without:
        say(stderr_console(), f"Without the header {', '.join(without)} has no effect.", style="yellow")
    if output is Output.JSON:
        typer.echo(estimate_json(found), nl=False)
    else:
        print_estimate(found, stdout_console())


def _drafts_for_itself(path: Path) -> bool:
    """Whether the model has a head of its own; of the file only the header may be on this machine."""
    from moeedge.engine.loading import drafts_for_itself
    from moeedge.planning.headers import loadable

    with loadable(path) as file:
        return drafts_for_itself(file.path)


def _beyond_ram(planner: Planner, disk_rate: str | None, trace: Path | None, sizes: tuple[int, ...]) -> RamTierRequest:
    """What is known of disk and routing. sizes: of other memory. Raises InputError for a trace of another model."""
    from moeedge.planning.beyond_ram import ASSUMED_DISK_BYTES_PER_S, Disk, RamTierRequest, StepRouting
    from moeedge.scheduler.disk import read_kept

    measured = read_kept(planner.file.original) if planner.facts.is_here else None
    if disk_rate is not None:
        disks = [Disk(float(parse_rate(rate)), "given") for rate in names(disk_rate, "--disk-rate")]
    elif measured is not None:
        disks = [Disk(measured.best.bytes_per_s, "measured")]
    else:
        disks = [Disk(ASSUMED_DISK_BYTES_PER_S, "assumed")]
    n_drafts = planner.config.gamma if planner.has_drafts else 0
    base = RamTierRequest(tuple(disks), n_drafts=n_drafts, sizes=sizes)
    if trace is None:
        return _by_earlier_runs(planner, base)
    from moeedge.sim.ram_hits import replay_ram_hits
    from moeedge.trace.importers import read_trace

    routing, facts = read_trace(trace, planner.facts.n_experts), planner.facts
    n_layers, n_experts = len(routing.expert_layers()), routing.meta.n_experts
    if (n_layers, n_experts) != (facts.n_expert_layers, facts.n_experts):
        raise InputError(
            f"The trace has {n_layers} layers of {n_experts} experts, {facts.file} has {facts.n_expert_layers} of "
            f"{facts.n_experts}.",
            "Give a trace of this model.",
        )

    def forecast(ratios: Sequence[float], gamma: int) -> list[StepRouting]:
        hits = replay_ram_hits(routing, ratios, gamma=gamma)
        return [StepRouting(found.n_tokens, found.unique, found.hit_rate_experts) for found in hits]

    drafted = partial(forecast, gamma=n_drafts) if n_drafts else None
    return replace(base, plain=partial(forecast, gamma=0), drafted=drafted, source="trace", trace=trace.name)


def _by_earlier_runs(planner: Planner, base: RamTierRequest) -> RamTierRequest:
    """The request with the routing of what earlier runs have used, if anything of them is kept."""
    from moeedge.planning.beyond_ram import kept_routing
    from moeedge.scheduler.kept_activations import KeptActivations

    facts = planner.facts
    if not facts.is_here or not facts.n_experts:
        return base
    kept = KeptActivations.open(planner.file.original, facts.n_layers, facts.n_experts)
    earlier = kept.earlier_runs
    if earlier is None:
        return base
    plain = kept_routing(kept.counts, facts.n_expert_used)
    return replace(base, plain=plain, source="kept", n_tokens=earlier.n_tokens)


def _find(model: Path | None, draft: str | None, resources: ExitStack) -> tuple[ModelFiles, dict[Path, str]]:
    """The files that -m and -md name; of those that are not on this machine the headers, and what to pull for them."""
    try:
        files = resolve_models(model, draft)
        if draft is None and _drafts_for_itself(files.target):  # which chat takes
            files = ModelFiles(files.target, "mtp")
        return files, {}
    except ModelNameError:
        if model is None:
            raise
    from moeedge.planning.headers import catalog_draft, locate_or_fetch
    from moeedge.ui.console import say, stderr_console

    folder = Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-plan-")))
    err = stderr_console()
    found = [locate_or_fetch(str(model), folder, lambda line: say(err, line))]
    if draft in (None, "auto") and _drafts_for_itself(found[0].path):
        draft = "mtp"
    elif draft in (None, "auto") and not model.exists():
        draft = catalog_draft(str(model)) or ("ngram" if draft == "auto" else None)
    draft_file: Path | DraftWord | None = draft if draft in get_args(DraftWord) else None  # type: ignore[assignment]
    if draft not in (None, "none", *get_args(DraftWord)):
        found.append(locate_or_fetch(str(draft), folder, lambda line: say(err, line)))
        draft_file = found[1].path
    return ModelFiles(found[0].path, draft_file), {file.path: file.remote_name for file in found if file.remote_name}
