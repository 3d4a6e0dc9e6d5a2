"""Expert budgets per layer against one for all layers, at the same mean, on texts that the fit has not seen.

    python -m tests.benchmarks.layer_budgets TRACE... --out RECORD.json

The first half of each trace's texts is ranked and fitted; the second half is judged. "lost" is the share of the picks'
weight outside the shortlist, mean over verifications and layers, "worst" that of the layer that loses most; "experts"
are the distinct experts that a verification computes per layer. Layers: one budget ("uniform"), "fitted" on the first
half, or fitted on the judged half itself ("bound": no other budgets of this mean lose less). The static ranking (Eq. 4)
is calibrated on the first half, too.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeedge.analysis.expert_ranking import ExpertRanking, fit_layers, rank_experts, step_masses
from moeedge.trace.format import Trace
from moeedge.trace.importers import read_trace
from moeedge.trace.schedule import schedules, texts_of
from tests.benchmarks.rows import keep_rows

SCHEMA = "moeedge-layer-budgets-1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one choice of budgets loses on the judged texts."""

    trace: str
    steps_fitted: int
    steps_judged: int
    tokens_per_step: float
    measured: str  # "weights" or "picks"
    ranking: str  # "router" or "static"
    layers: str  # "uniform", "fitted" or "bound"
    mean_budget: int
    least: int
    most: int
    lost: float
    worst: float
    experts: float

    def __str__(self) -> str:
        return (
            f"{self.trace} {self.ranking} {self.mean_budget} {self.layers} ({self.least}-{self.most}): "
            f"{self.lost:.4f} lost, worst layer {self.worst:.4f}, {self.experts:.2f} experts"
        )


def judge(trace: Trace, order: np.ndarray, ranking: str, budgets: tuple[int, ...]) -> tuple[float, float, float]:
    """Lost share, that of the worst layer, and experts per layer, under `budgets` [n_layers]."""
    schedule = schedules(trace)[0]
    lost, experts = [], []
    for layer in trace.expert_layers():
        picks, mass = step_masses(schedule, layer)
        seen = mass.sum(axis=1) > 0
        picks, mass = picks[seen], mass[seen]
        n_natural = (picks > 0).sum(axis=1)
        best = (
            np.argsort(-mass, axis=1, kind="stable") if ranking == "router" else np.tile(order[layer], (len(mass), 1))
        )
        kept = np.take_along_axis(mass, best[:, : budgets[layer]], axis=1).sum(axis=1) / mass.sum(axis=1)
        kept[n_natural <= budgets[layer]] = 1.0  # then the picks are the shortlist
        lost.append(float((1.0 - kept).mean()))
        experts.append(float(np.minimum(n_natural, budgets[layer]).mean()))
    return float(np.mean(lost)), max(lost), float(np.mean(experts))


def rows_of(name: str, trace: Trace, means: list[int]) -> Iterator[Row]:
    """A row for each ranking, mean budget and way to divide it among the layers."""
    n_texts = np.unique(trace.sequence).size
    first, second = texts_of(trace, 0, n_texts // 2), texts_of(trace, n_texts // 2)
    fitted, judged = rank_experts(first), rank_experts(second)
    for mean in (mean for mean in means if fitted.n_expert_used <= mean <= fitted.n_experts):
        choices = {
            "uniform": uniform(fitted, mean),
            "fitted": fit_layers(fitted, mean),
            "bound": fit_layers(judged, mean),
        }
        for ranking in ("router", "static"):
            for layers, budgets in choices.items():
                if ranking == "static" and layers == "bound":
                    continue  # it bounds the router ranking
                used = [budgets[layer] for layer in fitted.expert_layers]
                lost, worst, experts = judge(second, fitted.order, ranking, budgets)
                yield Row(
                    trace=name,
                    steps_fitted=fitted.n_steps,
                    steps_judged=judged.n_steps,
                    tokens_per_step=round(judged.tokens_per_step, 2),
                    measured=judged.measured,
                    ranking=ranking,
                    layers=layers,
                    mean_budget=mean,
                    least=min(used),
                    most=max(used),
                    lost=round(lost, 5),
                    worst=round(worst, 5),
                    experts=round(experts, 3),
                )


def uniform(ranking: ExpertRanking, budget: int) -> tuple[int, ...]:
    """The same budget for each layer with experts."""
    return tuple(budget if layer in ranking.expert_layers else 0 for layer in range(ranking.n_layers))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--budgets", default="6,8,10,12,16,20,24,32", help="mean budgets")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    means = [int(budget) for budget in options.budgets.split(",")]
    rows = (row for path in options.traces for row in rows_of(path.name, read_trace(path), means))
    keep_rows(rows, SCHEMA, options.out)


if __name__ == "__main__":
    main()
