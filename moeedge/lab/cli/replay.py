"""`moeedge lab replay`; what it does is in replay_run.py, which loads NumPy: --help does not wait for it."""

from __future__ import annotations

from moeedge.cli import options
from moeedge.cli.declare import Output, flatten
from moeedge.lab.cli.trace_budgets import TraceBudgets
from moeedge.lab.cli.trace_options import Curve, Plot, Processes, ReplayOptions, Traces


@flatten
def replay(
    traces: Traces,
    *,
    given: ReplayOptions,
    expert_budgets: TraceBudgets,
    curve: Curve = False,
    plot: Plot = None,
    threads: Processes = 0,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Replay routing traces: how many of a text's experts each policy would have had on the device.

    A trace (profile --trace-out) holds the experts that every token used; a policy decides which experts are on the
    device. pair hits: share of (token, expert) pairs whose expert was there; uploads: experts moved, per layer and
    step. No model runs and transfers take no time; moeedge lab simulate has a clock.

    Recorded drafts are replayed as they were, unless --draft-max, --acceptance-chance or --rejected-token-model cuts
    the text into windows. Two bounds that know the future come last: oracle and belady. The same seed gives the same
    output, byte for byte.
    """
    from moeedge.lab.cli.replay_run import run

    run(traces, given, expert_budgets, curve=curve, plot=plot, threads=threads, output=output)
