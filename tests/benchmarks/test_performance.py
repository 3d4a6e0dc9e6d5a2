"""The tables of docs/performance.md can be made from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.performance import draft_cost, read, recosted, tables

_RECORDS = sorted((Path(__file__).resolve().parents[2] / "docs" / "benchmarks").glob("performance-*.json.gz"))


@pytest.mark.parametrize("path", _RECORDS, ids=lambda path: path.name)
def test_every_record_has_tables(path: Path) -> None:
    assert any("|--" in table for table in tables(read(path)))


def test_a_dearer_draft_costs_its_tokens() -> None:
    """Eight tokens in 8 s plainly; ours in 4 s with 4 drafts in 2 steps, and of these 0.4 s for drafting."""

    def row(mode: str, decode_s: float, drafted: int, draft_s: float) -> dict[str, Any]:
        sample = {"turn": 0, "repetition": 0, "decode_tokens": 8, "steps": 2, "drafted": drafted}
        timed = sample | {"decode_s": decode_s, "draft_s": draft_s}
        samples = [timed | {"prompt": category, "category": category} for category in ("a", "b")]
        return {"mode": mode, "gamma": drafted, "auto_gamma": drafted > 0, "budget": None, "samples": samples}

    rows = [row("stock-ar", 8.0, 0, 0.0), ours := row("moeedge", 4.0, 4, 0.4)]
    assert draft_cost(rows, ours) == pytest.approx(0.1) and draft_cost(rows, rows[0]) is None
    assert recosted(rows, ours, 0.1, 0) == pytest.approx(2.0)
    assert recosted(rows, ours, 0.2, 0) == pytest.approx(8.0 / 4.4)
    assert recosted(rows, ours, 0.2, 1) == pytest.approx(8.0 / 4.8)
    ngrams = row("stock-ngram", 2.0, 4, 0.4) | {"draft": "ngram", "auto_gamma": False}
    assert recosted([*rows, ngrams], ours, 0.2, 0) == pytest.approx(2.0 / 4.4)
