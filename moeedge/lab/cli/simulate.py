"""`moeedge lab simulate`; what it does is in simulate_run.py, which loads NumPy: --help does not wait for it."""

from __future__ import annotations

from moeedge.cli import options
from moeedge.cli.declare import Output, flatten
from moeedge.lab.cli.trace_budgets import TraceBudgets
from moeedge.lab.cli.trace_options import SimulateOptions


@flatten
def simulate(
    *,
    given: SimulateOptions,
    expert_budgets: TraceBudgets,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Predict the speed of a model on a machine that is not here, with policies of expert placement.

    GPU, CPU, link (PCIe) and draft model are simulated as events in time; a routing trace says which experts each token
    uses. Every combination of the lists is a row: tokens per second with a range, and what the GPU waited for. Stock
    llama.cpp comes first: no drafts, as many of the experts on the GPU in entire layers. Numbers of the built-in
    machines come from files with sources, those of this machine from moeedge calibrate. Where a trace does not say how
    rejected drafts route, there is a row for each assumption (optimistic, pessimistic).
    """
    from moeedge.lab.cli.simulate_run import run

    run(given, expert_budgets, output=output)
