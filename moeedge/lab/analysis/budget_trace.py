"""The part of the analysis of expert budgets that a routing trace allows: no model, so no reconstruction errors."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.lab.analysis.budget_recording import BudgetAnalysis
from moeedge.lab.analysis.expert_budget import (
    ProbabilityCurve,
    analyse_pairs,
    co_activation,
    cumulative_probability,
    summed_weights,
)
from moeedge.lab.policies.expert_budget import used_experts
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import Steps, recorded_steps, simulated_steps

_STEPS_AT_ONCE = 1024  # bounds the memory of [steps, tokens, experts]
_NO_ERRORS = "A trace has no outputs of experts."


def analyse_trace(
    trace: Trace, layers: Sequence[int], budgets: Sequence[int], *, gamma: int, seed: int = 0
) -> BudgetAnalysis:
    """Distinct experts, shares of the best experts, and pairs, over the trace's verification batches.

    A trace without drafts is cut into windows of gamma + 1 tokens of text, one after the other. A trace has no
    probabilities of experts that a token did not select: the shares are those of the selected experts' weights, or of
    the activations where it has no weights either. Raises InputError where no window fits.
    """
    steps, gamma = _verifications(trace, gamma, seed)
    n_experts, n_used = trace.meta.n_experts, trace.meta.n_expert_used
    cumulative = np.zeros((len(layers), n_experts))
    unique = np.zeros(len(layers))
    pairs = []
    rows = steps.rows[steps.rows >= 0]
    for index, layer in enumerate(layers):
        ids = trace.layer_ids(layer)
        weights = _weights(trace, layer, ids)
        for start in range(0, len(steps), _STEPS_AT_ONCE):
            batches = steps.rows[start : start + _STEPS_AT_ONCE]
            scores, is_used = _scores(
                ids[batches], np.where((batches >= 0)[..., None], weights[batches], -1.0), n_experts
            )
            cumulative[index] += cumulative_probability(scores).sum(axis=0)
            unique[index] += is_used.sum()
        counts = co_activation(ids[rows], n_experts)
        pairs.append(analyse_pairs(layer, counts, int((ids[rows] >= 0).any(axis=1).sum()), trace.used_per_layer[layer]))
    curve = ProbabilityCurve(
        group="all",
        batches=len(steps),
        tokens=int(steps.n_tokens.sum()),
        cumulative=None,
        cumulative_weights=cumulative / len(steps),
        unique=unique / len(steps),
        selected_by="activations" if trace.weights is None else "weights",
    )
    return BudgetAnalysis(
        layers=tuple(layers),
        n_experts=n_experts,
        n_used=n_used,
        gamma=gamma,
        budgets=tuple(budgets),
        skipped=(),
        curves=(curve,),
        pairs=tuple(pairs),
        errors=None,
        no_errors=_NO_ERRORS,
    )


def _verifications(trace: Trace, gamma: int, seed: int) -> tuple[Steps, int]:
    """The batches of several tokens, and their draft length."""
    recorded = recorded_steps(trace, (Phase.VERIFY,))
    has_drafts = recorded.n_tokens > 1
    if has_drafts.any():
        kept = Steps(recorded.rows[has_drafts], recorded.sequence[has_drafts], recorded.n_text[has_drafts])
        return kept, trace.meta.gamma
    steps = simulated_steps(trace, gamma=gamma, acceptance_chance=1.0, rng=np.random.default_rng(seed))
    if not len(steps):
        raise InputError(
            f"No text of the trace is as long as a verification of {gamma + 1} tokens.", "Lower --draft-max."
        )
    return steps, gamma


def _weights(trace: Trace, layer: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
    """Weights [T, k] of the selected experts, -1 where none was recorded; 1 for each in a trace without weights."""
    weights = np.ones(ids.shape) if trace.weights is None else np.nan_to_num(trace.weights[:, layer].astype(np.float32))
    return np.where(ids >= 0, weights, -1.0).astype(np.float32)


def _scores(
    ids: NDArray[np.int32], weights: NDArray[np.float32], n_experts: int
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Summed weights [n, N], and which experts are used, of ids and weights [n, T, k]; a weight of -1: no expert."""
    is_known = weights >= 0
    places = np.where(is_known, ids, n_experts)  # a place of its own, which is dropped
    scores = summed_weights(places, np.where(is_known, weights, 0.0), n_experts + 1)
    is_used = used_experts(places, n_experts + 1)
    return scores[:, :n_experts], is_used[:, :n_experts]
