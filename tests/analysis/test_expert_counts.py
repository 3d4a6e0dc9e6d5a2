"""Unique-expert and overlap formulas: against published tables, against literal loops, against real routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.analysis import routing_curves
from moeedge.analysis.routing_curves import unique_curve
from moeedge.lab.traces.importers import read_trace


def empirical_unique(
    ids: np.ndarray, n_experts: int, n_tokens: int, sequence: np.ndarray | None = None
) -> float | None:
    return unique_curve(ids, n_experts, (n_tokens,), sequence)[n_tokens]


@pytest.mark.parametrize(
    ("n_experts", "n_used", "n_tokens", "published"),
    [
        # the production study, "Expected active experts vs. batch size", column Uniform
        (128, 8, 1, 8.0),
        (128, 8, 2, 15.5),
        (128, 8, 4, 29.1),
        (128, 8, 8, 51.6),
        (128, 8, 16, 82.4),
        (128, 8, 32, 111.8),
        (128, 8, 64, 125.9),
        # the same formula for gpt-oss-20b and for Qwen3-30B-A3B with 6 experts
        (32, 4, 2, 7.50),
        (32, 4, 4, 13.24),
        (32, 4, 8, 21.00),
        (32, 4, 9, 22.38),
        (32, 4, 16, 28.22),
        (128, 6, 4, 22.36),
        (128, 6, 9, 44.91),
        (128, 6, 16, 68.62),
    ],
)
def test_uniform_formula_gives_the_published_tables(
    n_experts: int, n_used: int, n_tokens: int, published: float
) -> None:
    digits = 1 if n_used == 8 else 2
    assert round(routing_curves.uniform_unique(n_experts, n_used, n_tokens), digits) == published


def test_uniform_overlap_of_the_production_model() -> None:
    assert routing_curves.uniform_overlap(128, 8) == 0.0625


def test_independence_with_equal_popularity_is_the_uniform_formula() -> None:
    p = np.full(128, 8 / 128)
    assert routing_curves.independence_overlap(p) == pytest.approx(routing_curves.uniform_overlap(128, 8))
    for n_tokens in (1, 2, 4, 8, 16):
        assert routing_curves.independence_unique(p, n_tokens) == pytest.approx(
            routing_curves.uniform_unique(128, 8, n_tokens)
        )


def test_skewed_popularity_shares_more() -> None:
    p = np.full(16, 0.1)
    p[0] = 0.5  # sum 2.0
    assert routing_curves.independence_overlap(p) == pytest.approx((0.25 + 15 * 0.01) / 2.0)
    assert routing_curves.independence_unique(p, 4) < routing_curves.uniform_unique(16, 2, 4)


def test_by_hand() -> None:
    ids = np.array([[0, 1], [1, 2], [1, 2], [3, 4], [0, 1]])
    sequence = np.array([0, 0, 0, 0, 1])
    # pairs of one text: {0,1}{1,2} share 1, {1,2}{1,2} share 2, {1,2}{3,4} share 0
    assert routing_curves.empirical_overlap(ids, 8, sequence) == pytest.approx((0.5 + 1.0 + 0.0) / 3)
    assert routing_curves.empirical_overlap(ids, 8) == pytest.approx((0.5 + 1.0 + 0.0 + 0.0) / 4)
    assert routing_curves.empirical_overlap(ids, 8, sequence, lag=2) == pytest.approx((0.5 + 0.0) / 2)
    assert empirical_unique(ids, 8, 1, sequence) == 2.0
    assert empirical_unique(ids, 8, 2, sequence) == pytest.approx((3 + 2 + 4) / 3)
    assert empirical_unique(ids, 8, 4, sequence) == 5.0
    assert empirical_unique(ids, 8, 5, sequence) is None
    np.testing.assert_allclose(routing_curves.activation_probability(ids, 5), np.array([2, 4, 2, 1, 1]) / 5)


def test_unrecorded_tokens_are_left_out() -> None:
    ids = np.array([[0, 1], [-1, -1], [0, 1], [0, 2]])
    assert routing_curves.empirical_overlap(ids, 4) == pytest.approx(0.5)
    assert empirical_unique(ids, 4, 2) == 3.0
    np.testing.assert_allclose(routing_curves.activation_probability(ids, 4), [1.0, 2 / 3, 1 / 3, 0.0])
    unrecorded = np.full((5, 2), -1)
    assert routing_curves.empirical_overlap(unrecorded, 4) is None
    assert empirical_unique(unrecorded, 4, 1) is None
    assert routing_curves.activation_probability(unrecorded, 4).sum() == 0
    assert routing_curves.independence_overlap(np.zeros(4)) == 0.0


@given(
    rows=st.lists(st.lists(st.integers(0, 7), min_size=3, max_size=3, unique=True), min_size=1, max_size=12),
    n_tokens=st.integers(1, 6),
    cut=st.integers(0, 12),
)
def test_measurements_equal_a_literal_loop(rows: list[list[int]], n_tokens: int, cut: int) -> None:
    ids = np.array(rows)
    sequence = (np.arange(len(rows)) >= cut).astype(int)
    sets = [set(row) for row in rows]
    windows = [
        len(set.union(*sets[i : i + n_tokens]))
        for i in range(len(rows) - n_tokens + 1)
        if sequence[i] == sequence[i + n_tokens - 1]
    ]
    measured = empirical_unique(ids, 8, n_tokens, sequence)
    assert measured == (pytest.approx(np.mean(windows)) if windows else None)
    if measured is not None:
        assert 3 <= measured <= min(8, 3 * n_tokens)
    shared = [len(sets[i] & sets[i + 1]) / 3 for i in range(len(rows) - 1) if sequence[i] == sequence[i + 1]]
    assert routing_curves.empirical_overlap(ids, 8, sequence) == (pytest.approx(np.mean(shared)) if shared else None)


@pytest.mark.parametrize(
    "call", [lambda: routing_curves.uniform_unique(8, 9, 1), lambda: routing_curves.uniform_overlap(8, 0)]
)
def test_impossible_shapes_are_rejected(call: object) -> None:
    assert callable(call)
    with pytest.raises(ValueError, match="experts per token"):
        call()


@pytest.mark.slow
def test_real_routing_of_gpt_oss_20b(data_folder: Path) -> None:
    """The figures that the data set's own description gives for this trace."""
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    trace = read_trace(file)
    n_experts = trace.meta.n_experts
    overlap, independence = [], []
    unique: dict[int, list[float]] = {n_tokens: [] for n_tokens in (2, 4, 8, 9, 16)}
    for layer in range(trace.meta.n_layers):
        ids = trace.layer_ids(layer)
        overlap.append(routing_curves.empirical_overlap(ids, n_experts, trace.sequence))
        independence.append(routing_curves.independence_overlap(routing_curves.activation_probability(ids, n_experts)))
        for n_tokens, found in unique.items():
            mean = empirical_unique(ids, n_experts, n_tokens, trace.sequence)
            assert mean is not None
            found.append(mean)
    assert np.mean(overlap) == pytest.approx(0.44, abs=0.01)
    assert 0.125 < np.mean(independence) < 0.25
    for n_tokens, published in {2: 6.24, 4: 9.31, 8: 12.88, 9: 13.49, 16: 16.38}.items():
        assert np.mean(unique[n_tokens]) == pytest.approx(published, rel=0.02)


def test_independence_formula_is_shuffled_routing(data_folder: Path) -> None:
    """Shuffling keeps the popularity and destroys the order: what the independence formula describes."""
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    trace = read_trace(file)
    order = np.random.default_rng(0).permutation(trace.n_tokens)
    for layer in (0, 12, 23):
        ids = trace.layer_ids(layer)
        p = routing_curves.activation_probability(ids, trace.meta.n_experts)
        for n_tokens in (2, 4, 8, 16):
            shuffled = empirical_unique(ids[order], trace.meta.n_experts, n_tokens)
            assert shuffled == pytest.approx(routing_curves.independence_unique(p, n_tokens), rel=0.01)
