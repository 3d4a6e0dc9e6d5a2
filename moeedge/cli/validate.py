"""`moeedge validate`: the simulator compared with the papers, and with the engine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import integers, names, numbers
from moeedge.cli.declare import Output, derive
from moeedge.cli.engine_options import EngineOptions
from moeedge.errors import InputError

validate = typer.Typer(
    name="validate",
    help="Compare the simulator with published figures and with this machine.",
    no_args_is_help=True,
    add_completion=False,
)


class Part(str, Enum):
    """Parts of the papers that can be compared."""

    TABLE2 = "table2"
    TABLE3 = "table3"
    TABLE4 = "table4"
    FIGURE5 = "figure5"
    CUTOFF = "cutoff"
    ELSEWHERE = "elsewhere"
    ALL = "all"


PartOption = Annotated[Part, typer.Option("--part", help="Table or figure; all take some minutes.")]
MedianOf = Annotated[int, derive(options.Repetitions, help="Measurements, of which the median counts.", min=1)]


@validate.command("papers")
def papers(part: PartOption = Part.ALL, seed: options.Seed = 0, output: options.TextOrJson = Output.TEXT) -> None:
    """Fit the free parameters of MoE-SpAc's Table 2 on two of its rows, predict the others and its other tables.

    Each row runs as docs/simulation.md describes, with its own framework's overheads; "elsewhere" compares those with
    measurements that other publications report for the same programs.
    """
    from moeedge.sim.papers import Papers
    from moeedge.ui import sim_views as view
    from moeedge.ui.console import notifier, stderr_console, stdout_console

    console = stdout_console()
    runs = Papers(seed=seed, notify=notifier(stderr_console()))
    as_tables = output is Output.TEXT
    parts = [name for name in Part if name is not Part.ALL] if part is Part.ALL else [part]
    fit = None if set(parts) <= {Part.CUTOFF, Part.ELSEWHERE} else runs.fit()
    if fit is not None and as_tables:
        view.print_fit(fit, console)
    rows = []
    for name in parts:
        if name is Part.CUTOFF:
            found, show = runs.cutoff(), view.print_cutoff
        elif name is Part.ELSEWHERE:
            found, show = runs.elsewhere(), view.print_elsewhere
        else:
            assert fit is not None
            run = getattr(runs, name.value)  # table2, table3, table4, figure5
            found, show = run(fit), view.print_ratios if name is Part.FIGURE5 else view.print_compared
        rows += found
        if as_tables:
            show(found, console)
    if not as_tables:
        typer.echo(json.dumps([row.row() for row in rows], indent=1))


@validate.command("measured")
def measured(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 1,
    device: options.Device = "emulated:link=2GB/s,threads=1",
    policy: options.PolicyList = "spac,spac-paper,lru",
    cache_ratio: options.CacheRatioList = "0.17,0.5",
    gamma: options.DraftMaxList = "0,4",
    n_predict: Annotated[int, derive(options.NPredict, help="Tokens per answer.", min=8)] = 96,
    repeat: MedianOf = 3,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Measure time per token on the emulated device, and simulate it from the same trace and calibrated unit times.

    Every combination of the lists is opened, calibrated and run; no parameter is fitted to the measured times.
    """
    engine = EngineOptions(model=model, model_draft=model_draft, ctx_size=ctx_size, threads=threads, device=device)
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.bench.config import MODES
    from moeedge.bench.harness import load_models
    from moeedge.bench.validation import combinations, compare_with_engine, summary
    from moeedge.llama.gguf_file import read_summary
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.scheduler.opening import check_policy
    from moeedge.ui.console import notifier, stderr_console, stdout_console
    from moeedge.ui.sim_views import print_measured

    asked = combinations(
        names(policy, "--policy"), numbers(cache_ratio, "--cache-ratio"), integers(gamma, "--draft-max")
    )
    for name in dict.fromkeys(combination.policy for combination in asked):
        check_policy(PlacementConfig(policy=name))
    config = engine.config(emulate_bundled=True)
    if not read_summary(config.model).expert_layers:
        raise InputError(f"{config.model.name} has no experts: there is nothing to place.", "Name a MoE model.")
    base = replace(config, gamma=max(combination.gamma for combination in asked))
    with ExitStack() as stack:
        rows = compare_with_engine(
            base,
            asked,
            n_predict=n_predict,
            repeat=repeat,
            notify=notifier(stderr_console()),
            models=load_models(base, [MODES["moeedge"]], stack),
        )
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
    else:
        print_measured(rows, summary(rows), stdout_console())
