"""`moeedge fit`: measure the parts of a speculative step, fit MoESD's model, and predict what speculation gains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge import paths
from moeedge.cli import options, trace_options
from moeedge.cli.common import integers, names, show_log
from moeedge.cli.declare import Output, derive, option
from moeedge.cli.engine_options import EngineOptions
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.analysis.step_model import Machine

BatchTokens = Annotated[
    str,
    option(options.WORK, "--batch-tokens LIST", "Tokens in a batch of the target, 1 to 64, whose times are measured."),
]
BatchSizes = Annotated[
    str, option(options.WORK, "--batch-sizes LIST", "Sequences in a batch, for which speed-ups are predicted.")
]
NExpertUsed = Annotated[
    str | None,
    option(
        options.MODEL,
        "--n-expert-used LIST",
        "Experts per token to measure with, at most the model's number. Default: the model's and half of it; the "
        "difference says what experts cost.",
    ),
]
WhatIfUsed = Annotated[
    str | None,
    option(
        options.WORK,
        "--what-if-used LIST",
        "Experts per token to predict for. Default: powers of two up to twice the model's number.",
    ),
]
WhatIfHardware = Annotated[
    str,
    option(
        options.HARDWARE,
        "--what-if-hardware LIST",
        "Machines to predict for, as moeedge simulate --hardware names them, or none.",
    ),
]
MeasureSpeedUp = Annotated[
    bool,
    option(
        options.WORK,
        "--measure-speed-up/--no-measure-speed-up",
        "Decode the prompts plainly and with every draft length, next to the predictions.",
    ),
]
AcceptanceChance = Annotated[
    float | None,
    derive(
        trace_options.AcceptanceChance,
        help="Chance of a draft to be accepted after all before it were. Default: counted on the prompts.",
        min=0,
        max=1,
    ),
]
Plot = Annotated[Path | None, derive(options.Plot, help="Draw times, fit and predictions (.png, .svg or .pdf).")]


def fit(
    batch_tokens: BatchTokens = "1,2,3,4,5,6,7,8,9,12,16,24,32,48,64",
    draft_max: options.DraftMaxList = "1,2,3,4,5,6,7,8",
    batch_sizes: BatchSizes = "1,2,4,8,16,32,64",
    n_expert_used: NExpertUsed = None,
    what_if_used: WhatIfUsed = None,
    what_if_hardware: WhatIfHardware = "rtx4090-pcie4,h200",
    measure_speed_up: MeasureSpeedUp = True,
    acceptance_chance: AcceptanceChance = None,
    dataset: options.Dataset = None,
    limit: options.Limit = 8,
    offline_sample: options.OfflineSample = False,
    n_predict: options.NPredict = 96,
    repetitions: options.Repetitions = 5,
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    offline: options.Offline = False,
    ctx_size: options.CtxSize = 0,
    threads: options.Threads = 0,
    n_gpu_layers: options.NGpuLayers = None,
    device: options.Device = "none",
    backend: options.Backend = None,
    plot: Plot = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Measure what a step of a model and its draft takes, and predict what drafts gain.

    Times the model over 1 to 64 tokens, its draft, and the choice of tokens; fits a formula of ten parameters to that
    (MoESD, docs/speed-model.md); and predicts the gain by draft length and texts at a time, for other numbers of
    experts per token, and on other machines. Needs a quiet machine. After Ctrl-C what was measured is fitted, if it
    suffices.
    """
    engine = EngineOptions(
        model=model,
        model_draft=model_draft,
        ctx_size=ctx_size,
        threads=threads,
        n_gpu_layers=n_gpu_layers,
        device=device,
        backend=backend,
    )
    engine.limit_openmp_spin()
    from moeedge.bench.speculation_fit import FitPlan, run_fit
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import check_picture, notifier, say, stderr_console, stdout_console
    from moeedge.ui.fit_views import print_fit
    from moeedge.ui.progress import PartsProgress

    if plot is not None:
        check_picture(plot)
    plan = FitPlan(
        tokens=tuple(sorted(integers(batch_tokens, "--batch-tokens"))),
        gammas=tuple(sorted(integers(draft_max, "--draft-max"))),
        batch_sizes=tuple(sorted(integers(batch_sizes, "--batch-sizes"))),
        n_used=() if n_expert_used is None else tuple(integers(n_expert_used, "--n-expert-used")),
        what_if_used=() if what_if_used is None else tuple(sorted(integers(what_if_used, "--what-if-used"))),
        repetitions=repetitions,
        n_predict=n_predict,
        measure_speed_up=measure_speed_up,
        others=_machines(what_if_hardware),
        acceptance_chance=acceptance_chance,
    )
    from moeedge.data import load_dataset
    from moeedge.scheduler.config import PlacementConfig

    config = engine.config(PlacementConfig(cache_ratio=0.0))  # an expert cache would change while times are taken
    if limit < 0:
        raise ValueError(f"--limit must be 0 (all) or more, not {limit}")
    name = dataset or ("toy" if paths.is_bundled(config.model) else "sample")
    prompts = load_dataset(name, offline_sample=offline_sample).limited(limit or None).prompts
    if verbose:
        show_log()
    err = stderr_console()
    with Interrupt() as interrupt, PartsProgress(err) as progress:
        interrupt.arm()
        report = run_fit(
            config,
            prompts,
            plan,
            notify=notifier(err),
            cancel=interrupt,
            on_part=progress.part_of,
            on_pass=progress.one,
        )
    if report.interrupted:
        say(err, "Stopped: the fit is of what was measured until then.", style="yellow")
    if output is Output.JSON:
        typer.echo(json.dumps(report.as_dict(), ensure_ascii=False))
    else:
        print_fit(report, stdout_console())
    if plot is not None:
        from moeedge.ui.fit_plots import draw_fit  # loads Matplotlib

        draw_fit(report, plot)
    if interrupt.exit_code:
        raise typer.Exit(interrupt.exit_code)


def _machines(text: str) -> tuple[Machine, ...]:
    from moeedge.analysis.step_model import Machine
    from moeedge.sim.step_costs import find_hardware

    if text.strip() == "none":
        return ()
    specs = [find_hardware(name) for name in names(text, "--what-if-hardware")]
    if any(spec.name == "this" for spec in specs):
        raise InputError("This machine is always part of the prediction.", "Name others, or none.")
    return tuple(Machine(name=spec.name, bytes_per_s=spec.gpu_bytes_per_s, flops=spec.gpu_flops) for spec in specs)
