"""Curves of a layer: against the single measurements, by hand, and on real routing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.analysis import routing_curves
from moeedge.analysis.model_profile import profile_model
from moeedge.analysis.routing_curves import BATCHES, Skew, mean_curves, persistence, unique_curve
from moeedge.lab.traces.importers import read_trace
from moeedge.run import Run
from tests.support.progress import SeenProgress
from tests.support.traces import make_trace, two_texts


@given(
    rows=st.lists(st.lists(st.integers(-1, 5), min_size=2, max_size=2), min_size=0, max_size=14),
    texts=st.lists(st.integers(0, 1), min_size=14, max_size=14),
)
def test_unique_curve_is_the_measurement_at_every_length(rows: list[list[int]], texts: list[int]) -> None:
    ids = np.array(rows, dtype=np.int32).reshape(-1, 2)
    sequence = np.cumsum(texts)[: len(ids)]
    curve = unique_curve(ids, 6, range(1, 9), sequence)
    for b, found in curve.items():
        starts = range(len(ids) - b + 1)
        windows = [ids[at : at + b] for at in starts if sequence[at] == sequence[at + b - 1]]
        counts = [np.unique(window[window >= 0]).size for window in windows if (window >= 0).any(axis=1).all()]
        assert found == (pytest.approx(np.mean(counts)) if counts else None), b


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
    seen = SeenProgress()
    profile = profile_model(
        two_texts(n_layers=5), [4], run=Run(cancelled=lambda: len(seen.amounts) == 2, progress=seen)
    )
    assert [curves.layer for curves in profile.curves] == [0, 1, 4] and len(seen.amounts) == 3
    assert [layer.layer for layer in profile.layers] == [4]


def recomputed(ids: np.ndarray, batches: tuple[int, ...], sequence: np.ndarray) -> list[float]:
    """Mean distinct experts of so many consecutive tokens, and overlap of adjacent ones, from a bit per expert."""
    masks = np.bitwise_or.reduce(np.uint32(1) << ids.astype(np.uint32), axis=1)
    means = []
    for b in batches:
        windows = masks[: len(masks) - b + 1].copy()
        for place in range(1, b):
            windows |= masks[place : len(masks) - b + 1 + place]
        means.append(n_bits(windows[sequence[: windows.size] == sequence[b - 1 :]]).mean())
    shared = (masks[1:] & masks[:-1])[sequence[1:] == sequence[:-1]]
    return [*means, n_bits(shared).mean() / ids.shape[1]]


BITS_OF_16 = np.array([bin(value).count("1") for value in range(1 << 16)], dtype=np.uint8)


def n_bits(masks: np.ndarray) -> np.ndarray:
    return BITS_OF_16[masks & 0xFFFF] + BITS_OF_16[masks >> 16]


def published_trace(data_folder: Path) -> Path:
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    return file


def test_curves_of_the_published_trace(data_folder: Path) -> None:
    """gpt-oss-20b, all 307 texts: equal to a recomputation from the file's arrays, and near the data set's own table.

    The table probably has the figures of a part of the text; all windows of all texts give 0.3 to 0.9 %
    more distinct experts.
    """
    file = published_trace(data_folder)
    trace = read_trace(file)
    with np.load(file) as arrays:
        all_ids, lengths = arrays["ids"], arrays["lengths"]
    batches = (1, 2, 4, 8, 9, 16)
    sequence = np.repeat(np.arange(lengths.size), lengths)
    found, independence = [], []
    for layer in trace.expert_layers():
        ids = trace.layer_ids(layer)[trace.text_rows()]
        p = routing_curves.activation_probability(ids, 32)
        unique = unique_curve(ids, 32, batches, trace.sequence[trace.text_rows()])
        figures = [*unique.values(), routing_curves.empirical_overlap(ids, 32, trace.sequence[trace.text_rows()])]
        np.testing.assert_allclose(
            np.array(figures, dtype=float), recomputed(all_ids[:, layer], batches, sequence), rtol=1e-12
        )
        found.append(figures)
        independence.append([routing_curves.independence_unique(p, b) for b in batches])
    mean = np.mean(np.array(found, dtype=float), axis=0)
    # the table: measured, overlap, shuffled (popularity without order), uniform formula
    np.testing.assert_allclose(mean[:-1], [4, 6.24, 9.31, 12.88, 13.49, 16.38], rtol=0.01)
    assert mean[-1] == pytest.approx(0.44, abs=0.01)
    np.testing.assert_allclose(np.mean(independence, axis=0), [4, 7.24, 12.07, 17.85, 18.81, 22.99], rtol=0.01)
    for n_experts, k, printed in (
        (32, 4, [4, 7.50, 13.24, 21.00, 22.38, 28.22]),
        (128, 6, [6, 11.72, 22.36, 40.82, 44.91, 68.62]),
    ):
        assert [round(routing_curves.uniform_unique(n_experts, k, b), 2) for b in batches] == printed
    assert round(routing_curves.uniform_overlap(128, 6), 3) == 0.047 and routing_curves.uniform_overlap(32, 4) == 0.125


@pytest.mark.slow
def test_profile_of_the_published_trace(data_folder: Path) -> None:
    """The means that `moeedge profile --trace` shows: those of docs/lab/traces.md."""
    mean = profile_model(read_trace(published_trace(data_folder)), []).mean
    assert mean is not None and max(BATCHES) == 64
    shown = [round(mean.unique[b] or 0.0, 2) for b in (1, 2, 4, 8, 9, 16)]
    assert shown == [4.0, 6.26, 9.36, 12.99, 13.61, 16.46]
    assert round(mean.overlap[1] or 0.0, 3) == 0.435
