"""Expert budget: a verification uses at most B experts of each layer (MoE-Spec), as functions of the router's values.

This module defines what the native code computes, and serves replay, simulator and analysis. T tokens, N experts, k of
them per token; every array may have leading dimensions, e.g. layers, which are independent. The graph nodes that the
values come from are those of llama.cpp's `build_moe_ffn` (src/llama-graph.cpp).

1. Scores of the experts: the shares of the tokens' natural picks ("picks", the default; not in the paper), the sum of
   the tokens' routing probabilities over all experts (Eq. 5; "router"), a calibrated order (Eq. 4; "static"), or the
   oracle, which knows the experts' outputs (Eq. 6).
2. The shortlist: the B experts with the highest scores.
3. Coverage of tokens whose experts are outside: truncation (Eq. 7) or substitution (Eq. 8).

Where the natural top-k of all tokens has at most B experts, these are the shortlist, and the layer's output is the
model's own. The paper's Eq. 5 would replace some of them, which costs quality and saves no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IntArray
from moeedge.policies.expert_budget import Coverage

Probabilities = NDArray[np.float64]
Ids = NDArray[np.int32]

Ranking = Literal["router", "picks", "static", "oracle"]
RouterKind = Literal["softmax", "logits", "sigmoid"]

_MIN_WEIGHT_SUM = np.float32(6.103515625e-5)  # llama.cpp clamps the sum of a token's weights to F16's least normal


@dataclass(frozen=True, kw_only=True)
class MixingWeights:
    """How a model makes a token's mixing weights from the router's values of its k experts (build_moe_ffn).

    softmax    softmax over the k values, for routers whose values are logits (gpt-oss)
    normalised divided by their sum, at least 2^-14
    scale      factor afterwards (DeepSeek)
    """

    softmax: bool = False
    normalised: bool = False
    scale: float = 1.0

    def of(self, values: FloatArray, ids: IntArray) -> FloatArray:
        """Weights float32 [T, k] of the experts `ids` [T, k]; values: `ffn_moe_probs` [T, N]."""
        weights: FloatArray = np.take_along_axis(values, ids, axis=-1).astype(np.float32)
        if self.softmax:
            weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
        if self.normalised:
            weights = weights / np.maximum(weights.sum(axis=-1, keepdims=True), _MIN_WEIGHT_SUM)
        scaled: FloatArray = weights * np.float32(self.scale)
        return scaled


@dataclass(frozen=True, kw_only=True, eq=False)
class BudgetedRouting:
    """One verification's routing under a budget.

    ids               int32 [T, k]
    weights           float32 [T, k]; None: to be made of the router's values at `ids` (substitution)
    n_natural         experts that the top-k of all tokens would use
    n_kept            experts of `ids`
    kept_probability  share of the natural picks' routing probability that is on shortlisted experts, 1: unchanged
    """

    ids: Ids
    weights: FloatArray | None
    n_natural: IntArray
    n_kept: IntArray
    kept_probability: Probabilities


def routing_probabilities(values: FloatArray, kind: RouterKind) -> Probabilities:
    """Probabilities float64 [T, N] that Eq. 5 sums, of `ffn_moe_probs` float32 [T, N].

    kind: "softmax": the values are probabilities; "logits": the model's softmax comes after the top-k (gpt-oss), here
    it is over all experts; "sigmoid": any values >= 0, divided by the token's sum, so that tokens have equal votes
    (the paper leaves such routers open, Limitations). Without the selection bias: it balances load, and says nothing
    about an expert's weight.
    """
    wide = values.astype(np.float64)
    if kind == "logits":
        wide = np.exp(wide - wide.max(axis=-1, keepdims=True))
    if kind != "softmax":
        wide = wide / np.maximum(wide.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return wide


def router_scores(probabilities: Probabilities) -> Probabilities:
    """Scores float64 [N]: the sum over the tokens of probabilities [T, N] (Eq. 5)."""
    scores: Probabilities = probabilities.sum(axis=-2)
    return scores


def pick_scores(probabilities: Probabilities, ids: IntArray) -> Probabilities:
    """Scores float64 [N]: the sum over the tokens of their natural picks' shares, ids [T, k] (not in the paper).

    A token's shares are its picks' probabilities divided by their sum: the mixing weights of models that normalise.
    Eq. 5 also sums what tokens give to experts that they do not pick, which does not reach the output.
    """
    picked = np.take_along_axis(probabilities, ids, axis=-1)
    shares = picked / np.maximum(picked.sum(axis=-1, keepdims=True), np.finfo(np.float64).tiny)
    return router_scores(by_expert(ids, shares, probabilities.shape[-1]))


def by_expert(ids: IntArray, values: NDArray[Any], n_experts: int) -> Probabilities:
    """The tokens' values [T, k] of their experts ids [T, k] as float64 [T, N]; 0 for the other experts."""
    wide = np.zeros((*ids.shape[:-1], n_experts), dtype=np.float64)
    np.put_along_axis(wide, ids, values.astype(np.float64), axis=-1)
    return wide


def static_order(counts: NDArray[Any]) -> Ids:
    """Expert ids int32 [N], most frequently selected first, ties by the lower id; counts [N] (Eq. 4)."""
    return np.argsort(-counts.astype(np.float64), axis=-1, kind="stable").astype(np.int32)


def static_scores(order: IntArray) -> Probabilities:
    """Scores float64 [N] of a static order [N]: how many experts come after it."""
    scores: Probabilities = order.shape[-1] - 1.0 - np.argsort(order, axis=-1)
    return scores


def shortlist(scores: Probabilities, budget: int | IntArray) -> BoolArray:
    """The `budget` experts with the highest scores, bool [N]; ties by the lower id."""
    rank = np.argsort(np.argsort(-scores, axis=-1, kind="stable"), axis=-1)
    return rank < np.asarray(budget)[..., None]


def used_experts(ids: IntArray, n_experts: int) -> BoolArray:
    """The experts that any token uses (Eq. 3), bool [N] of ids [T, k]."""
    used: BoolArray = np.logical_or.reduce(_chosen(ids, n_experts), axis=-2)
    return used


def substitute(
    selection: FloatArray | Probabilities, ids: IntArray, shortlisted: BoolArray, probabilities: Probabilities
) -> Ids:
    """Top-k inside the shortlist, int32 [T, k] (Eq. 8).

    selection: the values [T, N] that the model's top-k sorts, i.e. with selection bias, and -inf outside the groups
    that the token may use. ids: the natural top-k [T, k]; those in the shortlist come first, in their order. Then the
    best others by `selection`; where fewer than k are finite, the rest by `probabilities`. Ties by the lower id.
    """
    n_experts = selection.shape[-1]
    inside = np.broadcast_to(shortlisted[..., None, :], selection.shape)
    natural = _chosen(ids, n_experts)
    place = np.zeros(selection.shape, dtype=np.float64)
    np.put_along_axis(place, ids, np.broadcast_to(np.arange(ids.shape[-1], dtype=np.float64), ids.shape), axis=-1)
    finite = np.isfinite(selection)
    tier = np.where(~inside, 3, np.where(natural, 0, np.where(finite, 1, 2)))
    within_tier = np.where(natural, place, np.where(finite, -selection.astype(np.float64), -probabilities))
    best = np.lexsort((within_tier, tier), axis=-1)
    return best[..., : ids.shape[-1]].astype(np.int32)


def truncate(
    ids: IntArray, weights: FloatArray, shortlisted: BoolArray, probabilities: Probabilities
) -> tuple[Ids, FloatArray]:
    """The natural top-k with weight 0 for experts outside the shortlist: ids int32, weights float32 [T, k] (Eq. 7).

    weights: those of the natural top-k [T, k], not made anew. The ids of zeroed places become the most probable
    experts of the shortlist that the token does not use, so that no expert outside is computed.
    """
    n_experts = probabilities.shape[-1]
    in_shortlist = np.broadcast_to(shortlisted[..., None, :], probabilities.shape)
    free = in_shortlist & ~_chosen(ids, n_experts)
    replacements = np.lexsort((-probabilities, ~free), axis=-1)
    kept = np.take_along_axis(in_shortlist, ids, axis=-1)
    nth = np.maximum(np.cumsum(~kept, axis=-1) - 1, 0)
    new_ids = np.where(kept, ids, np.take_along_axis(replacements, nth, axis=-1)).astype(np.int32)
    return new_ids, np.where(kept, weights, np.float32(0.0)).astype(np.float32)


def apply_budget(
    selection: FloatArray | Probabilities,
    ids: IntArray,
    probabilities: Probabilities,
    budget: int | IntArray,
    *,
    weights: FloatArray | None = None,
    coverage: Coverage = "substitution",
    scores: Probabilities | None = None,
) -> BudgetedRouting:
    """Routing of one verification under a budget.

    selection: [T, N], see `substitute`; ids: the natural top-k [T, k]; weights: theirs, for truncation; scores: of the
    experts [N], by default `pick_scores`; budget: k or more, an integer or an array of the leading dimensions.
    """
    n_experts = selection.shape[-1]
    natural = used_experts(ids, n_experts)
    n_natural = natural.sum(axis=-1)
    ranked = shortlist(pick_scores(probabilities, ids) if scores is None else scores, budget)
    shortlisted: BoolArray = np.where(np.asarray(n_natural <= budget)[..., None], natural, ranked)
    new_weights = None
    if coverage == "substitution":
        new_ids = substitute(selection, ids, shortlisted, probabilities)
    else:
        assert weights is not None, "truncation needs the weights of the natural top-k"
        new_ids, new_weights = truncate(ids, weights, shortlisted, probabilities)
    return BudgetedRouting(
        ids=new_ids,
        weights=new_weights,
        n_natural=n_natural,
        n_kept=used_experts(new_ids, n_experts).sum(axis=-1),
        kept_probability=kept_probability(probabilities, ids, shortlisted),
    )


def kept_probability(probabilities: Probabilities, ids: IntArray, shortlisted: BoolArray) -> Probabilities:
    """Share of the natural picks' routing probability, summed over the tokens, that is on shortlisted experts."""
    picked = np.take_along_axis(probabilities, ids, axis=-1)
    inside = np.take_along_axis(np.broadcast_to(shortlisted[..., None, :], probabilities.shape), ids, axis=-1)
    total = picked.sum(axis=(-2, -1))
    kept: Probabilities = np.where(inside, picked, 0.0).sum(axis=(-2, -1))
    share: Probabilities = np.divide(kept, total, out=np.ones_like(kept), where=total > 0.0)
    return share


def moe_output(outputs: FloatArray, ids: IntArray, weights: FloatArray) -> NDArray[np.float64]:
    """The layer's output float64 [T, D] (Eq. 2): the weighted sum of `outputs` [T, N, D] over ids, weights [T, k]."""
    picked = np.take_along_axis(outputs, ids[..., None], axis=-2).astype(np.float64)
    total: NDArray[np.float64] = (picked * weights[..., None]).sum(axis=-2)
    return total


def oracle_order(outputs: FloatArray, weights: FloatArray, ids: IntArray) -> Ids:
    """Expert ids int32 [N] in the order in which a greedy search adds them to the shortlist (Eq. 6).

    outputs: of all experts [T, N, D]; those of natural picks are read. weights, ids: the natural top-k [T, k]. From
    the empty set, the expert is added with which the squared error to the unbudgeted output, summed over the tokens, of
    the weighted outputs inside the set (Eq. 7, weights unchanged) is least. Ties by the lower id.

    With c_te the weighted output of expert e for token t and G_ef = sum_t <c_te, c_tf>, the error of a set is the sum
    of G over pairs outside it, and adding e reduces it by 2 sum_{f outside} G_ef - G_ee.
    """
    n_experts = outputs.shape[1]
    used = np.unique(ids)  # the weighted outputs of the others are 0
    weighted = outputs[:, used] * by_expert(ids, weights, n_experts)[:, used, None]
    gram = np.zeros((n_experts, n_experts), dtype=np.float64)
    gram[np.ix_(used, used)] = np.tensordot(weighted, weighted, axes=([0, 2], [0, 2]))
    residual = gram.sum(axis=1)
    order = np.empty(n_experts, dtype=np.int32)
    chosen = np.zeros(n_experts, dtype=np.bool_)
    for place in range(n_experts):
        best = int(np.argmax(np.where(chosen, -np.inf, 2.0 * residual - np.diag(gram))))
        order[place] = best
        chosen[best] = True
        residual -= gram[:, best]
    return order


def _chosen(ids: IntArray, n_experts: int) -> BoolArray:
    """Bool [T, N] of ids [T, k]."""
    chosen = np.zeros((*ids.shape[:-1], n_experts), dtype=np.bool_)
    np.put_along_axis(chosen, ids, True, axis=-1)
    return chosen
