"""Figures from samples, against values computed by hand."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest

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
    quotient,
    speed,
    spread,
)
from moeedge.engine.types import GenerationStats
from moeedge.policies.base import LookaheadStatus
from moeedge.records import as_dict, combine
from moeedge.scheduler.stats import PlacementStats

_BEGIN = PlacementStats(
    policy="spac", cache_ratio=0.17, slots_total=8, pool_bytes=1024, steps=3, pairs=100, pairs_hit=10
)
_END = replace(_BEGIN, slots_used=8, steps=5, pairs=300, pairs_hit=110, unique=40, unique_hit=10, bytes_moved=4096)


def _sample(mode: str, prompt: str, repetition: int, *, tokens: int = 10, seconds: float = 1.0) -> Sample:
    return Sample(
        mode, prompt, 0, repetition, 0,
        prefill_tokens=2 * tokens, prefill_s=seconds, decode_tokens=tokens, decode_s=seconds,
    )  # fmt: skip


def test_mean_deviation_and_median() -> None:
    several = spread([10.0, 20.0, 60.0])
    assert several is not None
    assert (several.mean, several.median, several.values) == (30.0, 20.0, (10.0, 20.0, 60.0))
    assert several.stddev == pytest.approx(26.457513)
    single = spread([7.0])
    assert single is not None
    assert single.stddev is None
    assert spread([]) is None


def test_speed_is_all_tokens_over_all_seconds_of_a_repetition() -> None:
    samples = [
        _sample("m", "a", 0, tokens=10, seconds=1.0),
        _sample("m", "b", 0, tokens=30, seconds=1.0),
        _sample("m", "a", 1, tokens=10, seconds=4.0),
        _sample("m", "b", 1, tokens=0, seconds=0.0),  # stopped at once
    ]
    decoding, prefill = speed(samples, "decode"), speed(samples, "prefill")
    assert decoding is not None
    assert prefill is not None
    assert decoding.values == (20.0, 2.5)
    assert prefill.values == (40.0, 5.0)


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
    assert common_samples([done[0]], ["x", "y"]) == []


def test_a_stop_token_was_decoded_too() -> None:
    stats = GenerationStats(generated_tokens=5, decode_s=1.0)
    where = {"mode": "m", "prompt": "a", "turn": 0, "repetition": 0, "order": 0}
    assert from_stats(stats, stop_reason="length", **where).decode_tokens == 4
    assert from_stats(stats, stop_reason="eos", **where).decode_tokens == 5
    empty = from_stats(GenerationStats(), stop_reason="eos", **where)
    assert (empty.decode_tokens, empty.tg_ts, empty.pp_ts) == (0, None, None)


def test_quotient() -> None:
    assert quotient(3, 4) == 0.75
    assert quotient(3, 0) is None


def test_a_sample_keeps_the_difference() -> None:
    counters = counted(_BEGIN, _END)
    assert counters is not None
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


def test_a_ratio_next_to_other_programs_is_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
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
