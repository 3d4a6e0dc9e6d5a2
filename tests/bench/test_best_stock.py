"""Speed over the fastest stock mode: against small examples by hand, in a run on a tiny pair, and as a table."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moeedge.bench.config import Sweep, applicable_modes, mode_config, parse_modes
from moeedge.bench.figures import ALL, MEAN, over_best_stock
from moeedge.bench.samples import Sample
from moeedge.data.datasets import load_datasets
from moeedge.engine.types import EngineConfig
from moeedge.errors import DatasetError, InputError
from moeedge.records import as_dict
from moeedge.ui.bench_views import render
from tests.bench.recording import CONVERSATIONS, make_plan, run, write_conversations


def _lane(mode: str, *seconds: float) -> list[Sample]:
    """Turns of 10 tokens: the first two of category "a", the others of "b"."""
    return [
        Sample(mode, f"p{i}", 0, 0, 0, category="a" if i < 2 else "b", decode_tokens=10, decode_s=second)
        for i, second in enumerate(seconds)
    ]


def test_each_category_has_its_own_fastest_stock_mode() -> None:
    own = _lane("moeedge", 1, 1, 2, 2)
    found = over_best_stock(own, [_lane("stock-ar", 2, 2, 3, 3), _lane("stock-sd gamma 1", 4, 4, 1, 2)])
    assert [(part.category, part.fastest, part.n_turns) for part in found] == [
        (ALL, "stock-ar", 4), ("a", "stock-ar", 2), ("b", "stock-sd gamma 1", 2), (MEAN, "", 4)
    ]  # fmt: skip
    # tokens over seconds: 40 in 10 s (stock-ar) are 10/6 slower; "b": 20 in 3 s instead of 4
    assert [part.ratio for part in found] == pytest.approx([10 / 6, 2.0, 0.75, 1.375])
    steady = found[1]  # both turns say the same
    assert (steady.low, steady.high) == (2.0, 2.0)
    # two turns, with ratios of 0.5 and 1: Student's t of one degree of freedom says next to nothing
    margin = 12.706 * math.log(2) / 2**0.5 / 2**0.5
    assert (found[2].low, found[2].high) == pytest.approx((0.75 * math.exp(-margin), 0.75 * math.exp(margin)))


def test_only_turns_of_every_mode_count() -> None:
    own, stock = _lane("moeedge", 1, 1, 1, 1), _lane("stock-ar", 2, 2, 4, 4)
    (part,) = over_best_stock(own, [stock[:2]])
    assert (part.ratio, part.n_turns) == (2.0, 2)
    assert over_best_stock(own[:1], [stock])[0].low is None  # a single turn has no interval
    assert over_best_stock(own, []) == over_best_stock([], [stock]) == ()
    empty = [replace(sample, decode_tokens=0) for sample in stock]
    assert over_best_stock(own, [empty]) == ()


def test_modes_with_draft_lengths() -> None:
    modes = parse_modes("stock-ar,stock-sd:2-4,stock-sd:3,moeedge:auto,moeedge,moeedge-ar")
    assert [(mode.name, mode.gamma, mode.has_own_cache) for mode in modes] == [
        ("stock-ar", None, False), ("stock-sd", 2, False), ("stock-sd", 3, False), ("stock-sd", 4, False),
        ("moeedge", "auto", True), ("moeedge", None, True), ("moeedge-ar", None, False),
    ]  # fmt: skip
    assert len({mode.label for mode in modes}) == len(modes)


def test_modes_with_other_drafts() -> None:
    modes = parse_modes("stock-ngram:4,stock-sd:2-3/p0.75,stock-sd:3")
    assert [mode.label for mode in modes] == [
        "stock-ngram gamma 4", "stock-sd gamma 2 p-min 0.75", "stock-sd gamma 3 p-min 0.75", "stock-sd gamma 3"
    ]  # fmt: skip
    base = EngineConfig(model=Path("t.gguf"), draft=Path("d.gguf"), draft_p_min=0.25)
    configs = [mode_config(base, mode) for mode in modes]
    assert [(config.draft, config.gamma, config.draft_p_min) for config in configs] == [
        ("ngram", 4, 0.25), (Path("d.gguf"), 2, 0.75), (Path("d.gguf"), 3, 0.75), (Path("d.gguf"), 3, 0.25)
    ]  # fmt: skip
    kept, notes = applicable_modes(modes, has_draft=False)
    assert [(mode.label, mode.drafts) for mode in kept] == [("stock-ngram gamma 4", True)] and len(notes) == 3
    with pytest.raises(InputError, match="p-min"):
        Sweep(counts=(2,)).modes(modes)


@pytest.mark.parametrize(
    "element",
    [
        *("stock-ar:2", "stock-sd:", "stock-sd:0", "stock-sd:4-2", "stock-sd:99", "moeedge:x"),
        *("stock-sd:4/0.5", "stock-sd:4/p2", "stock-sd:4/p", "stock-sd/p0.5", "stock-ar:4/p0.5", "stock-ngram:4/p0.5"),
    ],
)
def test_draft_lengths_that_no_mode_has(element: str) -> None:
    with pytest.raises(InputError):
        parse_modes(element)


def test_several_sets_are_one_whose_categories_are_the_sets(tmp_path: Path) -> None:
    first, other = write_conversations(tmp_path, n=2), tmp_path / "other.jsonl"
    other.write_text(first.path.read_text(encoding="utf-8"), encoding="utf-8")
    joined = load_datasets(f"{first.path}, {other}")
    assert joined.name == "talk,other"
    assert [prompt.id for prompt in joined.prompts] == ["talk/two-turns", "talk/code", "other/two-turns", "other/code"]
    assert [prompt.category for prompt in joined.limited(1).prompts] == ["talk", "other"]
    assert joined.sha256 == f"{first.sha256},{first.sha256}"
    assert load_datasets(str(first.path)) == first
    for names in ("", " ,", f"{first.path},{first.path}"):
        with pytest.raises(DatasetError):
            load_datasets(names)


def test_a_run_compares_with_stock_at_its_best(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    path = write_conversations(tmp_path, n=len(CONVERSATIONS)).path
    other = tmp_path / "other.jsonl"
    other.write_text(path.read_text(encoding="utf-8"), encoding="utf-8")
    modes = "stock-ar,stock-sd:1,moeedge:auto,moeedge-ar"
    dataset = load_datasets(f"{path},{other}").limited(1)
    rows, _ = run(make_plan(tiny_moe, tiny_draft, modes=modes, dataset=dataset, repetitions=1))
    assert [row.setup.gamma for row in rows] == [0, 1, 16, 0]
    assert [len(row.best_stock) for row in rows] == [0, 0, 4, 4]
    record = as_dict(rows[2])
    speeds = {row.figures.mode.label: row.tg.mean for row in rows if row.figures is not None and row.tg is not None}
    best = max((label for label in speeds if label.startswith("stock")), key=lambda label: speeds[label])
    assert record["best_stock"] == best
    assert record["ratio_best_stock"] == pytest.approx(speeds["moeedge gamma auto"] / speeds[best])
    assert [part["category"] for part in record["best_stock_by_category"]] == ["talk", "other", MEAN]
    assert "| mean of categories |" in render(rows, "md")


def test_a_run_takes_all_of_stocks_drafts(tmp_path: Path, tiny_moe: Path, tiny_draft: Path) -> None:
    modes = "stock-ar,stock-ngram:4,stock-sd:4,stock-sd:4/p0.9,moeedge:2"
    dataset = write_conversations(tmp_path, n=1)
    rows, _ = run(make_plan(tiny_moe, tiny_draft, modes=modes, dataset=dataset, repetitions=1))
    assert [(row.setup.draft, row.setup.draft_p_min) for row in rows] == [
        ("none", 0), ("ngram", 0), (tiny_draft.name, 0), (tiny_draft.name, 0.9), (tiny_draft.name, 0)
    ]  # fmt: skip
    full, ended = (sum(sample.drafted for sample in row.samples) for row in rows[2:4])
    assert ended < full
    assert all(row.output is None or row.output.passed for row in rows)
    labels = [row.label for row in rows]
    assert labels[:4] == ["stock-ar", "stock-ngram gamma 4", "stock-sd gamma 4", "stock-sd gamma 4 p-min 0.9"]
    speeds = {row.label: row.tg.mean for row in rows[:4] if row.tg is not None}
    assert rows[4].fastest_stock == max(speeds, key=lambda label: speeds[label])


def test_one_stock_mode_is_not_stock_at_its_best(tmp_path: Path, tiny_moe: Path) -> None:
    rows, _ = run(make_plan(tiny_moe, None, modes="stock-ar,moeedge-ar", dataset=write_conversations(tmp_path)))
    assert all(row.best_stock == () for row in rows)
    assert as_dict(rows[-1])["ratio_best_stock"] is None
