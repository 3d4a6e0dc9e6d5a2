"""`moeedge calibrate` once its options are read: measures, and shows the measurements."""

from __future__ import annotations

import json
from pathlib import Path

import typer

from moeedge.bench.budget_choice import choose_budget
from moeedge.cli.common import emit
from moeedge.cli.model_files import resolve_models
from moeedge.cli.options import Output
from moeedge.engine.layer_search import open_session
from moeedge.engine.loading import resolve_device
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.run import Run
from moeedge.scheduler.disk import measure
from moeedge.scheduler.measurement import kept_fields, measurement_json
from moeedge.ui.console import notifier, say, stderr_console, stdout_console
from moeedge.ui.machine_views import print_budget_choice, print_calibration, print_disk
from moeedge.ui.progress import Bar


def show_calibration(config: EngineConfig, output: Output) -> None:
    """Measures the model on its device. Raises InputError where nothing can be measured."""
    err = stderr_console()
    with open_session(config, run=Run(notifier(err))) as session:
        info, calibration, choice = session.info, session.calibration, session.layer_choice
    for note in info.notes:
        say(err, note)
    if calibration is None and choice is None:
        if info.cache_slots:
            raise InputError(f"A context of {info.n_ctx} tokens has no room to measure in.", "Use a larger -c.")
        hint = "Give the cache room: --cache-ratio R or --vram SIZE."
        if info.n_experts == 0:
            hint = "Give a Mixture-of-Experts model: -m FILE."
        elif resolve_device(config).kind == "none":
            hint = "Choose a device, for instance -dev emulated (moeedge devices lists them)."
        raise InputError("Nothing was measured: no device holds experts.", hint)
    if output is Output.TEXT:
        if calibration is not None:
            print_calibration(calibration, info, stdout_console())
        return
    about = {
        "model": info.model,
        "device": info.device,
        "threads": info.n_threads,
        "gamma": info.gamma,
        "policy": config.placement.policy,
        "cache_ratio": info.cache_ratio,
        "cache_slots": info.cache_slots,
    }
    measured = {} if calibration is None else kept_fields(calibration)
    layers = None if choice is None else kept_fields(choice)
    typer.echo(json.dumps(about | measured | {"layer_choice": layers}))


def show_disk(model: Path | None, unused: list[str], output: Output) -> None:
    """Measures the disk of the model's file. unused: options on the command line that have no effect."""
    err = stderr_console()
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        say(err, f"--disk measures reads of the model's file alone: {' and '.join(unused)} {verb} no effect.")
    file = resolve_models(model, "none").target
    with Bar(err, "parts") as bar:
        rates = measure(file, progress=bar)
    emit(output, measurement_json, print_disk, rates)


def show_budgets(config: EngineConfig, output: Output) -> None:
    """Measures expert budgets."""
    err = stderr_console()
    assert config.expert_budget is not None
    with Bar(err, "parts") as bar:
        choice = choose_budget(config, config.expert_budget, Run(notifier(err), progress=bar), measure_anew=True)
    emit(output, measurement_json, print_budget_choice, choice)
