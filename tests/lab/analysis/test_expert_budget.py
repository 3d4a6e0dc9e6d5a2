"""Analyses of expert budgets, against definitions in plain Python, and the two passes over a model's verifications."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EngineError
from moeedge.lab.analysis.budget_recording import analyse_budgets
from moeedge.lab.analysis.expert_budget import (
    VARIANTS,
    ReconstructionErrors,
    RoutedBatch,
    Router,
    analyse_pairs,
    co_activation,
    cumulative_probability,
    default_budgets,
    infer_router,
    layer_errors,
    selection_values,
)
from moeedge.lab.policies.expert_budget import MixingWeights, by_expert, router_scores
from moeedge.run import Run
from moeedge.scheduler.config import PlacementConfig
from tests.support.progress import SeenProgress

L, T, N, K = 3, 5, 12, 3
BUDGETS = (3, 5, 8, 12)
Floats = NDArray[np.float32]


def softmax(logits: Floats) -> Floats:
    raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return np.asarray(raised / raised.sum(axis=-1, keepdims=True), dtype=np.float32)


def spread(ids: NDArray[np.int32], weights: Floats) -> Floats:
    """Weights [T, N] of the experts ids [T, K]."""
    wide = np.zeros((len(ids), N))
    np.put_along_axis(wide, ids, weights, axis=-1)
    return wide


def test_errors_against_their_definition() -> None:
    """Eq. 4 to 8. The output of every expert is a dimension of its own: that of the layer is the token's weights."""
    rng = np.random.default_rng(4)
    values = softmax(rng.standard_normal((L, T, N)).astype(np.float32) * 2)
    ids = np.argsort(-values, axis=-1, kind="stable")[..., :K].astype(np.int32)
    weights = np.take_along_axis(values, ids, axis=-1)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    batch = RoutedBatch(ids, weights, values, [np.broadcast_to(np.eye(N, dtype=np.float32), (T, N, N))] * L)
    static = np.stack([rng.permutation(N) for _ in range(L)]).astype(np.int32)
    router = Router("softmax", MixingWeights(normalised=True))
    errors, kept = layer_errors(batch, values, router, BUDGETS, static)
    for layer, (i, (coverage, ranking)), (j, budget) in itertools.product(
        range(L), enumerate(VARIANTS), enumerate(BUDGETS)
    ):
        p, natural = values[layer], spread(ids[layer], weights[layer])
        is_used, n_after = natural.any(axis=0), -np.argsort(static[layer])
        score = {"router": p.sum(0), "static": n_after, "picks": natural.sum(0), "oracle": np.square(natural).sum(0)}
        inside = np.isin(np.arange(N), np.argsort(-score[ranking], kind="stable")[:budget])
        inside = is_used if is_used.sum() <= budget else inside
        used = np.where(inside, natural, 0.0)
        if coverage == "substitution":
            best = np.argsort(-np.where(inside, p, -1.0), axis=-1)[:, :K]
            used = spread(best, np.take_along_axis(p, best, axis=-1))
            used /= used.sum(axis=-1, keepdims=True)
        error = np.square(natural - used).sum() / np.square(natural).sum()
        assert errors[layer, i, j] == pytest.approx(error, abs=1e-5), (layer, ranking, coverage, budget)
        assert kept[layer, i, j] == pytest.approx(p[(natural > 0) & inside].sum() / p[natural > 0].sum(), abs=1e-5)
    assert (errors[:, :, -1] == 0).all()  # all experts are allowed
    without = layer_errors(batch, values, router, BUDGETS)
    found = ReconstructionErrors.of([np.array([errors, kept]), without], BUDGETS)
    assert found.batches == 2 and {row.ranking for row in found.rows} == {"router", "picks", "oracle"}
    for row in found.rows:
        i, j = VARIANTS.index((row.coverage, row.ranking)), BUDGETS.index(row.budget)
        assert row.error_by_layer == pytest.approx(errors[:, i, j])
        assert (row.error, row.kept_probability) == pytest.approx((errors[:, i, j].mean(), kept[:, i, j].mean()))


@pytest.mark.parametrize("scale", [1.0, 2.5])
@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("kind", ["softmax", "logits", "sigmoid"])
def test_the_router_is_inferred_from_its_weights(kind: str, normalised: bool, scale: float) -> None:
    logits = np.random.default_rng(7).standard_normal((30, N)).astype(np.float32)
    values = {"softmax": softmax(logits), "logits": logits, "sigmoid": 1 / (1 + np.exp(-logits))}[kind]
    ids = np.argsort(-values, axis=-1)[:, :K].astype(np.int32)
    weights = np.take_along_axis(values, ids, axis=-1)
    if kind == "logits":
        weights = softmax(weights)
    if normalised:
        weights = weights / weights.sum(axis=-1, keepdims=True)
    router = infer_router(values, ids, weights * np.float32(scale))
    assert router.kind == kind
    np.testing.assert_allclose(router.mixing.of(values, ids), weights * scale, rtol=1e-3)
    with pytest.raises(EngineError):
        infer_router(values, ids, weights**2 + 0.1)


def test_selection_values_of_a_router_with_bias_and_groups() -> None:
    """DeepSeek-V3: a token may use the groups with the highest sum of their two best experts."""
    rng = np.random.default_rng(3)
    values, bias = rng.random((T, N)).astype(np.float32), rng.random(N).astype(np.float32)
    assert np.array_equal(selection_values(values, None), values)
    found = selection_values(values, bias, n_groups=4, n_groups_used=2)
    for t in range(T):
        biased = [float(values[t, e]) + float(bias[e]) for e in range(N)]
        groups = [list(range(start, start + 3)) for start in range(0, N, 3)]
        groups.sort(key=lambda group: -sum(sorted(biased[e] for e in group)[-2:]))
        allowed = {e for group in groups[:2] for e in group}
        expected = [biased[e] if e in allowed else -np.inf for e in range(N)]
        np.testing.assert_allclose(found[t], expected, rtol=1e-6)


def test_cumulative_probability_by_hand() -> None:
    scores = np.array([[1.0, 5.0, 4.0], [0.0, 0.0, 0.0]])
    np.testing.assert_allclose(cumulative_probability(scores), [[0.5, 0.9, 1.0], [0, 0, 0]])
    ids, weights = np.array([[[2, 0], [2, 1]]]), np.array([[[0.75, 0.25], [0.5, 0.5]]], dtype=np.float32)
    np.testing.assert_allclose(router_scores(by_expert(ids, weights, 4)), [[0.25, 0.5, 1.25, 0.0]])


def test_pairs_against_loops() -> None:
    """Counts, and Equation 9: the most frequent pair by T k (k - 1) / (N (N - 1))."""
    rng = np.random.default_rng(2)
    ids = np.stack([rng.choice(N, K, replace=False, p=np.arange(1, N + 1) / 78) for _ in range(200)]).astype(np.int32)
    counts = co_activation(ids, N)
    for a, b in itertools.product(range(N), repeat=2):
        assert counts[a, b] == sum({a, b} <= set(row) for row in ids.tolist())
    found = analyse_pairs(7, counts, len(ids), K)
    assert found.most_frequent_pair is not None and found.most_frequent_pair[0] < found.most_frequent_pair[1]
    most = max(counts[a, b] for a, b in itertools.combinations(range(N), 2))
    a, b = found.most_frequent_pair
    assert counts[a, b] == most
    assert found.concentration == pytest.approx(most * N * (N - 1) / (200 * K * (K - 1)))
    assert found.lift_over_independence == pytest.approx(most * 200 / (counts[a, a] * counts[b, b]))
    empty = analyse_pairs(0, np.zeros((N, N), dtype=np.int64), 0, K)
    assert (empty.most_frequent_pair, empty.concentration, empty.lift_over_independence) == (None, None, None)


def test_budgets_by_default() -> None:
    assert default_budgets(128, 8) == (8, 12, 16, 20, 24, 32, 48, 64, 96, 128)
    assert default_budgets(8, 2) == (2, 3, 4, 5, 6, 8)
    assert default_budgets(4, 4) == (4,)


def test_both_passes_are_told_of_and_measured(tiny_moe: Path, tiny_draft: Path) -> None:
    prompts = [Prompt(text, "", user_turns(text)) for text in ("a b a b a b", "c d c")]
    progress, greedy = SeenProgress(), SamplingConfig(temperature=0)
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, gamma=4, n_ctx=256, n_threads=1, device="none")
    with Session.open(replace(config, placement=PlacementConfig(cache_ratio=0.0))) as session:
        found = analyse_budgets(
            session, prompts, [0, 2], (4, 8, 16), n_predict=8, sampling=greedy, raw=True, run=Run(progress=progress)
        )
    assert progress.amounts == [1] * 4  # each pass answers the prompts anew
    assert "profiling, 8 tokens" in progress.phases
    assert found.reconstruction_error is not None
    assert {row.budget for row in found.reconstruction_error.rows} == {4, 8, 16}
