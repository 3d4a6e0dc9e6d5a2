"""Curves of a layer: against the single measurements, by hand, and on real routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.analysis import expert_counts
from moeedge.analysis.model_profile import profile_model, routing_agreement
from moeedge.analysis.routing_curves import BATCHES, Skew, mean_curves, persistence, unique_curve
from moeedge.trace.importers import read_trace
from tests.support.traces import make_trace, plain_text, two_texts


@given(
    rows=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), min_size=0, max_size=14),
    texts=st.lists(st.integers(0, 1), min_size=14, max_size=14),
)
def test_unique_curve_is_the_measurement_at_every_length(rows: list[list[int]], texts: list[int]) -> None:
    ids = np.array(rows, dtype=np.int32).reshape(-1, 2)
    sequence = np.cumsum(texts)[: len(ids)]
    curve = unique_curve(ids, 6, range(1, 9), sequence)
    for n_tokens, found in curve.items():
        expected = expert_counts.empirical_unique(ids, 6, n_tokens, sequence)
        assert found == (None if expected is None else pytest.approx(expected)), n_tokens


def test_skew_by_hand() -> None:
    equal = Skew.of(np.full(8, 0.25), 2)
    assert (equal.top_ratio, equal.gini, equal.entropy_bits, equal.effective_experts, equal.unused) == pytest.approx(
        (1.0, 0.0, 3.0, 8.0, 0)
    )
    one = Skew.of(np.array([1.0, 0.0, 0.0, 0.0]), 1)
    assert (one.top_ratio, one.gini, one.entropy_bits, one.effective_experts, one.hot_share, one.unused) == (
        pytest.approx((4.0, 0.75, 0.0, 1.0, 1.0, 3))
    )
    assert Skew.of(np.zeros(4), 1) == Skew(0.0, 0.0, 0.0, 0.0, 0.0, 4)


def test_persistence_by_hand() -> None:
    steady = np.array([[3, 0, 1], [3, 0, 1], [2, 0, 1]], dtype=np.uint16)
    none_first = np.array([True, False, False])
    expected = np.corrcoef([3, 0, 1, 3, 0, 1], [3, 0, 1, 2, 0, 1])[0, 1]
    assert persistence(steady, none_first) == pytest.approx(expected)
    assert persistence(steady, np.array([True, True, True])) is None
    assert persistence(np.ones((3, 3), dtype=np.uint16), none_first) is None


def test_layers_without_tokens_have_no_part_in_the_mean() -> None:
    trace = two_texts()
    trace.ids[:, 0] = trace.sentinel
    profile = profile_model(trace, [1])
    assert [curves.layer for curves in profile.curves] == [1]
    assert profile.mean is not None and profile.mean.overlap == profile.curves[0].overlap
    assert mean_curves([]) is None
    prompt_only = profile_model(make_trace([(1, 0, 0, True)] * 3), [0])
    assert prompt_only.mean is None and prompt_only.gain is None and prompt_only.groups == []


def test_a_stop_keeps_the_layers_until_then() -> None:
    done: list[int] = []
    profile = profile_model(two_texts(n_layers=5), [4], on_layer=done.append, cancel=lambda: len(done) == 2)
    assert [curves.layer for curves in profile.curves] == [0, 1] and done == [1, 2]
    assert [layer.layer for layer in profile.layers] == [4]


def test_agreement_of_two_traces() -> None:
    first, second = plain_text(6), plain_text(6)
    assert routing_agreement(first, second) == 1.0
    second.ids[3] = (second.ids[3] + 1) % 8  # may name some of the same experts
    shared = [len(set(a) & set(b)) for a, b in zip(first.ids[3].tolist(), second.ids[3].tolist(), strict=True)]
    assert routing_agreement(first, second) == pytest.approx((5 * 4 + sum(shared)) / 24)
    second.token[2:] += 100  # the texts differ from here on
    assert routing_agreement(first, second) == 1.0
    assert routing_agreement(first, plain_text(6, n_experts=9)) is None


def test_curves_of_the_published_trace(data_folder: Path) -> None:
    """gpt-oss-20b, all 307 texts: the figures that `moeedge profile --trace` shows.

    The data set's own table says 6.24, 9.31, 12.88, 13.49 and 16.38 distinct experts and an overlap of 0.44, of a part
    of the text that it does not name; all windows of all texts give 0.3 to 0.9 % more, and an overlap of 0.435.
    """
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    trace = read_trace(file)
    rows = trace.text_rows()
    unique, overlap = [], []
    for layer in trace.expert_layers():
        ids = trace.layer_ids(layer)[rows]
        unique.append([v for v in unique_curve(ids, 32, (1, 2, 4, 8, 9, 16), trace.sequence[rows]).values()])
        overlap.append(expert_counts.empirical_overlap(ids, 32, trace.sequence[rows]))
    means = np.mean(np.array(unique, dtype=float), axis=0)
    np.testing.assert_allclose(means, [4.0, 6.261, 9.365, 12.988, 13.607, 16.458], atol=6e-4)
    np.testing.assert_allclose(means[1:], [6.24, 9.31, 12.88, 13.49, 16.38], rtol=0.01)
    assert np.mean(np.array(overlap, dtype=float)) == pytest.approx(0.435, abs=5e-4)
    uniform = [round(expert_counts.uniform_unique(32, 4, b), 2) for b in (1, 2, 4, 8, 9, 16)]
    assert uniform == [4, 7.50, 13.24, 21.00, 22.38, 28.22] and max(BATCHES) == 64
