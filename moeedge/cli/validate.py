"""`moeedge validate`: the simulator against the papers, and against the engine."""

from __future__ import annotations

import json
from enum import Enum
from typing import Annotated

import typer

from moeedge.cli import options
from moeedge.cli.common import Output, cli_errors, numbers, whole_numbers, words
from moeedge.cli.pair import limit_openmp_spin
from moeedge.errors import InputError

validate_app = typer.Typer(
    name="validate",
    help="Hold the simulator against published figures, and against this machine.",
    no_args_is_help=True,
)


class Part(str, Enum):
    """What of the papers is compared."""

    TABLE2 = "table2"
    TABLE3 = "table3"
    TABLE4 = "table4"
    FIGURE5 = "figure5"
    CUTOFF = "cutoff"
    ELSEWHERE = "elsewhere"
    ALL = "all"


@validate_app.command("papers")
def papers(
    part: Annotated[Part, typer.Option("--part", help="Which table or figure; all take some minutes.")] = Part.ALL,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Of the stand-in texts.")] = 0,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print tables, or JSON rows.")] = Output.TABLE,
) -> None:
    """Fit what MoE-SpAc's Table 2 leaves open on two of its rows, predict the others, and its other tables.

    Each row is run as docs/simulation.md says, with its own framework's overheads; "elsewhere" holds those against what
    other publications measured of the same programs.
    """
    with cli_errors():
        from moeedge.sim.papers import Papers
        from moeedge.ui import sim_views as view
        from moeedge.ui.console import notifier, stderr_console, stdout_console

        console = stdout_console()
        runs = Papers(seed=seed, notify=notifier(stderr_console()))
        rows = []
        tables = output is Output.TABLE
        wanted = [one for one in Part if one is not Part.ALL] if part is Part.ALL else [part]
        fit = None if set(wanted) <= {Part.CUTOFF, Part.ELSEWHERE} else runs.fit()
        if fit is not None and tables:
            view.print_fit(fit, console)
        for one in wanted:
            if one is Part.CUTOFF:
                found, show = runs.cutoff(), view.print_cutoff
            elif one is Part.ELSEWHERE:
                found, show = runs.elsewhere(), view.print_elsewhere
            else:
                assert fit is not None
                run = {
                    Part.TABLE2: runs.table2,
                    Part.TABLE3: runs.table3,
                    Part.TABLE4: runs.table4,
                    Part.FIGURE5: runs.figure5,
                }[one]
                found, show = run(fit), view.print_ratios if one is Part.FIGURE5 else view.print_compared
            rows += found
            if tables:
                show(found, console)
        if not tables:
            typer.echo(json.dumps([row.row() for row in rows], indent=1))


@validate_app.command("measured")
def measured(
    model: options.Model = None,
    model_draft: options.ModelDraft = None,
    ctx_size: options.CtxSize = 1024,
    threads: options.Threads = 1,
    device: options.Device = "emulated:link=2GB/s,threads=1",
    policy: Annotated[str, typer.Option("--policy", metavar="LIST", help="Of the engine.")] = "spac,spac-paper,lru",
    cache_ratio: Annotated[str, typer.Option("--cache-ratio", metavar="LIST", help="Shares held.")] = "0.17,0.5",
    gamma: Annotated[str, typer.Option("--gamma", metavar="LIST", help="Draft lengths.")] = "0,4",
    n_predict: Annotated[int, typer.Option("-n", "--n-predict", help="Tokens per answer.", min=8)] = 96,
    repeat: Annotated[int, typer.Option("-r", "--repeat", help="Measurements, of which the median counts.", min=1)] = 3,
    output: Annotated[Output, typer.Option("-o", "--output", help="Print a table, or JSON rows.")] = Output.TABLE,
) -> None:
    """Measure time per token on the emulated device, and simulate it from the very trace and the calibrated unit times.

    Every combination of the lists is opened, calibrated and run; nothing is fitted to the measured times.
    """
    limit_openmp_spin(device, may_emulate=True)
    with cli_errors():
        from contextlib import ExitStack
        from dataclasses import asdict

        from moeedge.bench.config import MODES
        from moeedge.bench.harness import load_models
        from moeedge.bench.validation import combinations, compare, summary
        from moeedge.cli.pair import resolve_pair
        from moeedge.llama.gguf_file import summarize
        from moeedge.scheduler.config import PlacementConfig
        from moeedge.scheduler.opening import check_policy
        from moeedge.ui.console import notifier, stderr_console, stdout_console
        from moeedge.ui.sim_views import print_measured

        wanted = combinations(
            words(policy, "--policy"), numbers(cache_ratio, "--cache-ratio"), whole_numbers(gamma, "--gamma")
        )
        for name in dict.fromkeys(one.policy for one in wanted):
            check_policy(PlacementConfig(policy=name))
        pair = resolve_pair(model, model_draft)
        if not summarize(pair.target).expert_layers:
            raise InputError(f"{pair.target.name} has no experts: there is nothing to place.", "Name a MoE model.")
        base = pair.engine_config(
            ctx_size=ctx_size,
            threads=threads,
            draft_max=max(one.gamma for one in wanted),
            n_gpu_layers=None,
            device=device,
            placement=PlacementConfig(),
            emulate=True,
        )
        progress = stderr_console()
        with ExitStack() as stack:
            models = load_models(base, [MODES["moeedge"]], stack)
            rows = compare(
                base,
                wanted,
                n_predict=n_predict,
                repeat=repeat,
                notify=notifier(progress),
                models=models,
            )
        if output is Output.JSON:
            typer.echo(json.dumps([asdict(row) for row in rows], indent=1))
        else:
            print_measured(rows, summary(rows), stdout_console())
