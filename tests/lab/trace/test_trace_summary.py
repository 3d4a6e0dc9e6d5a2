"""The figures of `moeedge lab trace info`."""

from __future__ import annotations

from pathlib import Path

import pytest

from moeedge.lab.cli.trace import summarize_trace
from moeedge.lab.traces.importers import read_trace
from moeedge.native.abi import Phase
from moeedge.trace.steps import draft_stats
from tests.support.traces import make_trace, plain_text, two_texts


@pytest.mark.parametrize(
    ("known", "expected"),
    [(7, [7, 7]), ([1, 2], [1, 2]), ([1], None), ("7", None), (True, None), ([1, -2], None), (None, None)],
)
def test_expert_sizes_of_the_metadata(known: object, expected: list[int] | None) -> None:
    sizes = make_trace([(Phase.DECODE, 0, 1, True)], parameters={"expert_bytes": known}).expert_bytes()
    assert (None if sizes is None else sizes.tolist()) == expected


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
