"""What an expert budget would cost a model: MoE-Spec's analyses of routing and of the error that a budget makes.

  cumulative_probability   routing probability on the n experts with the highest scores (Figures 2c and 7)
  co_activation            pairs of experts that tokens use together, and their concentration ratio (Figure 8, Eq. 9)
  layer_errors             reconstruction error per budget, ranking and coverage (Figure 6, Section 4.5)

T tokens of a verification batch, N experts, k of them per token, D the model's width, L layers. Batches come from
budget_recording.py; rankings and coverage from lab/policies/expert_budget.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis.routing_curves import membership
from moeedge.errors import EngineError
from moeedge.experts import FloatArray, IntArray
from moeedge.lab.policies.expert_budget import (
    Ids,
    MixingWeights,
    Probabilities,
    Ranking,
    RouterKind,
    apply_budget,
    moe_output,
    oracle_order,
    pick_scores,
    router_scores,
    routing_probabilities,
    static_scores,
)
from moeedge.policies.expert_budget import Coverage

_TOLERANCE = 2e-3  # relative, of weights that a rule must reproduce


RANKINGS: tuple[Ranking, ...] = ("router", "static", "oracle", "picks")  # MoE-Spec's default first
COVERAGES: tuple[Coverage, ...] = ("substitution", "truncation")
VARIANTS = tuple(product(COVERAGES, RANKINGS))  # of a budget on batches whose natural picks exceed it


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Router:
    """How a model's router makes probabilities and weights of its values."""

    kind: RouterKind
    mixing: MixingWeights


@dataclass(frozen=True, eq=False)
class RoutedBatch:
    """Routing of one verification batch in L layers, and what each expert gives for each of its tokens.

    ids, weights: the natural top-k [L, T, k]. values: `ffn_moe_probs` [L, T, N]. outputs: [T, N, D] of each layer;
    None: not computed.
    """

    ids: IntArray
    weights: FloatArray
    values: FloatArray
    outputs: Sequence[FloatArray] | None = None


def default_budgets(n_experts: int, n_used: int) -> tuple[int, ...]:
    """Budgets from k to N: multiples of k up to 4 k, then of 2 k up to 8 k, then halves and all of the experts."""
    multiples = {n_used * factor for factor in (1, 1.5, 2, 2.5, 3, 4, 6, 8)} | {n_experts / 2, n_experts * 3 / 4}
    return tuple(sorted({int(budget) for budget in multiples if n_used <= budget < n_experts} | {n_experts}))


def infer_router(values: FloatArray, ids: IntArray, weights: FloatArray) -> Router:
    """The rule by which weights [..., k] come from values [..., N] at ids [..., k].

    Raises EngineError where no rule of llama.cpp's common MoE function reproduces the weights.
    """
    kind: RouterKind = "sigmoid"
    if values.min() < 0.0:
        kind = "logits"
    elif np.allclose(values.sum(axis=-1), 1.0, atol=_TOLERANCE):
        kind = "softmax"
    sums = weights.sum(axis=-1)
    for normalised in (True, False):
        rule = MixingWeights(softmax=kind == "logits", normalised=normalised)
        unscaled = rule.of(values, ids)
        scale = float(np.median(sums / np.maximum(unscaled.sum(axis=-1), np.finfo(np.float32).tiny)))
        scale = 1.0 if abs(scale - 1.0) < _TOLERANCE else scale
        if np.allclose(unscaled * np.float32(scale), weights, rtol=_TOLERANCE, atol=1e-6):
            return Router(kind, MixingWeights(softmax=rule.softmax, normalised=normalised, scale=scale))
    raise EngineError("The weights of this model's experts do not come from its router's values by a known rule.")


def selection_values(
    values: FloatArray, bias: FloatArray | None, *, n_groups: int = 1, n_groups_used: int = 1
) -> FloatArray:
    """The values [..., T, N] that the model's top-k sorts, of the router's values [..., T, N] (build_moe_ffn).

    bias: [N] or [L, 1, N], added to choose experts. Of n_groups groups of experts, a token may use those n_groups_used
    whose two best experts have the highest sum; the others get -inf.
    """
    selection = values if bias is None else values + bias
    if n_groups < 2:
        return selection
    grouped = selection.reshape(*values.shape[:-1], n_groups, -1)
    best_two = -np.sort(-grouped, axis=-1)[..., :2]
    rank = np.argsort(-best_two.sum(axis=-1), axis=-1, kind="stable")
    masked = np.full_like(grouped, -np.inf)
    used = rank[..., :n_groups_used, None]
    np.put_along_axis(masked, used, np.take_along_axis(grouped, used, axis=-2), axis=-2)
    return masked.reshape(values.shape)


# routing


def cumulative_probability(scores: Probabilities) -> Probabilities:
    """Share of the scores [..., N] on the n experts with the highest ones, float64 [..., N], n = 1..N."""
    ranked = -np.sort(-scores, axis=-1)
    total = ranked.sum(axis=-1, keepdims=True)
    share: Probabilities = np.cumsum(ranked, axis=-1) / np.where(total > 0.0, total, 1.0)
    return share


@dataclass(frozen=True, eq=False)
class ProbabilityCurve:
    """Share of a batch's routing probability on its n best-ranked experts (Figures 2c and 7), over batches.

    cumulative_probability: float64 [N], n = 1..N; of each layer [L, N]. cumulative_weights: the same of the natural
    picks' weights; the other experts have 0. unique_experts: of the natural picks, mean of the layers; of each [L].
    """

    group: str  # of prompts: a data set, or a category where there is one data set; "all"
    batches: int
    tokens: int
    unique_experts: float
    unique_by_layer: NDArray[np.float64]
    cumulative_probability: Probabilities
    cumulative_weights: Probabilities
    cumulative_by_layer: Probabilities


def co_activation(ids: IntArray, n_experts: int) -> NDArray[np.int64]:
    """Tokens that used both experts of each pair, int64 [N, N] of ids [T, k]; the diagonal: that used the expert."""
    used = membership(ids, n_experts).astype(np.float64)  # matrix products of integers are slow
    return np.asarray(np.rint(used.T @ used), dtype=np.int64)


@dataclass(frozen=True, eq=False)
class CoActivation:
    """Pairs of experts that a layer's tokens used together (Appendix D).

    counts: int64 [N, N], see `co_activation`. concentration: the most frequent pair's count by its expectation under
    uniform selection (Eq. 9). lift_over_independence: the same count by the expectation if the two experts were
    selected independently, as often as they are; None without any pair.
    """

    layer: int
    tokens: int
    counts: NDArray[np.int64]
    most_frequent_pair: tuple[int, int] | None
    concentration: float | None
    lift_over_independence: float | None


def analyse_pairs(layer: int, counts: NDArray[np.int64], tokens: int, n_used: int) -> CoActivation:
    """The pairs of a layer whose `tokens` tokens used `n_used` experts each; counts as of `co_activation`."""
    n_experts = counts.shape[0]
    pairs = np.triu(counts, 1)
    first, second = (int(index) for index in np.unravel_index(int(np.argmax(pairs)), pairs.shape))
    most = int(pairs[first, second])
    if not most:
        return CoActivation(layer, tokens, counts, None, None, None)
    expected = tokens * n_used * (n_used - 1) / (n_experts * (n_experts - 1))
    independent = float(counts[first, first]) * float(counts[second, second]) / tokens
    return CoActivation(layer, tokens, counts, (first, second), most / expected, most / independent)


# reconstruction errors


@dataclass(frozen=True)
class BudgetError:
    """What a layer's output loses under a budget: means over batches.

    error: squared distance to the full output, by its square. kept_probability: share of the natural picks' routing
    probability that is on shortlisted experts.
    """

    budget: int
    ranking: Ranking
    coverage: Coverage
    error: float
    kept_probability: float
    error_by_layer: list[float]


@dataclass(frozen=True)
class ReconstructionErrors:
    """The errors of every variant and budget that was measured, over so many verification batches."""

    batches: int
    rows: list[BudgetError]

    @classmethod
    def of(cls, measured: Sequence[NDArray[np.float64]], budgets: Sequence[int]) -> ReconstructionErrors:
        """The means of `layer_errors` over batches."""
        errors, kept = np.mean(measured, axis=0)
        rows = []
        for (i, (coverage, ranking)), (j, budget) in product(enumerate(VARIANTS), enumerate(budgets)):
            error, share = float(errors[:, i, j].mean()), float(kept[:, i, j].mean())
            if not np.isnan(error):
                rows.append(BudgetError(budget, ranking, coverage, error, share, errors[:, i, j].tolist()))
        return cls(len(measured), rows)


def layer_errors(
    batch: RoutedBatch, selection: FloatArray, router: Router, budgets: Sequence[int], static: Ids | None = None
) -> NDArray[np.float64]:
    """Errors and kept probability of a batch's layers, [2, L, n_variants, n_budgets] (Section 4.5).

    selection: the values that the top-k sorts [L, T, N]. static: calibrated orders [L, N]; without them NaN.
    """
    assert batch.outputs is not None
    measured = np.full((2, len(selection), len(VARIANTS), len(budgets)), np.nan)
    orders = [None] * len(selection) if static is None else static
    layers = zip(batch.outputs, batch.ids, batch.weights, batch.values, selection, orders, strict=True)
    for layer, (outputs, ids, weights, values, sorted_values, order) in enumerate(layers):
        probabilities = routing_probabilities(values, router.kind)
        full = moe_output(outputs, ids, weights)
        norm = np.square(full).sum()
        scores = {
            "router": router_scores(probabilities),
            "oracle": static_scores(oracle_order(outputs, weights, ids)),
            "picks": pick_scores(probabilities, ids),
            "static": None if order is None else static_scores(order),
        }
        for (i, (coverage, ranking)), (j, budget) in product(enumerate(VARIANTS), enumerate(budgets)):
            ranked = scores[ranking]
            if ranked is None:
                continue
            found = apply_budget(
                sorted_values, ids, probabilities, budget, weights=weights, coverage=coverage, scores=ranked
            )
            mixed = found.weights
            if mixed is None:
                is_natural = (found.ids == ids).all(axis=-1, keepdims=True)  # as the model's own kernels round them
                mixed = np.where(is_natural, weights, router.mixing.of(values, found.ids))
            distance = np.square(full - moe_output(outputs, found.ids, mixed)).sum()
            measured[:, layer, i, j] = distance / norm if norm > 0.0 else 0.0, found.kept_probability
    return measured
