"""`moeedge calibrate`: measure the machine for the scheduler, with the model and device that are used."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import typer

from moeedge.cli.common import emit
from moeedge.cli.engine_options import AUTO, BudgetOptions, CacheOptions, EngineOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.engine.types import EngineConfig
from moeedge.errors import InputError
from moeedge.run import Decision, Run

declare(
    """
    * --expert-budget  Measure expert budgets instead, and keep the choice for --expert-budget auto: the fastest whose
        score on a calibration set stays within one standard deviation.
    [Hardware]
    * --disk  Measure random reads of the model's file instead, past the page cache and read-only, and keep the figures
        of the disk: what a model larger than memory can reach (moeedge plan).
    """,
    "calibrate",
)


@flatten
def calibrate(
    engine: EngineOptions,
    placement: CacheOptions,
    *,
    disk: bool = False,
    expert_budget: bool = False,
    budget: BudgetOptions,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Measure how fast this machine computes and moves a model's experts, and keep it for later runs.

    chat and bench do this by themselves the first time that a model meets a device (a GPU, another machine or the
    emulated device); this command measures again and shows it: the time of one expert on the CPU, on the device and on
    its way there; how the work is divided; steps with and without the expert cache; prompts. With --expert-budget it
    tries expert budgets instead (lossy), with --disk it measures the disk.
    """
    if disk and expert_budget:
        raise InputError("--disk and --expert-budget cannot be used together.", "Leave out one of them.")
    engine.limit_openmp_spin(emulate_bundled=True)
    if disk:
        unused = {
            "--vram": placement.vram_bytes,
            "--cache-ratio": placement.cache_ratio,
            "-md": engine.model_draft,
            "--draft-max": engine.draft_max,
        }
        show_disk(engine.model, [name for name, value in unused.items() if value is not None], output)
        return
    config = engine.config(placement.config(measure_anew=not expert_budget), emulate_bundled=True)
    if expert_budget:  # the machine is not measured again
        show_budgets(replace(budget, expert_budget=AUTO).config(config), output)
    else:
        show_calibration(config, output)


def show_calibration(config: EngineConfig, output: Output) -> None:
    """Measures the model on its device. Raises InputError where nothing can be measured."""
    from moeedge.engine.layer_search import open_session
    from moeedge.engine.loading import resolve_device
    from moeedge.scheduler.calibration import kept_fields
    from moeedge.ui.console import notifier, say, stderr_console, stdout_console
    from moeedge.ui.machine_views import print_calibration

    err = stderr_console()
    with open_session(config, run=Run(notifier(err))) as session:
        info, calibration, choice = session.info, session.calibration, session.layer_choice
    decisions, chosen = list[Decision](), config.placement
    if calibration is not None and output is not Output.JSON:
        decisions += calibration.path_decisions(chosen.prefill, chosen.device_path)
    on_stdout = {decision.sentence() for decision in decisions}
    for note in filter(lambda note: note not in on_stdout, info.notes):
        say(err, note)
    if calibration is None and choice is None:
        if info.cache_slots:
            raise InputError(f"A context of {info.n_ctx} tokens has no room to measure in.", "Use a larger -c.")
        hint = "Give the cache room: --cache-ratio R or --vram SIZE."
        if info.n_experts == 0:
            hint = "Give a Mixture-of-Experts model: -m FILE."
        elif not resolve_device(config).has_tiers:
            hint = "Choose a device, for instance -dev emulated (moeedge devices lists them)."
        raise InputError("Nothing was measured: no device holds experts.", hint)
    if output is Output.TEXT:
        if calibration is not None:
            print_calibration(calibration, info, stdout_console(), decisions)
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
    from moeedge.cli.model_files import resolve_models
    from moeedge.scheduler.calibration import measurement_json
    from moeedge.scheduler.disk import measure
    from moeedge.ui.console import Bar, say, stderr_console
    from moeedge.ui.machine_views import print_disk

    err = stderr_console()
    if unused:
        verb = "has" if len(unused) == 1 else "have"
        say(err, f"--disk measures reads of the model's file alone: {' and '.join(unused)} {verb} no effect.")
    file = resolve_models(model, "none").target
    with Bar(err, "parts") as bar:
        rates = measure(file, progress=bar)
    emit(output, measurement_json, print_disk, rates)


def show_budgets(config: EngineConfig, output: Output) -> None:
    from moeedge.bench.budget_choice import choose_budget
    from moeedge.scheduler.calibration import measurement_json
    from moeedge.ui.console import Bar, notifier, stderr_console
    from moeedge.ui.machine_views import print_budget_choice

    err = stderr_console()
    assert config.expert_budget is not None
    with Bar(err, "parts") as bar:
        choice = choose_budget(config, config.expert_budget, Run(notifier(err), progress=bar), measure_anew=True)
    emit(output, measurement_json, print_budget_choice, choice)
