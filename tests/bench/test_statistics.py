"""Numbers from samples, against values worked out by hand."""

from __future__ import annotations

import pytest

from moeedge.bench.samples import (
    Sample,
    common_samples,
    from_stats,
    paired_ratio,
    quotient,
    speed,
    spread,
)
from moeedge.engine.types import GenerationStats


def _sample(mode: str, prompt: str, repetition: int, *, tokens: int = 10, seconds: float = 1.0) -> Sample:
    return Sample(
        mode, prompt, 0, repetition, 0,
        prefill_tokens=2 * tokens, prefill_s=seconds, decode_tokens=tokens, decode_s=seconds,
    )  # fmt: skip


def test_spread() -> None:
    several = spread([10.0, 20.0, 60.0])
    assert several is not None
    assert (several.mean, several.median, several.values) == (30.0, 20.0, (10.0, 20.0, 60.0))
    assert several.stddev == pytest.approx(26.457513)
    single = spread([7.0])
    assert single is not None
    assert single.stddev == 0.0
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
    # the machine was four times slower in repetition 1: pairs do not see it, means would
    reference = [_sample("r", p, i, seconds=s) for i, s in enumerate((1.0, 4.0)) for p in "ab"]
    ours = [_sample("m", p, i, seconds=s / 2) for i, s in enumerate((1.0, 4.0)) for p in "ab"]
    assert paired_ratio(ours, reference, lambda s: s.tg_ts) == 2.0
    disturbed = [*ours[:3], _sample("m", "b", 1, seconds=400.0)]
    assert paired_ratio(disturbed, reference, lambda s: s.tg_ts) == 2.0
    assert paired_ratio(ours, [], lambda s: s.tg_ts) is None
    assert paired_ratio([_sample("m", "a", 0, tokens=0)], reference, lambda s: s.tg_ts) is None


def test_an_interrupted_run_keeps_the_work_that_every_mode_did() -> None:
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
