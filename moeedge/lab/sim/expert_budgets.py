"""Expert budgets on the batches of a trace (lab/policies/expert_budget.py): what MoE-Spec's verification computes.

A trace holds a token's experts and, if it was recorded with them, their weights as the model applies them, but not the
probabilities of the other experts. The ranking "picks" needs no more than the weights. The router ranking (Eq. 5) sums
those of the tokens' own experts, and a model that normalises the weights gives every token the same say. A token whose
expert is not shortlisted gets the shortlisted experts with the highest scores of the batch in its place, where the
engine takes those with the token's own next probabilities.

As in the engine, verifications of two tokens and more have the budget, prompts and single tokens have none. Truncation
leaves a zeroed place with another expert of the shortlist, which counts as computed; the engine's CPU leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import IntArray, count_ids
from moeedge.lab.policies.expert_budget import Ids, apply_budget, by_expert, pick_scores, router_scores, static_scores
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.trace.format import Trace

_UNUSED = 1e-9  # share of the batch's score that stands for a token's unknown probability of an expert


@dataclass(frozen=True, kw_only=True)
class StaticBudget(ExpertBudget):
    """Shortlists the first experts of a calibrated order (Eq. 4).

    order: int32 [n_layers, n_experts], expert ids of each layer, best first
    """

    ranking: str = "static"
    order: Ids = field(compare=False)

    RANKINGS: ClassVar[tuple[str, ...]] = ("static",)


@dataclass
class BudgetStats:
    """Experts of verifications, summed over layers with experts and steps that are not prompts."""

    layer_steps: int = 0
    natural: int = 0  # distinct experts that the router chose
    kept: int = 0  # that were computed
    kept_max: int = 0  # the largest number of a layer and step
    kept_probability: float = 0.0  # share of the weight of the router's choices that is on shortlisted experts

    def add(self, natural: IntArray, kept: IntArray, kept_probability: float) -> None:
        """Adds layers of one step [n]; kept_probability: their sum."""
        self.layer_steps += natural.size
        self.natural += int(natural.sum())
        self.kept += int(kept.sum())
        self.kept_max = max(self.kept_max, int(kept.max(initial=0)))
        self.kept_probability += kept_probability


@dataclass
class BudgetedTrace:
    """Limits the verifications of one trace, and counts what that keeps. budget None: counts alone.

    Raises InputError for a budget that does not suit the trace's model.
    """

    trace: Trace
    budget: ExpertBudget | None
    stats: BudgetStats = field(default_factory=BudgetStats)

    def __post_init__(self) -> None:
        meta = self.trace.meta
        self._layers = np.array(self.trace.expert_layers(), dtype=np.intp)
        self._used = self.trace.used_per_layer
        budget = self.budget or ExpertBudget(budget=meta.n_experts)
        self._budgets = budget.per_layer(self._layers, meta.n_layers, meta.n_experts, self._used)
        self._static = static_scores(budget.order) if isinstance(budget, StaticBudget) else None

    def row(self) -> dict[str, Any]:
        """The figures of `stats`, means by layer and step, and what they were made of, as -o json prints them."""
        stats, n = self.stats, max(self.stats.layer_steps, 1)
        return {
            "experts_natural": round(stats.natural / n, 6),
            "experts_kept": round(stats.kept / n, 6),
            "experts_max": stats.kept_max,
            "kept_probability": round(stats.kept_probability / n, 6),
            # counts: the trace has no weights, every expert of a token weighs alike
            "budget_weights": "counts" if self.trace.weights is None else "weights",
        }

    def limited(self, batch: Batch) -> Batch:
        """The batch under the budget; a prompt is unchanged."""
        if batch.prefill:
            return batch
        layers = self._layers
        n_natural = np.count_nonzero(batch.counts[layers], axis=1)
        is_over = n_natural > self._budgets[layers]
        within = n_natural[~is_over]
        self.stats.add(within, within, within.size)
        changed = layers[is_over]
        if not changed.size:
            return batch
        ids, counts = batch.ids.copy(), batch.counts.copy()
        is_recorded = (ids[changed] >= 0).all(axis=2)  # [n_changed, n_tokens]
        groups = [changed] if is_recorded.all() else np.split(changed, np.arange(1, changed.size))
        for group in groups:
            n_used = self._used[group[0]]
            tokens = np.flatnonzero((ids[group[0], :, :n_used] >= 0).all(axis=1))
            at = np.ix_(group, tokens, np.arange(n_used))
            ids[at] = self._apply(batch, group, tokens)
        counts[changed] = count_ids(ids[changed], self.trace.meta.n_experts)
        return replace(batch, ids=ids, counts=counts)

    def _apply(self, batch: Batch, layers: NDArray[np.intp], tokens: NDArray[np.intp]) -> NDArray[np.int32]:
        """Ids int32 [len(layers), len(tokens), k] of layers that all use k experts, and of tokens that are recorded."""
        assert self.budget is not None
        ids = batch.ids[np.ix_(layers, tokens, np.arange(self._used[layers[0]]))]
        weights = self._weights(batch, layers, tokens)
        probabilities = by_expert(ids, weights, self.trace.meta.n_experts)
        picks = self.budget.ranking == "picks"
        scores = pick_scores(probabilities, ids) if picks else router_scores(probabilities)
        np.copyto(probabilities, _UNUSED * scores[:, None], where=probabilities == 0)
        routing = apply_budget(
            probabilities,
            ids,
            probabilities,
            self._budgets[layers],
            weights=weights.astype(np.float32),
            coverage=self.budget.coverage,
            scores=scores if self._static is None else self._static[layers],
        )
        self.stats.add(routing.n_natural, routing.n_kept, float(routing.kept_probability.sum()))
        return routing.ids

    def _weights(self, batch: Batch, layers: NDArray[np.intp], tokens: NDArray[np.intp]) -> NDArray[np.float64]:
        """Weights of the router's choices, float64 [len(layers), len(tokens), k]."""
        k = self._used[layers[0]]
        if self.trace.weights is None or batch.rows is None:
            return np.full((layers.size, tokens.size, k), 1.0 / k)
        recorded: NDArray[np.float64]
        recorded = self.trace.weights[..., :k][np.ix_(batch.rows[tokens], layers)].astype(np.float64).transpose(1, 0, 2)
        return np.maximum(np.where(np.isfinite(recorded), recorded, 1.0 / k), 0.0)
