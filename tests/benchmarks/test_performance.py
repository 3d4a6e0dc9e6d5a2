"""The tables of docs/performance.md can be made from its records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.performance import draft_cost, over_stock, ratios, read, recosted, repeated, tables

_FOLDER = Path(__file__).resolve().parents[2] / "docs" / "benchmarks"
_RECORDS = sorted(_FOLDER.glob("performance-*.json.gz"))


@pytest.mark.parametrize("path", _RECORDS, ids=lambda path: path.name)
def test_every_record_has_tables(path: Path) -> None:
    assert any("|--" in table for table in tables(read(path)))


def test_settings_that_were_measured_once_are_no_base() -> None:
    speeds = {("moeedge", "moeedge-ar"): [30, 20, 22], ("stock", "stock-ar"): [10, 10, 11], ("llama.cpp", "once"): [12]}
    samples = [
        {"rival": rival, "settings": settings, "repetition": i, "speed_ts": speed_ts}
        for (rival, settings), own in speeds.items()
        for i, speed_ts in enumerate(own)
    ]
    assert over_stock({"samples": samples}) == 2.0


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


@pytest.mark.parametrize(
    ("name", "tests"),
    [
        ("rivals-gptoss-20b-avxvnni", ["pp512", "pp2", "pp4", "pp9", "pp17", "tg64"]),
        ("surface-qwen3-30b-fifth", ["accepted 0.5", "accepted 0.7", "accepted 0.8", "accepted 0.9"]),
        ("routed-gptoss-20b", ["pp512", "pp2", "pp4", "pp9", "pp17", "tg64"]),
        ("beyond-ram-gptoss-20b", ["moeedge tg", "moeedge-auto tg"]),
    ],
)
def test_a_command_that_is_run_again_is_compared(name: str, tests: list[str]) -> None:
    record = read(_FOLDER / f"{name}.json.gz")
    found = ratios(record)
    assert list(found) == tests
    assert all(low < ratio < high for ratio, low, high in found.values())
    assert f"{len(tests)} of {len(tests)}" in list(repeated(record, record))[-1]


def test_prompts_beyond_ram_are_compared_with_the_rounds_fastest_stock() -> None:
    seconds = {"stock": (4.0, 8.0), "stock@ub2048": (8.0, 4.0), "moeedge": (2.0, 2.0)}
    runs = [
        {"arm": arm, "round": turn, "answers": [], "prompts": [{"tokens": 512, "prefill_s": prefill_s}]}
        for arm, own in seconds.items()
        for turn, prefill_s in enumerate(own)
    ]
    assert ratios({"runs": runs}) == {"moeedge pp512": pytest.approx((2.0, 2.0, 2.0))}


def test_a_ratio_outside_the_first_interval_is_told() -> None:
    record = read(_FOLDER / "rivals-gptoss-20b-avxvnni.json.gz")
    again = [row | {"ratio": 2 * row["high"]} if row["test"] == "pp2" else row for row in record]
    table, last = repeated(record, again)
    assert last.startswith("5 of 6 ")
    (line,) = (line for line in table.splitlines() if "pp2 " in line)
    assert line.split("|")[-2].strip() == "no"
