"""Figures from samples and speed over the fastest stock mode: by hand, in a run on a tiny pair, and as a table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.bench.config import Sweep, applicable_modes, mode_config, parse_modes
from moeedge.bench.figures import ALL, MEAN, interval_around, over_best_stock
from moeedge.bench.samples import (
    COUNTERS,
    CacheFigures,
    Sample,
    cache_figures,
    common_samples,
    counted,
    disturbance,
    from_stats,
    paired_ratio,
    speed,
)
from moeedge.data.datasets import load_datasets
from moeedge.engine.types import EngineConfig, GenerationStats
from moeedge.errors import DatasetError, InputError
from moeedge.policies.base import LookaheadStatus
from moeedge.records import as_dict, combine
from moeedge.scheduler.stats import PlacementStats
from moeedge.ui.bench_views import render
from tests.bench.recording import CONVERSATIONS, make_plan, run, write_conversations
from tests.support.machine import Here

_BEGIN = PlacementStats(
    policy="spac", cache_ratio=0.17, slots_total=8, pool_bytes=1024, steps=3, pairs=100, pairs_hit=10
)
_END = replace(_BEGIN, slots_used=8, steps=5, pairs=300, pairs_hit=110, unique=40, unique_hit=10, bytes_moved=4096)


def _sample(mode: str, prompt: str, repetition: int, *, tokens: int = 10, seconds: float = 1.0) -> Sample:
    return Sample(
        mode, prompt, 0, repetition, 0,
        prefill_tokens=2 * tokens, prefill_s=seconds, decode_tokens=tokens, decode_s=seconds,
    )  # fmt: skip


def test_speed_is_all_tokens_over_all_seconds_of_a_repetition() -> None:
    samples = [
        _sample("m", "a", 0, tokens=10, seconds=1.0),
        _sample("m", "b", 0, tokens=30, seconds=1.0),
        _sample("m", "a", 1, tokens=10, seconds=4.0),
        _sample("m", "b", 1, tokens=0, seconds=0.0),  # stopped at once
    ]
    decoding, prefill = speed(samples, "decode"), speed(samples, "prefill")
    assert decoding.values == (20.0, 2.5)
    assert prefill.values == (40.0, 5.0)
    assert (decoding.mean, decoding.median, decoding.stddev) == (11.25, 11.25, pytest.approx(12.374, abs=1e-3))
    single = speed(samples[:2], "decode")
    assert single is not None and single.stddev is None
    assert speed([], "decode") is None


def test_ratios_pair_the_same_work_and_take_the_median() -> None:
    # the machine was four times slower in repetition 1, which pairs cancel and means would not
    reference = [_sample("r", p, i, seconds=s) for i, s in enumerate((1.0, 4.0)) for p in "ab"]
    ours = [_sample("m", p, i, seconds=s / 2) for i, s in enumerate((1.0, 4.0)) for p in "ab"]
    assert paired_ratio(ours, reference, lambda s: s.tg_ts) == 2.0
    disturbed = [*ours[:3], _sample("m", "b", 1, seconds=400.0)]
    assert paired_ratio(disturbed, reference, lambda s: s.tg_ts) == 2.0
    assert paired_ratio(ours, [], lambda s: s.tg_ts) is None
    assert paired_ratio([_sample("m", "a", 0, tokens=0)], reference, lambda s: s.tg_ts) is None


def test_an_interrupted_run_keeps_the_work_of_all_modes() -> None:
    done = [_sample(mode, prompt, 0) for prompt in "ab" for mode in ("x", "y")]
    cut = [_sample("x", "a", 1), _sample("y", "a", 1), _sample("x", "b", 1)]
    assert {s.key for s in common_samples([*done, *cut], ["x", "y"], expected=2)} == {("a", 0, 0), ("b", 0, 0)}
    first = common_samples([*done[:2], done[2]], ["x", "y"], expected=2)  # no repetition was finished
    assert {(s.mode, s.prompt) for s in first} == {("x", "a"), ("y", "a")}
    assert common_samples([done[0]], ["x", "y"], expected=2) == []


def test_a_stop_token_was_decoded_too() -> None:
    stats = GenerationStats(generated_tokens=5, decode_s=1.0)
    where = {"mode": "m", "prompt": "a", "turn": 0, "repetition": 0, "order": 0}
    assert from_stats(stats, stop_reason="length", **where).decode_tokens == 4
    assert from_stats(stats, stop_reason="eos", **where).decode_tokens == 5
    empty = from_stats(GenerationStats(), stop_reason="eos", **where)
    assert (empty.decode_tokens, empty.tg_ts, empty.pp_ts) == (0, None, None)


def test_a_sample_keeps_the_difference() -> None:
    counters = counted(_BEGIN, _END)
    assert set(counters) == set(COUNTERS)
    assert (counters["steps"], counters["pairs"], counters["pairs_hit"], counters["uploads"]) == (2, 200, 100, 0)
    assert counted(None, None) is None


def test_rates_are_those_of_the_sums() -> None:
    nothing = dict.fromkeys(COUNTERS, 0)
    small = nothing | {"steps": 1, "pairs": 10, "pairs_hit": 10, "unique": 4, "unique_hit": 4, "uploads": 8}
    large = nothing | {"steps": 3, "pairs": 90, "pairs_hit": 0, "unique": 12, "unique_hit": 0, "bytes_moved": 100}
    samples = [replace(_sample("m", "a", 0), placement=each) for each in (small, None, large)]
    figures = cache_figures(combine(samples).placement, 4)
    assert figures == CacheFigures(
        hit_rate_pairs=0.1, hit_rate_experts=0.25, uploads_per_layer_step=0.5, bytes_moved=100
    )  # the mean of the rates would be 0.5
    assert cache_figures(None, 4) == CacheFigures()
    idle = cache_figures(nothing, 4)
    assert (idle.hit_rate_pairs, idle.uploads_per_layer_step, idle.bytes_moved) == (None, None, 0)


def test_a_drain_counts_in_its_own_speed_only() -> None:
    sample = replace(_sample("m", "a", 0, tokens=10, seconds=1.0), drain_s=0.25)
    assert (sample.tg_ts, sample.rate_ts("decode", drained=True)) == (10.0, 8.0)
    assert _sample("m", "a", 0, tokens=0).rate_ts("decode", drained=True) is None


def test_the_newest_judgement_of_lookahead_is_a_gauge() -> None:
    status = LookaheadStatus(used=False, gain=0.01, reason="it does not pay here")
    interval = replace(_END, lookahead=status) - _BEGIN
    assert interval.lookahead is status
    assert as_dict(interval)["lookahead"] == {
        "used": False, "gain": 0.01, "reason": "it does not pay here", "reads_drafts": True,
    }  # fmt: skip


def _answers(mode: str, speeds: Sequence[float], others: float = 0.0) -> list[Sample]:
    """A second of decoding per repetition at these speeds, while other programs use `others` processors."""
    return [
        Sample(mode, "a", 0, repetition, 0, decode_tokens=int(ts), decode_s=1.0, others_s=others)
        for repetition, ts in enumerate(speeds)
    ]


def test_a_ratio_next_to_other_programs_is_disturbed(here: Here) -> None:
    here.set_cores(4, 4)
    quiet, busy = _answers("moeedge", [100.0]), _answers("moeedge", [100.0], others=0.5)
    assert disturbance(quiet, quiet, 4) is None
    assert disturbance(busy, quiet, 4) == disturbance(quiet, busy, 4) == "load"
    assert disturbance(busy, busy, 3) is None  # a core is free
    assert disturbance(busy, [], 4) is None  # without a reference there is no ratio
    short = [replace(sample, others_s=other_s) for sample, other_s in zip(quiet * 2, (0.4, -0.4), strict=True)]
    assert disturbance(short, quiet, 4) is None  # the clock's ticks cancel


def test_a_ratio_that_scatters_is_disturbed() -> None:
    steady = _answers("stock-ar", [100.0, 100.0])
    assert disturbance(_answers("moeedge", [120.0, 170.0]), steady, 1) is None
    assert disturbance(_answers("moeedge", [120.0, 200.0]), steady, 1) == "scatter"
    assert disturbance(_answers("moeedge", [120.0, 240.0]), _answers("stock-ar", [100.0, 200.0]), 1) is None
    assert disturbance(_answers("moeedge", [4407.0]), steady[:1], 1) is None  # one repetition cannot scatter


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
    margin *= 0.75 / (2.0 + 0.75)  # its share of the mean
    assert (found[3].low, found[3].high) == pytest.approx((1.375 * math.exp(-margin), 1.375 * math.exp(margin)))


def test_the_interval_of_more_ratios_than_the_table_has_is_that_of_its_last_entry() -> None:
    ratios = np.array([1.0, 2.0] * 4)
    margin = 2.776 * float(np.log(ratios).std(ddof=1)) / 8**0.5
    assert interval_around(1.5, ratios) == pytest.approx((1.5 * math.exp(-margin), 1.5 * math.exp(margin)))


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
    assert [(mode.label, mode.drafts) for mode in kept] == [("stock-ngram gamma 4", True)] and len(notes) == 1
    with pytest.raises(InputError, match="p-min"):
        Sweep(counts=(2,)).modes(modes)


@pytest.mark.parametrize(
    "element",
    [
        *("stock-ar:2", "stock-sd:", "stock-sd:0", "stock-sd:4-2", "stock-sd:99", "moeedge:x"),
        *("stock-sd:4/0.5", "stock-sd:4/p2", "stock-sd:4/p", "stock-sd/p0.5", "stock-ar:4/p0.5", "stock-ngram:4/p0.5"),
        *("stock-ar,stock", " ,"),
    ],
)
def test_modes_and_draft_lengths_that_do_not_exist(element: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_modes(element)
    assert "stock" in caught.value.hint or "moeedge" in caught.value.hint


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
    modes = "stock-ar,stock-ngram:4,stock-sd:4,stock-sd:4/p0.9,moeedge:auto,moeedge-ar"
    dataset = load_datasets(f"{path},{other}").limited(1)
    rows, _ = run(make_plan(tiny_moe, tiny_draft, modes=modes, dataset=dataset, repetitions=1))
    assert [(row.setup.draft, row.setup.gamma, row.setup.draft_p_min) for row in rows] == [
        ("none", 0, 0), ("ngram", 4, 0), (tiny_draft.name, 4, 0), (tiny_draft.name, 4, 0.9), (tiny_draft.name, 16, 0),
        ("none", 0, 0),
    ]  # fmt: skip
    full, ended = (sum(sample.drafted for sample in row.samples) for row in rows[2:4])
    assert ended < full
    assert all(row.output is None or row.output.passed for row in rows)
    assert [len(row.best_stock) for row in rows] == [0, 0, 0, 0, 4, 4]
    record = as_dict(rows[4])
    speeds = {row.figures.mode.label: row.tg.mean for row in rows if row.figures is not None and row.tg is not None}
    best = max((label for label in speeds if label.startswith("stock")), key=lambda label: speeds[label])
    assert record["best_stock"] == best
    assert record["ratio_best_stock"] == pytest.approx(speeds["moeedge gamma auto"] / speeds[best])
    assert [part["category"] for part in record["best_stock_by_category"]] == ["talk", "other", MEAN]
    assert "| mean of categories |" in render(rows, "md")
