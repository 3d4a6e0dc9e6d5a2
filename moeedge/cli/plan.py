"""`moeedge plan`: what a model will take and what fits, before anything of it is loaded."""

from __future__ import annotations

import os
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import cli_errors, show_log
from moeedge.cli.pair import Pair, check_device, placement_config, resolve_pair
from moeedge.errors import ModelNameError

Vram = Annotated[
    str | None,
    typer.Option(
        "--vram",
        metavar="SIZE",
        help="Plan for a GPU with so much free memory, for instance 8G, instead of what is measured; there need "
        "not be one here.",
        rich_help_panel="Hardware",
    ),
]
Ram = Annotated[
    str | None,
    typer.Option(
        "--ram",
        metavar="SIZE",
        help="Plan for a machine with so much free memory, instead of what is measured.",
        rich_help_panel="Hardware",
    ),
]
CacheRatio = Annotated[
    float | None,
    typer.Option(
        "--cache-ratio",
        metavar="R",
        help="The share of all expert bytes that the device shall hold, 0 to 1; 0: no cache. Default: what fits.",
        rich_help_panel="Expert placement",
    ),
]
Reserve = Annotated[
    str | None,
    typer.Option(
        "--reserve",
        metavar="SIZE",
        help="Memory of the device to leave free, beside what the cache leaves to others anyway.",
        rich_help_panel="Expert placement",
    ),
]


def plan(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    draft_max: options.DraftMax = None,
    ctx_size: options.CtxSize = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "auto",
    vram: Vram = None,
    ram: Ram = None,
    cache_ratio: CacheRatio = None,
    reserve: Reserve = None,
    output: Annotated[
        options.Output, typer.Option("-o", "--output", help="Print tables, or one JSON object with sizes in bytes.")
    ] = options.Output.TEXT,
    verbose: Annotated[bool, typer.Option("--verbose", help="Show llama.cpp's log on standard error.")] = False,
) -> None:
    """Say what a model will take of this machine's memory, and what fits, before anything is loaded.

    The header of the file is enough: a download that has only begun will do, and of a model that is not here it is read
    from the hub. Prints what lies on the device and what in memory, the share of the experts that the device can hold,
    the largest context, and the command that runs it so.
    """
    from moeedge.planning.memory_map import this_machine
    from moeedge.planning.planner import Planner
    from moeedge.planning.session_plan import make_plan
    from moeedge.ui.console import stdout_console
    from moeedge.ui.plan_view import plan_json, print_plan
    from moeedge.units import parse_size

    with cli_errors(), ExitStack() as resources:
        placement = placement_config(cache_ratio=cache_ratio)
        vram_bytes, ram_bytes, reserve_bytes = (
            None if one is None else parse_size(one) for one in (vram, ram, reserve)
        )
        check_device(device)
        if verbose:
            show_log()
        pair, names = _find(model, model_draft, resources)
        config = pair.engine_config(
            ctx_size=ctx_size,
            threads=0,
            draft_max=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
            placement=placement,
            emulate=True,
        )
        machine = this_machine(config, vram_bytes=vram_bytes, ram_bytes=ram_bytes)
        with Planner(config, machine, reserve=reserve_bytes or 0, names=names) as planner:
            typed = None if model is None else os.fspath(model)
            found = make_plan(planner, model_name=typed, draft_name=model_draft)
        if output is options.Output.JSON:
            typer.echo(plan_json(found), nl=False)
        else:
            print_plan(found, stdout_console())


def _find(model: Path | None, draft: str | None, resources: ExitStack) -> tuple[Pair, dict[Path, str]]:
    """The pair that -m and -md name; of what is not on this machine the headers, and what to pull for them."""
    try:
        return resolve_pair(model, draft), {}
    except ModelNameError:
        if model is None:
            raise
    from moeedge.planning.remote import catalog_draft, locate_or_fetch
    from moeedge.ui.console import say, stderr_console

    folder = Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-plan-")))
    err = stderr_console()
    target = locate_or_fetch(str(model), folder, lambda line: say(err, line))
    if draft is None and not model.exists():
        draft = catalog_draft(str(model))
    if draft in (None, "none"):
        return Pair(target.path, None), {target.path: target.remote_name} if target.remote_name else {}
    if draft == "ngram":
        return Pair(target.path, "ngram"), {target.path: target.remote_name} if target.remote_name else {}
    assistant = locate_or_fetch(str(draft), folder, lambda line: say(err, line))
    names = {one.path: one.remote_name for one in (target, assistant) if one.remote_name}
    return Pair(target.path, assistant.path), names
