"""`moeedge calibrate`: measure the machine for the scheduler, with the model and device that are used."""

from __future__ import annotations

import json
from dataclasses import replace

import typer

from moeedge.cli.common import emit
from moeedge.cli.engine_options import AUTO, BudgetOptions, EngineOptions, PlacementOptions
from moeedge.cli.model_files import resolve_models
from moeedge.cli.options import Output, declare, flatten
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError

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
    vram: int | None = None,
    cache_ratio: float | None = None,
    policy: str = "spac",
    utility_cap: int = 4,
    *,
    disk: bool = False,
    expert_budget: bool = False,
    budget_ranking: str | None = None,
    budget_policy: str | None = None,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Measure how fast this machine computes and moves a model's experts, and keep it for later runs.

    chat and bench do this by themselves the first time that a model meets a device (a GPU, another machine or the
    emulated device); this command measures again and shows it: the time of one expert on the CPU, on the device and on
    its way there; how the work is divided; steps with and without the expert cache; prompts. With --expert-budget it
    tries expert budgets instead (lossy), with --disk it measures the disk.
    """
    if disk:
        if expert_budget:
            raise InputError("--disk and --expert-budget cannot be used together.", "Leave out one of them.")
        unused = {
            "--vram": vram,
            "--cache-ratio": cache_ratio,
            "-md": engine.model_draft,
            "--draft-max": engine.draft_max,
        }
        _measure_disk(engine, [name for name, value in unused.items() if value is not None], output)
        return
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.engine.layer_search import open_session
    from moeedge.scheduler.measurement import kept_fields
    from moeedge.ui.console import notifier, say, stderr_console, stdout_console
    from moeedge.ui.machine_views import print_calibration

    placement = PlacementOptions(vram_bytes=vram, cache_ratio=cache_ratio, policy=policy, utility_cap=utility_cap)
    config = engine.config(placement.config(measure_anew=True), emulate_bundled=True)
    err = stderr_console()
    if expert_budget:
        budget = BudgetOptions(expert_budget=AUTO, budget_ranking=budget_ranking, budget_policy=budget_policy)
        config = replace(config, placement=placement.config())  # only the budgets are measured again
        _choose_budget(budget.config(config), output)
        return
    with open_session(config, notify=notifier(err)) as session:
        info, calibration, choice = session.info, session.calibration, session.layer_choice
    for note in info.notes:
        say(err, note)
    if calibration is None and choice is None:
        if info.cache_slots:
            raise InputError(f"A context of {info.n_ctx} tokens has no room to measure in.", "Use a larger -c.")
        raise InputError("Nothing was measured: no device holds experts.", _hint(config, info))
    if output is Output.TEXT:
        if calibration is not None:
            print_calibration(calibration, info, stdout_console())
        return
    about = {
        "model": info.model,
        "device": info.device,
        "threads": info.n_threads,
        "gamma": info.gamma,
        "policy": policy,
        "cache_ratio": info.cache_ratio,
        "cache_slots": info.cache_slots,
    }
    measured = {} if calibration is None else kept_fields(calibration)
    layers = None if choice is None else kept_fields(choice)
    typer.echo(json.dumps(about | measured | {"layer_choice": layers}))


def _measure_disk(engine: EngineOptions, unused: list[str], output: Output) -> None:
    """unused: options that were given and have no effect."""
    from moeedge.scheduler.disk import measure
    from moeedge.scheduler.measurement import measurement_json
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.machine_views import print_disk
    from moeedge.ui.progress import Bar

    if unused:
        verb = "has" if len(unused) == 1 else "have"
        say(
            stderr_console(),
            f"--disk measures reads of the model's file alone: {' and '.join(unused)} {verb} no effect.",
        )
    model = resolve_models(engine.model, "none").target
    with Bar(stderr_console(), "parts") as bar:
        found = measure(model, progress=bar)
    emit(output, measurement_json, print_disk, found)


def _choose_budget(config: EngineConfig, output: Output) -> None:
    from moeedge.bench.budget_choice import choose_budget
    from moeedge.scheduler.measurement import measurement_json
    from moeedge.ui.console import notifier, stderr_console
    from moeedge.ui.machine_views import print_budget_choice
    from moeedge.ui.progress import Bar

    err = stderr_console()
    assert config.expert_budget is not None
    with Bar(err, "parts") as bar:
        run = Run(show=notifier(err), progress=bar)
        choice = choose_budget(config, config.expert_budget, run, measure_anew=True)
    emit(output, measurement_json, print_budget_choice, choice)


def _hint(config: EngineConfig, info: EngineInfo) -> str:
    """The option that puts experts on a device."""
    from moeedge.engine.loading import resolve_device

    if info.n_experts == 0:
        return "Give a Mixture-of-Experts model: -m FILE."
    if resolve_device(config).kind == "none":
        return "Choose a device, for instance -dev emulated (moeedge devices lists them)."
    return "Give the cache room: --cache-ratio R or --vram SIZE."
