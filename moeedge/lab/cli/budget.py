"""`moeedge lab budget`: what expert budgets would cost a model (MoE-Spec), without using one."""

from __future__ import annotations

from moeedge.cli.engine_options import AUTO, LlamaOptions
from moeedge.cli.options import Output, declare, flatten
from moeedge.cli.profile_options import TextOptions

declare(
    """
    [Workload]
    --budgets LIST|auto  Budgets to analyse, such as 8,16,32. auto: from k to all experts.
    --layers LIST|all  Layers to analyse, such as 0,5,40-47, or all.
    """,
    "budget",
)


@flatten
def budget(
    budgets: str = AUTO,
    layers: str | None = "all",
    *,
    texts: TextOptions,
    engine: LlamaOptions,
    output: Output = Output.TEXT,
    verbose: bool = False,
) -> None:
    """Estimate the quality that a model loses with at most N experts per layer (MoE-Spec).

    The model answers a few prompts, on the CPU: routing probability on the best experts of a verification, pairs of
    experts, and the error of each layer's output under each budget, by ranking and coverage.
    """
    engine.limit_openmp_spin()
    from moeedge.lab.cli.budget_run import run_budget

    run_budget(budgets, layers or "all", texts, engine, output)
