"""Layer profiles: consistent with the trace, with hand-made routing, and with published replays of real routing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from moeedge.analysis.model_profile import layer_report, run_facts
from moeedge.analysis.profile import LayerProfile, profile_layers
from moeedge.engine.recording import Recording
from moeedge.lab.traces.importers import read_trace
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import RejectedTokenModel, simulated_steps
from tests.support.traces import make_trace, plain_text, two_texts


def test_profile_of_a_speculative_trace() -> None:
    profile = profile_layers(two_texts(weights=True), [1])[0]
    assert (profile.layer, profile.steps, profile.tokens, profile.speculative) == (1, 6, 10, True)
    assert profile.counts.shape == (6, 8)
    assert profile.counts.sum() == profile.step_tokens.sum() * 2
    assert {(score.sensor, score.predicts) for score in profile.scores} == {
        ("sd", "step"),
        ("ar", "step"),
        ("ar", "token"),
    }
    assert profile.sd_accuracy is not None and profile.ar_accuracy is not None
    assert profile.curves.unique[1] == 2.0 and profile.curves.unique[16] is None
    assert sum(hot.activations for hot in profile.hottest) == 20
    assert [hot.share for hot in profile.hottest] == sorted((hot.share for hot in profile.hottest), reverse=True)
    assert all(hot.mean_weight is not None for hot in profile.hottest)


def test_curve_averages_to_the_accuracy() -> None:
    profile = profile_layers(two_texts(), [0])[0]
    assert np.isnan(profile.accuracy_curve[profile.is_first]).all()
    assert np.nanmean(profile.accuracy_curve) == pytest.approx(profile.sd_accuracy)


def test_always_cold_is_judged_by_the_same_steps() -> None:
    trace = two_texts()
    profile = profile_layers(trace, [0])[0]
    assert profile.step_cold_share == pytest.approx((profile.counts[[1, 2, 4, 5]] == 0).mean())
    one_step = make_trace([(Phase.VERIFY, 0, 1, True)] * 3)
    assert profile_layers(one_step, [0])[0].step_cold_share is None


def test_without_speculation_there_is_no_sd() -> None:
    profile = profile_layers(plain_text(40), [0])[0]
    assert not profile.speculative
    assert profile.sd_accuracy is None
    assert profile.ar_accuracy == profile.score("alg1-printed", "ar", "token").accuracy  # type: ignore[union-attr]
    assert {score.sensor for score in profile.scores} == {"ar"}
    # k of N are hot: the last token's experts are wrong wherever it differs from the next one's
    overlap = profile.curves.overlap[1]
    assert overlap is not None
    assert profile.ar_accuracy == pytest.approx(1 - 2 * 2 * (1 - overlap) / 8)


def test_constant_routing_is_predicted() -> None:
    trace = two_texts()
    trace.ids[:] = np.array([3, 5], dtype=np.uint8)
    profile = profile_layers(trace, [0])[0]
    assert profile.curves.overlap[1] == 1.0 and profile.curves.unique[4] == 2.0
    assert profile.score("last-step", "sd", "step").accuracy == 1.0  # type: ignore[union-attr]
    assert profile.ar_accuracy == 1.0
    assert [hot.expert for hot in profile.hottest] == [3, 5]


def test_profiles_do_not_depend_on_their_neighbours() -> None:
    """Layers are replayed in groups; with the same result as alone."""
    trace = two_texts(n_layers=20)
    together = profile_layers(trace, list(range(20)))
    for layer in (0, 15, 16, 19):
        alone = profile_layers(trace, [layer])[0]
        assert alone.scores == together[layer].scores and alone.hottest == together[layer].hottest
        np.testing.assert_array_equal(alone.counts, together[layer].counts)


@pytest.mark.parametrize("rows", [[], [(Phase.PREFILL, 0, 0, True)] * 3])
def test_profile_of_a_trace_without_steps(rows: list[tuple[int, int, int, bool]]) -> None:
    profile = profile_layers(make_trace(rows), [0])[0]
    assert (
        profile.steps == 0
        and profile.curves.overlap[1] is None
        and profile.sd_accuracy is None
        and profile.hottest == []
    )


def test_layer_without_experts() -> None:
    trace = two_texts()
    trace.ids[:, 0] = trace.sentinel
    profile = profile_layers(trace, [0])[0]
    assert profile.tokens == 0 and profile.curves.overlap[1] is None and profile.hottest == []


def test_report_is_json_with_the_documented_keys() -> None:
    trace = two_texts(weights=True, parameters={"dataset": "sample", "seed": 1})
    profile = profile_layers(trace, [1])[0]
    recording = Recording(trace, answers=2, drafted=10, accepted=4, skipped=[])
    report = layer_report(profile, run_facts(trace, recording))
    decoded = json.loads(json.dumps(report, allow_nan=False))
    assert decoded["layer"] == 1 and decoded["steps"] == 6 and decoded["dataset"] == "sample"
    assert decoded["acceptance_rate"] == 0.4
    assert set(decoded["unique_experts"]) == {"empirical", "uniform", "independence"}
    for by_batch in decoded["unique_experts"].values():
        assert list(by_batch) == [str(n_tokens) for n_tokens in range(1, 65)]
    assert {"sd", "ar", "always_cold", "ar_next_token", "always_cold_next_token"} < set(decoded["hot_cold_accuracy"])
    assert np.array(decoded["activation_counts"]["per_step"]).shape == (6, 8)
    assert decoded["activation_counts"]["total"] == np.array(decoded["activation_counts"]["per_step"]).sum(0).tolist()


def _first_texts(trace: Trace, n_texts: int) -> Trace:
    n_rows = int((trace.sequence < n_texts).sum())
    names = ("ids", "phase", "sequence", "step", "accepted", "token", "position")
    return dataclasses.replace(trace, **{name: getattr(trace, name)[:n_rows] for name in names})


def _mean(profiles: list[LayerProfile], name: str) -> float:
    scores = [profile.score(name, "sd", "step") for profile in profiles]
    return float(np.mean([score.accuracy for score in scores if score is not None and score.accuracy is not None]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "published"),
    [
        (
            "optimistic",
            {"alg1-printed": 0.76, "alg1-float": 0.69, "alg1-fixed": 0.61, "last-step": 0.88, "count-ema": 0.84},
        ),
        (
            "pessimistic",
            {"alg1-printed": 0.72, "alg1-float": 0.69, "alg1-fixed": 0.61, "last-step": 0.77, "count-ema": 0.80},
        ),
    ],
)
def test_replay_of_gpt_oss_20b(data_folder: Path, model: RejectedTokenModel, published: dict[str, float]) -> None:
    """gamma 8, acceptance 0.8, tau 1: the figures that the data set's description gives for 60 sequences; here 25."""
    file = data_folder / "traces" / "gptoss20b_decode.npz"
    if not file.is_file():
        pytest.skip(f"{file} is absent")
    trace = _first_texts(read_trace(file), 25)
    steps = simulated_steps(
        trace, gamma=8, acceptance_chance=0.8, rejected_token_model=model, rng=np.random.default_rng(0)
    )
    profiles = profile_layers(trace, list(range(24)), steps=steps, gamma=8)
    for name, accuracy in published.items():
        assert _mean(profiles, name) == pytest.approx(accuracy, abs=0.04), name
    # the speculative sensor predicts the next step better than the one that sees single tokens, and better than "cold"
    ar = np.mean([profile.ar_accuracy for profile in profiles if profile.ar_accuracy is not None])
    cold = np.mean([profile.step_cold_share for profile in profiles if profile.step_cold_share is not None])
    assert _mean(profiles, "alg1-printed") > ar + 0.04 and ar > cold
