"""`moeedge plan` once its options are read: reads headers, and shows the plan."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import get_args

import typer

from moeedge.cli.common import emit
from moeedge.cli.devices import check_device, layer_notes
from moeedge.cli.engine_options import LlamaOptions, PlacementOptions
from moeedge.cli.model_files import ModelFiles, drafts_for_itself, resolve_models
from moeedge.cli.options import Output
from moeedge.engine.types import DEFAULT_GAMMA, DraftWord
from moeedge.errors import DownloadError, ModelNameError
from moeedge.hub.catalog import Choice, load_catalog
from moeedge.hub.names import find
from moeedge.planning.beyond_ram import known_tier
from moeedge.planning.headers import locate_or_fetch
from moeedge.planning.memory_map import this_machine
from moeedge.planning.planner import Planner
from moeedge.planning.session_plan import make_session_plan
from moeedge.run import Run
from moeedge.ui.console import notifier, stderr_console
from moeedge.ui.plan_view import print_plan
from moeedge.ui.tables import record_json

# not about what runs, of another meaning in chat, or a secret: the suggested command does not repeat them
_NOT_REPEATED = {
    *("vram", "ram", "cache_ratio", "reserve", "disk_rate"),
    *("output", "verbose", "hf_token", "offline"),
}
_OF_LAYERS = {"n_gpu_layers", "n_cpu_moe", "cpu_moe"}


def show_plan(
    context: typer.Context,
    engine: LlamaOptions,
    vram: int | None,
    ram: list[int],
    cache_ratio: float | None,
    reserve: int,
    disk_rate: list[float] | None,
    output: Output,
) -> None:
    """Plans the session of these options for a machine of these sizes, in bytes, and disks, in bytes per second."""
    placement = PlacementOptions(cache_ratio=cache_ratio).config()
    check_device(engine.device)
    with ExitStack() as resources:
        try:
            files, pull_names = _find(engine.model, engine.model_draft, resources)
        except DownloadError as error:
            if load_catalog().find(str(engine.model)) is not None:
                error.hint = f"{error.hint} moeedge list --all --fits auto estimates from the catalog alone."
            raise
        config = engine.config(placement, files=files, auto_gamma=engine.draft_max is None)
        machine = this_machine(config, vram_bytes=vram, ram_bytes=ram[0] if ram else None)
        ignored = [] if vram is not None else layer_notes(config)
        if ignored:
            machine = replace(machine, notes=(*machine.notes, *ignored))
            config = replace(config, n_gpu_layers=0 if config.n_gpu_layers == 0 else None, n_cpu_moe=None)
        with Planner(config, machine, reserve=reserve, names=pull_names) as planner:
            beyond_ram = known_tier(planner.facts, planner.file.original, disk_rate, tuple(ram[1:]))
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
    draft = draft or "auto"
    try:
        return resolve_models(model, draft), {}
    except ModelNameError:
        if model is None:
            raise
    folder = Path(resources.enter_context(TemporaryDirectory(prefix="moeedge-plan-")))
    err, catalog = stderr_console(), load_catalog()
    target, name = locate_or_fetch(str(model), folder, Run(notifier(err)))
    names_by_path = {target: name}
    choice = None if model.exists() else find(catalog, str(model))
    entry = choice.entry if isinstance(choice, Choice) else None
    if draft == "auto" and drafts_for_itself(target):
        draft = "mtp"
    elif draft == "auto":
        drafts = catalog.drafts(choice) if isinstance(choice, Choice) else []
        draft = drafts[0].name if drafts else "ngram"
    draft_file: Path | DraftWord | None = draft if draft in get_args(DraftWord) else None  # type: ignore[assignment]
    if draft not in ("none", *get_args(DraftWord)):
        draft_file, name = locate_or_fetch(draft, folder, Run(notifier(err)))
        names_by_path[draft_file] = name
    suits = DEFAULT_GAMMA if entry is None or entry.draft_max is None or draft == "mtp" else entry.draft_max
    return ModelFiles(target, draft_file, suits), {path: name for path, name in names_by_path.items() if name}
