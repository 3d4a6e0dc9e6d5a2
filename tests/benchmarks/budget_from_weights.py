"""Expert budgets from a trace's weights against those from the router's probabilities, on the same verifications.

    python -m tests.benchmarks.budget_from_weights --prompts 8

A replay knows the weights of the experts that tokens use (moeedge/sim/expert_budgets.py), the engine all probabilities.
Printed, for the bundled pair: share of the router's shortlist that the weights name, too; share of the pairs that
another expert computes; kept probability by both shortlists, judged by the probabilities; distinct experts of both.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from typing import Any

import numpy as np

from moeedge import paths
from moeedge.analysis.budget_recording import _Batch, _BatchReader, _Observer, _Run
from moeedge.analysis.expert_budget import infer_router
from moeedge.data.datasets import load_dataset
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.experts import count_ids
from moeedge.policies.expert_budget import apply_budget, kept_probability, routing_probabilities

BUDGETS = (8, 12, 16, 24, 32)


class Comparison(_Observer):
    """Sums over batches and layers."""

    def __init__(self, reader: _BatchReader) -> None:
        super().__init__(reader)
        self.sums: dict[int, dict[str, float]] = defaultdict(lambda: defaultdict(float))

    def _add(self, batch: _Batch) -> None:
        n_layers, n_tokens, n_experts = batch.values.shape
        router = infer_router(
            batch.values.reshape(-1, n_experts),
            batch.ids.reshape(-1, batch.ids.shape[-1]),
            batch.weights.reshape(n_layers * n_tokens, -1),
        )
        full = routing_probabilities(batch.values, router.kind)
        known = np.zeros_like(full)
        np.put_along_axis(known, batch.ids, batch.weights.astype(np.float16).astype(np.float64), axis=-1)
        estimate = np.where(known > 0, known, 1e-9 * known.sum(axis=-2, keepdims=True))
        for budget in BUDGETS:
            own = apply_budget(batch.values, batch.ids, full, budget)
            other = apply_budget(estimate, batch.ids, estimate, budget)
            is_over = own.n_natural > budget
            if not is_over.any():
                continue
            moved = np.abs(count_ids(own.ids, n_experts) - count_ids(other.ids, n_experts)).sum(axis=1) / 2
            sums = self.sums[budget]
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
        for budget, sums in self.sums.items():
            n = sums["layers_over_budget"]
            means = {name: round(value / n, 4) for name, value in sums.items() if name != "layers_over_budget"}
            found.append({"budget": budget, "layers_over_budget": int(n), **means})
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
        comparison = Comparison(_BatchReader(session, layers))
        _Run(
            session, prompts, asked.n_predict, SamplingConfig(temperature=0.0), False, lambda: False, lambda *_: None
        ).answer(
            comparison  # type: ignore[arg-type]
        )
    print(json.dumps(comparison.rows(), indent=1))


if __name__ == "__main__":
    main()
