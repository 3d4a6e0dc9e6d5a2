"""`moeedge lab replay`: the hit rates and uploads of every policy on a recorded trace, without a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from moeedge.cli.common import numbers
from moeedge.cli.options import Output, declare, flatten
from moeedge.lab.cli.simulate import hardware, simulated_models
from moeedge.lab.cli.trace_options import ReplayOptions, TraceBudgetOptions

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="Traces of moeedge (.npz), csv files with pos,layer,id0,... or route_trace v1, or arrays of ids by token, "
        "layer and slot (.npz or .npy).",
        show_default=False,
    ),
]
declare(
    """
    --seed N  ...
    --draft-max N  Tokens per draft (gamma); 0: no speculation. Default: the trace's own, or 8.
    --limit N  Replay the first N texts; 0: all.
    --plot FILE  Draw the curves (.png, .svg or .pdf); with --curve.
    --threads N  Processes for --curve; 0: one per core.
    [Expert placement]
    --max-uploads LIST  Limit uploads: at most X experts per layer and step, which policies know. Loads of experts that
        are missing right now are counted, but not limited. Several, separated by commas, are the points of --curve.
    --fresh-memory  Policies forget each text before the next; the experts on the device stay there.
    --predictor-accuracy LIST  Some systems predict experts from hidden states, which a trace lacks. Give them
        predictions that are right with this chance: draft-router=0.88,next-gate=0.8, or default for these. Without it
        they use their caches alone, and are listed apart.
        also: --hint-accuracy
    --profile-texts N  Count the popularity of experts, which some policies start from, in N texts that are not
        replayed: the first ones, with --texts those before A. Default: a tenth, 30 at most.
    --hardware NAME|FILE  Policies know the times of experts on this machine, one of moeedge lab simulate, with the
        sizes of --model: they balance CPU and GPU by them (spac-paper: Eq. 9 and 10). Default: no times.
    --model NAME  Model whose sizes --hardware takes.
    [Trace]
    --texts A:B  Replay the texts from number A up to, but not including, B; several, separated by commas: one for each
        trace. Profiles are made from the first texts before A.
    [Output]
    --curve  Hits over uploads: every policy at several limits of uploads (--max-uploads; default:
        0.1,0.2,0.5,1,2,5,10) and without one, with 95 % intervals over the choice of texts.
    """,
    "replay",
    read={numbers: "max_uploads"},
    profile_texts={"min": 0},
    seed={"least": 0},
    hardware={"names": hardware},
    model={"names": simulated_models, "envvar": None},
    threads={"least": 0},
)


@flatten
def replay(
    traces: Traces,
    *,
    options: ReplayOptions,
    expert_budgets: TraceBudgetOptions,
    curve: bool = False,
    plot: Path | None = None,
    threads: int = 0,
    output: Output = Output.TEXT,
) -> None:
    """Replay routing traces: how many of a text's experts each policy would have had on the device.

    A trace (profile --trace-out) holds the experts that every token used; a policy decides which experts are on the
    device. pair hits: share of (token, expert) pairs whose expert was there; uploads: experts moved, per layer and
    step. No model runs and transfers take no time; moeedge lab simulate has a clock.

    Recorded drafts are replayed as they were, unless --draft-max, --acceptance-chance or --rejected-token-model cuts
    the text into windows. Two bounds that know the future come last: oracle and belady. The same seed gives the same
    output, byte for byte.
    """
    from moeedge.lab.cli.replay_run import run_replay

    run_replay(traces, options, expert_budgets, curve=curve, plot=plot, threads=threads, output=output)
