"""Expert budgets from a trace's weights against those from the router's probabilities, on the same verifications.

    python -m tests.benchmarks.budget_from_weights --prompts 2 --n-predict 48

A replay knows the weights of the experts that tokens use (moeedge/lab/sim/expert_budgets.py), the engine all.
Printed, for the bundled pair and the rankings router and picks: share of the router's shortlist that the weights name,
too; share of the pairs that another expert computes; kept probability by both shortlists, judged by the probabilities;
distinct experts of both.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from moeedge import paths
from moeedge.data.datasets import load_dataset
from moeedge.engine.recording import record_routing
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.experts import count_ids
from moeedge.lab.analysis.budget_recording import BatchReader
from moeedge.lab.analysis.expert_budget import RoutedBatch, infer_router
from moeedge.lab.policies.expert_budget import (
    Ids,
    Probabilities,
    apply_budget,
    kept_probability,
    pick_scores,
    router_scores,
    routing_probabilities,
)
from moeedge.scheduler.stats import StepRecord

BUDGETS = (8, 12, 16, 24, 32)
SCORES: dict[str, Callable[[Probabilities, Ids], Probabilities]] = {
    "router": lambda probabilities, _ids: router_scores(probabilities),
    "picks": pick_scores,
}


class Comparison:
    """Sums over batches and layers."""

    def __init__(self) -> None:
        self.sums: dict[tuple[str, int], dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def add(self, batch: RoutedBatch) -> None:
        """Counts a batch."""
        n_experts = batch.values.shape[-1]
        router = infer_router(batch.values, batch.ids, batch.weights)
        full = routing_probabilities(batch.values, router.kind)
        known = np.zeros_like(full)
        np.put_along_axis(known, batch.ids, batch.weights.astype(np.float16).astype(np.float64), axis=-1)
        estimate = np.where(known > 0, known, 1e-9 * known.sum(axis=-2, keepdims=True))
        for (ranking, score), budget in itertools.product(SCORES.items(), BUDGETS):
            own = apply_budget(batch.values, batch.ids, full, budget, scores=score(full, batch.ids))
            other = apply_budget(estimate, batch.ids, estimate, budget, scores=score(estimate, batch.ids))
            is_over = own.n_natural > budget
            if not is_over.any():
                continue
            moved = np.abs(count_ids(own.ids, n_experts) - count_ids(other.ids, n_experts)).sum(axis=1) / 2
            sums = self.sums[ranking, budget]
            sums["layers_over_budget"] += int(is_over.sum())
            sums["same_shortlist"] += float((own.shortlist & other.shortlist).sum(axis=1)[is_over].sum()) / budget
            sums["other_expert"] += float(moved[is_over].sum()) / batch.ids[0].size
            sums["kept_by_router"] += float(own.kept_probability[is_over].sum())
            sums["kept_by_weights"] += float(kept_probability(full, batch.ids, other.shortlist)[is_over].sum())
            sums["experts_by_router"] += float(own.n_kept[is_over].sum())
            sums["experts_by_weights"] += float(other.n_kept[is_over].sum())

    def rows(self) -> list[dict[str, Any]]:
        """Means over the layers and batches that exceed the budget."""
        found = []
        for (ranking, budget), sums in self.sums.items():
            n = sums["layers_over_budget"]
            means = {name: round(value / n, 4) for name, value in sums.items() if name != "layers_over_budget"}
            found.append({"ranking": ranking, "budget": budget, "layers_over_budget": int(n), **means})
        return found


def main() -> None:
    """Answers prompts and prints a JSON array."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--n-predict", type=int, default=64)
    asked = parser.parse_args()
    prompts = load_dataset("toy").prompts[: asked.prompts]
    with Session.open(
        EngineConfig(
            model=paths.bundled_target(), draft=paths.bundled_draft(), device="none", gamma=8, n_threads=1, n_ctx=1024
        )
    ) as session:
        layers = list(session.model.info.expert_layers)
        comparison = Comparison()
        reader = BatchReader(session, layers)

        def observe(record: StepRecord, _session: Session) -> None:
            batch = reader.read(record.n_verified) if record.n_verified > 1 else None
            if batch is not None:
                comparison.add(batch)

        session.observers.append(observe)
        record_routing(session, prompts, n_predict=asked.n_predict, sampling=SamplingConfig(temperature=0.0))
    print(json.dumps(comparison.rows(), indent=1))


if __name__ == "__main__":
    main()
