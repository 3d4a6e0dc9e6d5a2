"""`moeedge lab validate`: formulas and simulator compared with the papers, and the simulator with the engine."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import asdict, replace
from enum import Enum
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import integers, names, numbers
from moeedge.cli.declare import Output, derive, output_option
from moeedge.cli.engine_options import EngineOptions
from moeedge.errors import InputError
from moeedge.lab.cli import trace_options

validate = typer.Typer(
    name="validate",
    help="Compare formulas and simulator with published figures, and the simulator with this machine.",
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
TextJsonOrMd = Annotated[Output, output_option(Output.TEXT, Output.JSON, Output.MD, help="Format of the table.")]
RejectedTokens = Annotated[
    trace_options.RejectedTokenModel,
    derive(
        trace_options.RejectedTokens,
        help="How rejected tokens route: like the tokens that follow (optimistic), or like unrelated tokens of the "
        "text (pessimistic); both, one table after the other.",
    ),
]


@validate.command("papers")
def papers(
    part: PartOption = Part.ALL,
    rejected_token_model: RejectedTokens = trace_options.RejectedTokenModel.BOTH,
    seed: options.Seed = 0,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Compare the simulator with published figures: those that its constants were chosen by, and others.

    Three figures say what the calibration is worth: Table 2 without overheads of programs, Table 2 with the chosen
    ones, and "elsewhere", figures of other publications from which no constant was chosen. Two constants are fitted
    on two rows of Table 2. Where the sources of a constant differ a prediction is a range.
    """
    from moeedge.lab.sim.papers import Cases, Compared, Papers, figures
    from moeedge.lab.views import validate_views as view
    from moeedge.ui.console import notifier, stderr_console, stdout_console

    console = stdout_console()
    as_tables = output is Output.TEXT
    parts = [name for name in Part if name is not Part.ALL] if part is Part.ALL else [part]
    others = [name for name in parts if name in (Part.CUTOFF, Part.ELSEWHERE)]
    of_table2 = [name.value for name in parts if name not in others]
    rows, fits = [], []

    def show(found: list[Compared]) -> list[Compared]:
        if as_tables:
            view.print_part(found, console)
        return found

    with Cases(notifier(stderr_console())) as cases:
        for model in rejected_token_model.models if of_table2 else ():
            runs = Papers(cases, rejected_token_model=model, seed=seed)
            fit = runs.fit()
            fits.append({"rejected_token_model": model, **asdict(fit)})
            if as_tables:
                view.print_fit(fit, model, console)
            for name in of_table2:
                rows += show(getattr(runs, name)(fit))
        for name in others:  # hardly a draft is rejected there, or nothing is drafted
            runs = Papers(cases, rejected_token_model=rejected_token_model.models[0], seed=seed)
            rows += show(runs.cutoff() if name is Part.CUTOFF else runs.elsewhere())
    summary = figures(rows)
    if as_tables:
        view.print_figures(summary, console)
    else:
        found = {"fits": fits, "figures": [asdict(figure) for figure in summary]}
        typer.echo(json.dumps(found | {"rows": [row.row() for row in rows]}, indent=1))


@validate.command("formulas")
def formulas(output: TextJsonOrMd = Output.TEXT) -> None:
    """Compute figures that three papers print, from the inputs that they print next to them.

    Expert reuse of MoE-SpAc, Table 1 of MoESD, active experts and Amdahl's law of the production study.
    """
    from moeedge.lab.analysis.published import reproduced
    from moeedge.lab.views.tables import formulas_markdown, print_formulas
    from moeedge.ui.console import stdout_console

    rows = reproduced()
    if output is Output.JSON:
        typer.echo(json.dumps([asdict(row) | {"agrees": row.agrees} for row in rows], indent=1))
    elif output is Output.MD:
        typer.echo(formulas_markdown(rows), nl=False)
    else:
        print_formulas(rows, stdout_console())


@validate.command("measured")
def measured(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 1,
    device: options.Device = "emulated:link=2GB/s,threads=1",
    backend: options.Backend = None,
    policy: options.PolicyList = "spac,spac-paper,lru",
    cache_ratio: options.CacheRatioList = "0.17,0.5",
    gamma: options.DraftMaxList = "0,4",
    n_predict: Annotated[int, derive(options.NPredict, help="Tokens per answer.", min=8)] = 96,
    repeat: MedianOf = 3,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Measure time per token on this machine's emulated device, and compare it with the simulator's.

    The simulator gets the trace of the same run and measured times of single operations (expert, transfer); nothing
    is fitted to the times that it predicts. Every combination of the lists is a row.
    """
    engine = EngineOptions(model=model, model_draft=model_draft, ctx_size=ctx_size, threads=threads, device=device)
    engine.limit_openmp_spin(emulate_bundled=True)
    from moeedge.bench.config import MODES
    from moeedge.bench.harness import load_models
    from moeedge.lab.experiments.validation import combinations, compare_with_engine, summary
    from moeedge.lab.views.validate_views import print_measured
    from moeedge.llama.gguf_file import read_summary
    from moeedge.scheduler.config import PlacementConfig
    from moeedge.scheduler.opening import check_policy
    from moeedge.ui.console import notifier, stderr_console, stdout_console

    asked = combinations(
        names(policy, "--policy"), numbers(cache_ratio, "--cache-ratio"), integers(gamma, "--draft-max")
    )
    for name in dict.fromkeys(combination.policy for combination in asked):
        check_policy(PlacementConfig(policy=name))
    config = engine.config(emulate_bundled=True)
    if not read_summary(config.model).expert_layers:
        raise InputError(
            f"{config.model.name} has no experts: there is nothing to place.",
            "Give a Mixture-of-Experts model with -m.",
        )
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
