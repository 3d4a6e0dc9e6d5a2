"""The tables of docs/performance.md can be made from its records."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.performance import bench_tables, kernel_table, read, tables

_RECORDS = sorted((Path(__file__).resolve().parents[2] / "docs" / "benchmarks").glob("performance-*.json.gz"))


@pytest.mark.parametrize("path", _RECORDS, ids=lambda path: path.name)
def test_every_record_has_tables(path: Path) -> None:
    assert any("|--" in table for table in tables(read(path)))


def test_the_least_category_is_told() -> None:
    rows = [row for path in _RECORDS if isinstance(record := read(path), list) for row in record]
    row = next(row for row in rows if row["best_stock_by_category"])
    parts = [dict(part, ratio=2.0) for part in row["best_stock_by_category"]]
    parts[0] |= {"ratio": 0.5, "category": "slow"}
    assert list(bench_tables([row | {"best_stock_by_category": parts}]))[-1].endswith("least 0.500 (slow)\n")


def test_shares_are_medians_of_rounds_with_a_read() -> None:
    sample = {"layout": "q4_0", "n_tokens": 9, "read": 10.0, "ggml": 5.0, "ours": 8.0}
    assert "| 0.50 | 0.80 |" in " ".join(kernel_table([sample, sample | {"read": None, "ours": 1.0}]).split())
