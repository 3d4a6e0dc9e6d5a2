"""Traces in the layouts of other tools: what is written is read again, and means the same."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.lab.traces.exporters import LAYOUTS, layout_of, write_trace
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.summary import summarize_trace
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import draft_stats
from tests.support.traces import make_trace, plain_text, two_texts

ENDINGS = {"npz": "npz", "arrays": "npz", "positions": "csv", "route": "csv"}


def text_ids(trace: Trace) -> list[list[list[int]]]:
    """Experts of the decoded text, by token and layer; -1 where not recorded."""
    rows = trace.text_rows()
    return np.stack([trace.layer_ids(layer)[rows] for layer in range(trace.meta.n_layers)], axis=1).tolist()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), layout=st.sampled_from(sorted(LAYOUTS)), weights=st.booleans(), hole=st.booleans())
def test_every_layout_round_trips(tmp_path: Path, seed: int, layout: str, weights: bool, hole: bool) -> None:
    trace = two_texts(seed=seed, weights=weights)
    if hole:
        trace.ids[6, 1] = trace.sentinel
    path = tmp_path / f"out.{ENDINGS[layout]}"
    n_tokens = write_trace(trace, path, layout)
    again = read_trace(path, n_experts=8)
    assert again.n_tokens == n_tokens
    assert text_ids(again) == text_ids(trace)
    assert np.diff(again.sequence[again.text_rows()]).sum() == 1  # two texts
    assert again.meta.n_experts == 8
    if layout == "npz":
        np.testing.assert_array_equal(again.accepted, trace.accepted)
    if layout == "route":
        assert int((again.phase == Phase.PREFILL).sum()) == int((trace.phase == Phase.PREFILL).sum())
        assert again.weights is not None
        if trace.weights is not None and not hole:
            rows = np.r_[0:3, 12:14]  # prefills: their rows come first in either text
            kept = np.flatnonzero(again.phase == Phase.PREFILL)
            np.testing.assert_allclose(again.weights[kept], trace.weights[rows], rtol=1e-3)
    else:
        assert (
            again.phase[again.text_rows()] == (trace.phase[trace.text_rows()] if layout == "npz" else Phase.DECODE)
        ).all()


def test_texts_of_one_token_stay_apart(tmp_path: Path) -> None:
    trace = make_trace([(Phase.DECODE, text, 1, True) for text in range(3)], gamma=0)
    write_trace(trace, tmp_path / "out.csv", "positions")
    assert read_trace(tmp_path / "out.csv").sequence.tolist() == [0, 1, 2]


def test_expert_sizes_go_through_route_files(tmp_path: Path) -> None:
    trace = make_trace([(Phase.DECODE, 0, 1, True)], gamma=0, parameters={"expert_bytes": [1000, 2000]})
    write_trace(trace, tmp_path / "out.csv", "route")
    sizes = read_trace(tmp_path / "out.csv").expert_bytes()
    assert sizes is not None and sizes.tolist() == [1000, 2000]


@pytest.mark.parametrize(
    ("known", "expected"),
    [(7, [7, 7]), ([1, 2], [1, 2]), ([1], None), ("7", None), (True, None), ([1, -2], None), (None, None)],
)
def test_expert_sizes_of_the_metadata(known: object, expected: list[int] | None) -> None:
    sizes = make_trace([(Phase.DECODE, 0, 1, True)], parameters={"expert_bytes": known}).expert_bytes()
    assert (None if sizes is None else sizes.tolist()) == expected


def test_prompts_alone_are_no_text(tmp_path: Path) -> None:
    trace = make_trace([(Phase.PREFILL, 0, 0, True)] * 3)
    for layout in ("arrays", "positions", "route"):
        with pytest.raises(InputError, match="no decoded text"):
            write_trace(trace, tmp_path / "out", layout)


def test_the_file_name_gives_the_layout(tmp_path: Path) -> None:
    assert (layout_of(Path("a.npz")), layout_of(Path("a.CSV"))) == ("npz", "positions")
    with pytest.raises(InputError, match=r"a\.txt"):
        layout_of(Path("a.txt"))
    with pytest.raises(InputError, match="Cannot write"):
        write_trace(two_texts(), tmp_path / "no" / "a.csv", "positions")


def test_summary_by_hand() -> None:
    one = summarize_trace(two_texts(weights=True))
    assert (one.tokens, one.prefill_tokens, one.text_tokens, one.rejected_tokens) == (21, 5, 10, 6)
    assert (one.sequences, one.steps, one.gamma) == (2, 6, 2)
    # accepted 0, 2, 1 and 0, 1 of two drafts each: judged were 1, 2, 2, 1 and 2
    assert one.acceptance_rate == pytest.approx(4 / 10)
    assert one.acceptance_chance == pytest.approx(4 / 8)
    assert one.tokens_per_step == pytest.approx(10 / 6)
    assert one.has_weights and one.has_tokens and one.not_recorded == 0.0
    assert summarize_trace(two_texts()).has_weights is False


def test_plain_decoding_has_no_drafts() -> None:
    assert draft_stats(plain_text(5)) is None
    assert summarize_trace(plain_text(5)).tokens_per_step == 1.0
    empty = summarize_trace(make_trace([(Phase.PREFILL, 0, 0, True)]))
    assert (empty.steps, empty.tokens_per_step, empty.overlap) == (0, None, None)


def test_overlap_of_the_real_trace(data_folder: Path) -> None:
    """0.44 of gpt-oss-20b's experts are those of the token before."""
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    assert summarize_trace(read_trace(file)).overlap == pytest.approx(0.44, abs=0.01)
