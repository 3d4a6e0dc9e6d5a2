"""Formulas and curves of a layer's routing: by hand, against literal loops, on real routing."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moeedge.analysis import routing_curves
from moeedge.analysis.profile import layer_curves
from moeedge.analysis.routing_curves import BATCHES, RoutingCurves, Skew, mean_curves, persistence, unique_curve
from moeedge.lab.traces.importers import read_trace
from tests.support.traces import published_trace, two_texts


def test_impossible_shapes_are_rejected() -> None:
    with pytest.raises(ValueError, match="experts per token"):
        routing_curves.uniform_unique(8, 9, 1)
    with pytest.raises(ValueError, match="experts per token"):
        routing_curves.uniform_overlap(8, 0)


def mean(values: list[float]) -> Any:
    return pytest.approx(statistics.fmean(values)) if values else None


@given(
    rows=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), max_size=14),
    texts=st.lists(st.integers(0, 1), min_size=14, max_size=14),
)
@example(rows=[], texts=[0] * 14)
@example(rows=[[-1, -1]] * 3, texts=[0] * 14)
def test_measurements_equal_literal_loops(rows: list[list[int]], texts: list[int]) -> None:
    """Tokens of several texts, of which some are not recorded (-1) and some name an expert twice."""
    sequence = np.cumsum(texts)[: len(rows)]
    curves = RoutingCurves.measure(3, np.array(rows, dtype=np.int32).reshape(-1, 2), sequence, 6, 2)
    sets = [{expert for expert in row if expert >= 0} for row in rows]
    for b, found in curves.unique.items():
        starts = [at for at in range(len(sets) - b + 1) if sequence[at] == sequence[at + b - 1]]
        windows = [sets[at : at + b] for at in starts if all(sets[at : at + b])]
        assert found == mean([len(set().union(*window)) for window in windows]), b
    for j, found in curves.overlap.items():
        pairs = [(sets[at], sets[at + j]) for at in range(len(sets) - j) if sequence[at] == sequence[at + j]]
        assert found == mean([len(one & other) / len(one) for one, other in pairs if one and other]), j
    recorded = [experts for experts in sets if experts]
    p = [sum(expert in experts for experts in recorded) / max(len(recorded), 1) for expert in range(6)]
    assert (curves.layer, curves.tokens, curves.overlap_uniform) == (3, len(recorded), 2 / 6)
    assert curves.popularity.tolist() == pytest.approx(p)
    assert curves.overlap_independence == pytest.approx(sum(x * x for x in p) / sum(p) if recorded else 0.0)
    for b in BATCHES:
        assert curves.unique_independence[b] == pytest.approx(sum(1 - (1 - x) ** b for x in p))
        assert curves.unique_uniform[b] == routing_curves.uniform_unique(6, 2, b)
    gini = sum(abs(a - b) for a in p for b in p) / (2 * 6 * sum(p)) if recorded else 0.0
    assert curves.skew.gini == pytest.approx(gini, abs=1e-12)
    assert curves.skew == Skew.of(curves.popularity, 2)


def test_skew_by_hand() -> None:
    equal, one = Skew.of(np.full(8, 0.25), 2), Skew.of(np.array([1.0, 0.0, 0.0, 0.0]), 1)
    assert (equal.top_ratio, equal.gini, equal.entropy_bits, equal.effective_experts, equal.unused) == pytest.approx(
        (1.0, 0.0, 3.0, 8.0, 0)
    )
    assert (one.top_ratio, one.gini, one.entropy_bits, one.effective_experts, one.hot_share, one.unused) == (
        pytest.approx((4.0, 0.75, 0.0, 1.0, 1.0, 3))
    )
    assert Skew.of(np.zeros(4), 1) == Skew(0.0, 0.0, 0.0, 0.0, 0.0, 4)


def test_entropy_by_hand() -> None:
    rows = np.array([[0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0], [2.0, 2.0, 0.0, 0.0]])
    np.testing.assert_allclose(routing_curves.entropy_bits(rows), [2.0, 0.0, 1.0])


def test_persistence_by_hand() -> None:
    steady = np.array([[3, 0, 1], [3, 0, 1], [2, 0, 1]], dtype=np.uint16)
    none_first = np.array([True, False, False])
    expected = np.corrcoef([3, 0, 1, 3, 0, 1], [3, 0, 1, 2, 0, 1])[0, 1]
    assert persistence(steady, none_first) == pytest.approx(expected)
    assert persistence(steady, np.array([True, True, True])) is None
    assert persistence(np.ones((3, 3), dtype=np.uint16), none_first) is None


def test_a_mean_of_layers() -> None:
    """Point by point, of popularity by rank; a layer without tokens takes no part, what one layer lacks is missing."""
    trace = two_texts(n_layers=4)
    trace.ids[:, 0] = trace.sentinel
    trace.ids[6:9, 1] = trace.sentinel  # cuts the text of six tokens
    layers = [layer_curves(trace, layer, trace.text_rows()) for layer in range(4)]
    found, recorded = mean_curves(layers), layers[1:]
    assert found is not None and (found.layer, found.tokens) == (None, 10)
    assert layers[1].unique[5] is None and layers[2].unique[5] is not None and found.unique[5] is None
    for n in range(1, 5):
        assert found.unique[n] == mean([each.unique[n] or 0.0 for each in recorded])
        assert found.overlap[n] == mean([each.overlap[n] or 0.0 for each in recorded])
        assert found.unique_independence[n] == mean([each.unique_independence[n] for each in recorded])
    assert found.overlap_independence == mean([each.overlap_independence for each in recorded])
    ranked = [sorted(each.popularity, reverse=True) for each in recorded]
    np.testing.assert_allclose(found.popularity, np.mean(ranked, axis=0))
    assert found.skew.gini == mean([each.skew.gini for each in recorded])
    assert found.skew.unused == round(statistics.fmean(each.skew.unused for each in recorded))
    assert mean_curves([]) is None and mean_curves(layers[:1]) is None


def test_curves_of_the_published_trace(data_folder: Path) -> None:
    """gpt-oss-20b, all 307 texts, near the data set's own table: distinct experts, overlap, and without the order.

    The table probably has the figures of a part of the text; all windows of all texts give 0.3 to 0.9 %
    more distinct experts.
    """
    trace = read_trace(published_trace(data_folder))
    batches, rows = (1, 2, 4, 8, 9, 16), trace.text_rows()
    unique, overlap, independence = [], [], []
    for layer in trace.expert_layers():
        ids = trace.layer_ids(layer)[rows]
        p = routing_curves.activation_probability(ids, 32)
        unique.append(list(unique_curve(ids, 32, batches, trace.sequence[rows]).values()))
        overlap.append(routing_curves.empirical_overlap(ids, 32, trace.sequence[rows]))
        independence.append([routing_curves.independence_unique(p, b) for b in batches])
    np.testing.assert_allclose(np.mean(unique, axis=0), [4, 6.24, 9.31, 12.88, 13.49, 16.38], rtol=0.01)
    assert np.mean(overlap) == pytest.approx(0.44, abs=0.01)
    np.testing.assert_allclose(np.mean(independence, axis=0), [4, 7.24, 12.07, 17.85, 18.81, 22.99], rtol=0.01)
