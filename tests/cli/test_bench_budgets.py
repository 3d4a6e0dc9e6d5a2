"""`moeedge bench --expert-budget` from the outside."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.commands import refused, run_json

_ROWS = (
    {"category": "a", "prompt": "the cat and the dog", "reference": {"scorer": "contains", "expect": "the"}},
    {"category": "b", "prompt": "we saw the sea", "reference": {"scorer": "exact", "expect": "xyzzy"}},
)


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """Two prompts with references."""
    path = tmp_path / "own.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in _ROWS))
    return path


def test_budgets_and_draft_lengths(pair: list[str], own: Path, tmp_path: Path) -> None:
    text, picture = tmp_path / "text.txt", tmp_path / "curve.svg"
    text.write_text("the cat and the dog saw the sea " * 3)
    rows = run_json(
        "bench", *pair, "--dataset", own, "-n", "8", "--no-warmup", "-dev", "none", "--score",
        "--expert-budget", "off,6", "--draft-max", "2,4", "--perplexity", text, "--plot", picture,
    )  # fmt: skip
    assert [(row["mode"], row["gamma"], row["budget"], row["expert_budget"]) for row in rows] == [
        ("stock-ar", 0, None, None), ("stock-sd", 2, None, None), ("stock-sd", 4, None, None),
        ("moeedge", 2, None, None), ("moeedge", 2, "budget 6 (lossy)", 6),
        ("moeedge", 4, None, None), ("moeedge", 4, "budget 6 (lossy)", 6),
    ]  # fmt: skip
    ours = rows[3:]
    assert [row["lossy"] for row in ours] == [False, True, False, True]
    assert [row["perplexity_batch"] for row in ours] == [3, 3, 5, 5]
    assert all(row["perplexity"] > 1 for row in ours)
    assert [row["ratio_unbudgeted"] for row in ours[::2]] == [1.0, 1.0]
    assert all(row["agreement"] == 1.0 and row["score_change"] == 0.0 for row in ours[::2])
    assert all([point["category"] for point in row["points_by_category"]] == ["a", "b"] for row in rows)
    for row in ours[1::2]:
        assert row["experts_max"] <= 6 < row["experts_natural"]
        assert row["experts_per_verification"] <= 6
        assert 0 < row["kept_probability"] < 1
    assert "<svg" in picture.read_text()


def test_as_many_as_there_are_changes_nothing(pair: list[str], own: Path) -> None:
    rows = run_json(
        "bench", *pair, "--dataset", own, "-n", "8", "--no-warmup", "-r", "1", "-dev", "none", "--expert-budget", "16",
        "--modes", "stock-ar,moeedge",
    )  # fmt: skip
    off, most = rows[1:]
    assert (most["budget"], most["agreement"], most["output_check"]) == ("budget 16 (lossy)", 1.0, "2/2")
    assert [sample["generated_tokens"] for sample in most["samples"]] == [
        sample["generated_tokens"] for sample in off["samples"]
    ]


@pytest.mark.parametrize(
    "options",
    [
        ["--expert-budget", "auto"],
        ["--expert-budget", "16,x"],
        ["--expert-budget", ","],
        ["--expert-budget", "6", "--modes", "stock-ar,moeedge-ar"],
        ["--budget-ranking", "router"],
        ["--expert-budget", "6", "--budget-ranking", "static"],
        ["--expert-budget", "6", "--budget-file", "unread.json"],
        ["--expert-budget", "6", "--budget-policy", "none"],
        ["--expert-budget", "6", "--budget-ranking", "router,oracle"],
        ["--draft-max", "4,0"],
        ["--draft-max", "4,x"],
        ["--expert-budget", "6", "--perplexity", "absent.txt"],
        ["--plot", "a.png"],
    ],
)
def test_options_that_are_not_accepted(pair: list[str], own: Path, options: list[str]) -> None:
    assert refused("bench", *pair, "--dataset", own, *options)


def test_auto_is_not_offered(pair: list[str]) -> None:
    assert "auto" not in refused("bench", *pair, "--expert-budget", "16,x")
