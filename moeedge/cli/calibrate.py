"""`moeedge calibrate`: measure the machine for the scheduler, with the model and device that are used."""

from __future__ import annotations

from moeedge.cli.engine_options import AUTO, BudgetOptions, EngineOptions, PlacementOptions
from moeedge.cli.options import Output, declare, flatten
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
    if disk and expert_budget:
        raise InputError("--disk and --expert-budget cannot be used together.", "Leave out one of them.")
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.cli import calibrate_run  # from here on llama.cpp is loaded

    if disk:
        unused = {
            "--vram": vram,
            "--cache-ratio": cache_ratio,
            "-md": engine.model_draft,
            "--draft-max": engine.draft_max,
        }
        calibrate_run.show_disk(engine.model, [name for name, value in unused.items() if value is not None], output)
        return
    placement = PlacementOptions(vram_bytes=vram, cache_ratio=cache_ratio, policy=policy, utility_cap=utility_cap)
    config = engine.config(placement.config(measure_anew=not expert_budget), emulate_bundled=True)
    if expert_budget:  # the machine is not measured again
        budget = BudgetOptions(expert_budget=AUTO, budget_ranking=budget_ranking, budget_policy=budget_policy)
        calibrate_run.show_budgets(budget.config(config), output)
    else:
        calibrate_run.show_calibration(config, output)
