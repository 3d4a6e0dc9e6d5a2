"""Profiles of layers and models: against loops, published replays, the command's JSON; their pictures and pages."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.analysis import predictors
from moeedge.analysis.predictors import Predictor, replay_scores, utility_curves
from moeedge.analysis.profile import (
    GAMMAS,
    HEADLINE,
    LayerProfile,
    complete_report,
    layer_curves,
    layer_report,
    model_report,
    profile_layers,
    profile_model,
    run_facts,
)
from moeedge.analysis.routing_curves import mean_curves, persistence
from moeedge.errors import InputError
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import texts_of
from moeedge.native.abi import Phase
from moeedge.run import Run
from moeedge.trace.format import Trace
from moeedge.trace.steps import (
    RejectedTokenModel,
    Steps,
    activation_counts,
    drafts_of,
    recorded_steps,
    simulated_steps,
    text_steps,
)
from moeedge.ui.console import check_picture
from moeedge.ui.profile_plots import plot_profiles, profile_plots
from tests.support.commands import run_json
from tests.support.progress import SeenProgress
from tests.support.traces import make_trace, plain_text, published_trace, two_texts


def sticky_trace(*, gamma: int = 3, gaps: bool = False) -> Trace:
    """Texts whose tokens keep most experts of the token before, with drafts of which some are rejected.

    gaps: some tokens of some layers are not recorded.
    """
    rng = np.random.default_rng(3)
    rows = []
    for sequence, n_steps in enumerate((24, 9, 1, 12)):
        rows += [(Phase.PREFILL, sequence, 0, True)] * 5
        for step in range(1, n_steps + 1):
            n_text = int(rng.integers(1, gamma + 2)) if gamma else 1
            phase = Phase.VERIFY if gamma else Phase.DECODE
            rows += [(phase, sequence, step, place < n_text) for place in range(gamma + 1)]
    kinds = [("a", "code"), ("b", "math"), ("a", "math"), ("b", "code")]
    texts = [{"id": str(i), "dataset": dataset, "category": name} for i, (dataset, name) in enumerate(kinds)]
    parameters = {"texts": [text | {"language": "en"} for text in texts], "prompts": 4}
    trace = make_trace(rows, n_experts=12, n_used=3, gamma=gamma, seed=3, weights=True, parameters=parameters)
    for row in range(1, len(rows)):
        kept = rng.random(trace.meta.n_layers) < 0.6
        trace.ids[row, kept] = trace.ids[row - 1, kept]
    if gaps:
        trace.ids[rng.random(trace.ids.shape[:2]) < 0.1] = trace.sentinel
    return trace


def rates(
    predictor: Predictor, reads: Sequence[Sequence[np.ndarray]], truth: np.ndarray, first: np.ndarray
) -> tuple[list[float], float]:
    """Share of right predictions in each step, NaN in the first of a text; balanced accuracy over the others."""
    state, by_step, hot, cold = None, list[float](), list[bool](), list[bool]()
    for begins, read, used in zip(first, reads, truth > 0, strict=True):
        state = predictor.start(used.shape) if begins else state
        predicted = predictor.score(state) >= predictor.threshold
        by_step.append(np.nan if begins else float((predicted == used).mean()))
        if not begins:
            hot += predicted[used].tolist()
            cold += (~predicted[~used]).tolist()
        for counts in read:
            state = predictor.observe(state, counts)
    return by_step, (statistics.fmean(hot) + statistics.fmean(cold)) / 2


@pytest.mark.parametrize(("gamma", "gaps"), [(0, False), (3, False), (3, True)])
def test_figures_of_a_layer_against_loops(gamma: int, gaps: bool) -> None:
    trace = sticky_trace(gamma=gamma, gaps=gaps)
    profile = profile_layers(trace, [1])[0]
    steps, text, rows = recorded_steps(trace), text_steps(trace), trace.text_rows()
    counts, tokens = (activation_counts(trace, each, [1]) for each in (steps, text))
    first, first_token, p = steps.is_first(), text.is_first(), profile.curves.popularity
    assert (profile.layer, profile.steps, profile.speculative) == (1, len(steps), gamma > 0)
    np.testing.assert_array_equal(profile.counts, counts[:, 0])
    np.testing.assert_array_equal(profile.step_tokens, steps.n_tokens)
    np.testing.assert_array_equal(profile.token_ids, trace.layer_ids(1)[rows])
    assert profile.step_cold_share == pytest.approx((counts[~first] == 0).mean())
    assert profile.token_cold_share == pytest.approx(1 - p.mean())
    assert profile.unique_per_step == pytest.approx(np.mean([np.count_nonzero(step) for step in counts]))
    assert profile.persistence_sd == (persistence(counts[:, 0], first) if gamma else None)
    assert profile.persistence_ar == persistence(tokens[:, 0], first_token)

    hottest = sorted(range(12), key=lambda expert: -p[expert])[:10]
    assert [hot.expert for hot in profile.hottest] == hottest
    assert trace.weights is not None
    for hot in profile.hottest:
        weights = trace.weights[rows, 1][trace.layer_ids(1)[rows] == hot.expert].tolist()
        assert (hot.activations, hot.share) == (len(weights), p[hot.expert])
        assert hot.mean_weight == pytest.approx(statistics.fmean(weights))

    runs: dict[tuple[str, str], tuple[Any, ...]] = {
        ("ar", "token"): (predictors.single_token_predictors(1.0), [[each] for each in tokens], tokens, first_token)
    }
    utility = []
    if gamma:
        by_step = predictors.speculative_predictors(gamma)
        by_token = predictors.single_token_predictors(float(steps.n_tokens.mean()))
        runs["sd", "step"] = (by_step, [[each] for each in counts], counts, first)
        runs["ar", "step"] = (by_token, np.split(tokens, np.cumsum(steps.n_text))[: len(steps)], counts, first)
        for name in ("alg1-printed", "alg1-float"):
            scores = replay_scores(counts, first, by_step[name])[:, 0]
            utility.append(utility_curves(name, scores, counts[:, 0], first, 3))
    assert profile.utility == utility
    assert {(score.sensor, score.predicts) for score in profile.scores} == set(runs)
    assert len(profile.scores) == sum(len(run[0]) for run in runs.values())
    for score in profile.scores:
        by_name, *replayed = runs[score.sensor, score.predicts]
        right, balanced = rates(by_name[score.predictor], *replayed)
        assert (score.accuracy, score.balanced_accuracy) == pytest.approx((np.nanmean(right), balanced))
        if score is profile.scores[0]:
            np.testing.assert_allclose(profile.accuracy_curve, right)
            known = [[each for each in right[max(i - 15, 0) : i + 1] if each == each] for i in range(len(right))]
            smoothed = [statistics.fmean(each) if each else np.nan for each in known]
            np.testing.assert_allclose(profile.smoothed_accuracy, smoothed)
    of_alg1 = {(each.sensor, each.predicts): each.accuracy for each in profile.scores if each.predictor == HEADLINE}
    next_token = of_alg1["ar", "token"]
    assert next_token is not None and profile.next_token_accuracy == next_token
    assert profile.sd_accuracy == of_alg1.get(("sd", "step"))
    assert profile.ar_accuracy == of_alg1.get(("ar", "step"), next_token)


def test_profiles_do_not_depend_on_their_neighbours() -> None:
    """Layers are replayed in groups; with the same result as alone."""
    trace = two_texts(n_layers=20)
    together = profile_layers(trace, list(range(20)))
    for layer in (0, 15, 16, 19):
        alone = profile_layers(trace, [layer])[0]
        assert alone.scores == together[layer].scores and alone.hottest == together[layer].hottest
        np.testing.assert_array_equal(alone.counts, together[layer].counts)


def test_traces_without_steps_and_layers_without_experts() -> None:
    bare = two_texts()
    bare.ids[:, 0] = bare.sentinel
    for trace in (make_trace([]), make_trace([(Phase.PREFILL, 0, 0, True)] * 3), bare):
        profile = profile_layers(trace, [0])[0]
        assert (profile.steps, profile.tokens) == (6 if trace is bare else 0, 0)
        assert profile.curves.overlap[1] is None and profile.hottest == []
        assert trace is bare or profile.sd_accuracy is None
    one_step = make_trace([(Phase.VERIFY, 0, 1, True)] * 3)
    assert profile_layers(one_step, [0])[0].step_cold_share is None  # the first of a text is not judged
    prompt_only = profile_model(make_trace([(Phase.PREFILL, 0, 0, True)] * 3), [0])
    assert prompt_only.mean is None and prompt_only.gain is None and prompt_only.groups == []
    assert [curves.layer for curves in profile_model(bare, [1]).curves] == [1]


def test_figures_of_a_model_against_loops() -> None:
    """The gain of speculation from the mean of its layers, and the kinds of text that it has several of."""
    trace = sticky_trace()
    profile, steps, texts = profile_model(trace, [0]), recorded_steps(trace), trace.meta.parameters["texts"]
    curves = [layer_curves(trace, layer, trace.text_rows()) for layer in (0, 1)]
    mean, gain, drafts = mean_curves(curves), profile.gain, profile.drafts
    assert [each.layer for each in profile.curves] == [0, 1] and [each.layer for each in profile.layers] == [0]
    assert mean is not None and gain is not None and drafts is not None and drafts == drafts_of(steps)
    assert profile.mean is not None and profile.mean.unique == mean.unique
    assert (gain.acceptance, gain.measured) == (drafts.acceptance_chance, True)
    alpha = gain.acceptance
    assert gain.omega == pytest.approx([(1 - alpha ** (gamma + 1)) / (1 - alpha) for gamma in GAMMAS])
    for found, unique in (
        (gain.a_over_b, mean.unique),
        (gain.a_over_b_independence, mean.unique_independence),
        (gain.a_over_b_uniform, mean.unique_uniform),
    ):
        assert found == [(unique[gamma + 1] or 0.0) / (unique[1] or 0.0) for gamma in GAMMAS]
    found = [(group.kind, group.name) for group in profile.groups]
    assert found == [("dataset", "a"), ("dataset", "b"), ("category", "code"), ("category", "math")]  # one language
    for group in profile.groups:
        own = [number for number, text in enumerate(texts) if text[group.kind] == group.name]
        rows = np.array([row for row in trace.text_rows() if trace.sequence[row] in own])
        mean = mean_curves([layer_curves(trace, layer, rows) for layer in (0, 1)])
        drafted, accepted = ((each - 1)[np.isin(steps.sequence, own)].sum() for each in (steps.n_tokens, steps.n_text))
        assert mean is not None and (group.texts, group.tokens) == (2, rows.size)
        assert (group.overlap, group.unique) == (mean.overlap[1], mean.unique[4])
        expected = mean.overlap_independence, mean.unique_independence[4]
        assert (group.overlap_independence, group.unique_independence) == expected
        assert group.acceptance_rate == pytest.approx(accepted / drafted)
    plain = profile_model(plain_text(6), []).gain
    assert plain is not None and (plain.acceptance, plain.measured) == (0.8, False)  # Figure 7's
    assert plain.a_over_b[5] is not None and plain.a_over_b[6] is None  # no text has seven tokens


def test_a_stop_keeps_the_layers_until_then() -> None:
    seen = SeenProgress()
    profile = profile_model(
        two_texts(n_layers=5), [4], run=Run(cancelled=lambda: len(seen.amounts) == 2, progress=seen)
    )
    assert [curves.layer for curves in profile.curves] == [0, 1, 4] and len(seen.amounts) == 3
    assert [layer.layer for layer in profile.layers] == [4]


def profile_json(*words: object) -> dict[str, Any]:
    """The figures of `moeedge profile`, without what they depend on besides the options."""
    report: dict[str, Any] = run_json("profile", *words)
    assert report.pop("provenance")["version"]
    return report


def expected_json(path: Path, layer: int, steps: Steps | None = None, gamma: int | None = None) -> dict[str, Any]:
    """The same from the trace that the command read or wrote."""
    trace = Trace.load(path)
    profile = profile_model(trace, [layer], steps=steps, gamma=gamma)
    report = layer_report(profile.layers[0], run_facts(trace)) | {"model_profile": model_report(profile)}
    del report["provenance"]
    return dict(json.loads(json.dumps(report, allow_nan=False)))


@pytest.mark.parametrize("accepts", [0, 1])
def test_the_command_cuts_a_text_into_verifications(tmp_path: Path, accepts: int) -> None:
    path = tmp_path / "trace.npz"
    trace = sticky_trace(gamma=0, gaps=True)
    trace.save(path)
    steps = simulated_steps(trace, gamma=2, acceptance_chance=accepts, rng=np.random.default_rng(0))
    report = profile_json("--trace", path, "--layer", "0", "--acceptance-chance", accepts, "--draft-max", "2")
    assert report == expected_json(path, 0, steps, 2)
    assert not report["model_profile"]["speculation"]["measured"]


def test_the_command_prints_the_figures_of_its_trace(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    """Of the run that writes it, and of the file."""
    path = tmp_path / "run.npz"
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "one two three", "category": "numbers", "language": "en"}\n'
        '{"prompt": "eins zwei", "category": "numbers", "language": "de"}\n'
    )
    options = ["-c", "512", "-n", "24", "-t", "1", "--raw", "--draft-max", "3", "--dataset", tmp_path / "mine.jsonl"]
    report = profile_json("-m", tiny_moe, "-md", tiny_draft, *options, "--layer", "2", "--trace-out", path)
    expected = expected_json(path, 2)
    assert profile_json("--trace", path, "--layer", "2") == expected
    assert [group["name"] for group in expected["model_profile"]["groups"]] == ["en", "de"]
    rate = expected["model_profile"]["drafts"]["acceptance_rate"]
    assert report == expected | {"answers": 2, "skipped": [], "acceptance_rate": pytest.approx(rate, abs=1e-6)}


def _mean(profiles: list[LayerProfile], name: str) -> float:
    found = (profile.accuracy("sd", "step", name) for profile in profiles)
    return float(np.mean([accuracy for accuracy in found if accuracy is not None]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "published"),
    [("optimistic", (0.76, 0.69, 0.61, 0.88, 0.84)), ("pessimistic", (0.72, 0.69, 0.61, 0.77, 0.80))],
)
def test_replay_of_gpt_oss_20b(data_folder: Path, model: RejectedTokenModel, published: tuple[float, ...]) -> None:
    """gamma 8, acceptance 0.8, tau 1: the figures that the data set's description gives for 60 sequences; here 25."""
    trace = texts_of(read_trace(published_trace(data_folder)), 0, 25)
    rng = np.random.default_rng(0)
    steps = simulated_steps(trace, gamma=8, acceptance_chance=0.8, rejected_token_model=model, rng=rng)
    profiles = profile_layers(trace, list(range(24)), steps=steps, gamma=8)
    names = ("alg1-printed", "alg1-float", "alg1-fixed", "last-step", "count-ema")
    for name, accuracy in zip(names, published, strict=True):
        assert _mean(profiles, name) == pytest.approx(accuracy, abs=0.04), name
    # the speculative sensor predicts the next step better than the one that sees single tokens, and better than "cold"
    ar = np.mean([profile.ar_accuracy for profile in profiles if profile.ar_accuracy is not None])
    cold = np.mean([profile.step_cold_share for profile in profiles if profile.step_cold_share is not None])
    assert _mean(profiles, "alg1-printed") > ar + 0.04 and ar > cold


MAGIC = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}


@pytest.mark.parametrize(
    ("trace", "layers", "suffix"),
    [
        (two_texts(), [1], ".svg"),
        (two_texts(), [0, 1], ".pdf"),
        (plain_text(30), [0], ".png"),
        (make_trace([(1, 0, 0, True)]), [0, 1], ".png"),  # no steps
    ],
)
def test_pictures(tmp_path: Path, trace: Trace, layers: list[int], suffix: str) -> None:
    path = tmp_path / f"picture{suffix}"
    plot_profiles(profile_layers(trace, layers), "a model, gamma 2", path)
    assert path.read_bytes().startswith(MAGIC[suffix]) and path.stat().st_size > 5000
    assert "matplotlib.pyplot" not in sys.modules  # no display, no global state


def test_other_formats_are_refused() -> None:
    with pytest.raises(InputError, match=r"--plot cannot write x\.gif"):
        check_picture(Path("x.gif"))


@pytest.mark.parametrize("layers", [[1], [0, 1]])
def test_every_number_of_a_picture_is_in_the_json(layers: list[int]) -> None:
    """Of the tables under the pictures; the picture of r_c has 1 - r_c, as the paper's."""
    profile = profile_model(sticky_trace(), layers)
    known = set(numbers(complete_report(profile, {"n": profile.meta.n_experts})))
    known |= {round(1 - value, 6) for layer in profile.layers for each in layer.utility for value in each.r_c if value}
    plots = [plot for plot in profile_plots(profile) if plot.lines]
    assert len(plots) > 10
    for plot in plots:
        for line in plot.lines:
            assert all(value is None or round(value, 6) in known for value in line.values), (plot.title, line.label)


def numbers(value: Any) -> Iterator[float]:
    """All numbers of a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, (int, float)):
        yield value
