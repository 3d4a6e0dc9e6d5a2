"""Every figure of a profile's JSON equals a recomputation from the written trace, by code that shares none with it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.analysis.model_profile import complete_report, profile_model
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.ui.profile_plots import profile_plots
from tests.support.commands import run, run_json
from tests.support.recomputed_profile import RecomputedProfile, assert_equal
from tests.support.traces import make_trace


def sticky_trace(*, gamma: int = 3, seed: int = 3, gaps: bool = False) -> Trace:
    """Texts whose tokens keep most experts of the token before, with drafts of which some are rejected.

    gaps: some tokens of some layers are not recorded.
    """
    rng = np.random.default_rng(seed)
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
    trace = make_trace(rows, n_experts=12, n_used=3, gamma=gamma, seed=seed, weights=True, parameters=parameters)
    for row in range(1, len(rows)):
        kept = rng.random(trace.meta.n_layers) < 0.6
        trace.ids[row, kept] = trace.ids[row - 1, kept]
    if gaps:
        trace.ids[rng.random(trace.ids.shape[:2]) < 0.1] = trace.sentinel
    return trace


def profile_json(*words: object) -> dict[str, Any]:
    """The figures of `moeedge profile`, without what they depend on besides the options."""
    report: dict[str, Any] = run_json("profile", *words)
    assert report.pop("provenance")["version"]
    return report


@pytest.mark.parametrize(("gamma", "gaps"), [(0, False), (3, False), (3, True)])
def test_figures_of_a_trace(tmp_path: Path, gamma: int, gaps: bool) -> None:
    path = tmp_path / "trace.npz"
    sticky_trace(gamma=gamma, gaps=gaps).save(path)
    recomputed = RecomputedProfile(path)
    if gamma:
        assert len(recomputed.groups()) == 4  # two data sets, two categories, one language
    assert_equal(profile_json("--trace", path, "--layer", "1"), recomputed.complete(1))


@pytest.mark.parametrize("accepts", [False, True])
def test_figures_of_text_cut_into_verifications(tmp_path: Path, accepts: bool) -> None:
    path = tmp_path / "trace.npz"
    sticky_trace(gamma=0).save(path)
    options = ["--acceptance-chance", str(int(accepts)), "--draft-max", "2"]
    report = profile_json("--trace", path, "--layer", "0", *options)
    assert_equal(report, RecomputedProfile(path, gamma=2, accepts=accepts).complete(0))


def test_figures_of_a_run(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "one two three", "category": "numbers", "language": "en"}\n'
        '{"prompt": "eins zwei", "category": "numbers", "language": "de"}\n'
    )
    options = ["-c", "512", "-n", "24", "-t", "1", "--raw", "--draft-max", "3", "--dataset", tmp_path / "mine.jsonl"]
    report = profile_json("-m", tiny_moe, "-md", tiny_draft, *options, "--layer", "2", "--trace-out", path)
    recomputed = RecomputedProfile(path)
    assert [group["name"] for group in recomputed.groups()] == ["en", "de"]
    check_run(report, recomputed, 2)


def check_run(report: dict[str, Any], recomputed: RecomputedProfile, layer: int) -> None:
    """The object of a run: the trace's, and its answers."""
    drafts = recomputed.drafts()
    answers = {"answers": len(set(recomputed.sequence)), "skipped": []}
    answers["acceptance_rate"] = None if drafts is None else drafts["acceptance_rate"]
    assert_equal(report, recomputed.complete(layer) | answers)


@pytest.mark.slow
def test_figures_of_the_bundled_pair(bundled_pair: tuple[Path, Path], tmp_path: Path) -> None:
    path, page = tmp_path / "run.npz", tmp_path / "out.html"
    options = ["--layer", "47", "-n", "24", "--limit", "4", "--trace-out", path, "--report", page]
    report = profile_json(*options)
    embedded = numbers_of(page)
    assert embedded["model_profile"] == report["model_profile"]
    assert embedded["layers"] == [{key: report[key] for key in embedded["layers"][0]}]
    check_run(report, RecomputedProfile(path), 47)


def numbers_of(page: Path) -> dict[str, Any]:
    text = page.read_text()
    start = text.index('id="numbers">') + len('id="numbers">')
    return dict(json.loads(text[start : text.index("</script>", start)]))


@pytest.mark.parametrize("layers", ["1", "0-1"])
def test_every_number_of_a_picture_is_in_the_json(tmp_path: Path, layers: str) -> None:
    """Of the tables under the pictures; the picture of r_c has 1 - r_c, as the paper's."""
    trace = sticky_trace()
    profile = profile_model(trace, [1] if layers == "1" else [0, 1])
    known = set(numbers(complete_report(profile, {"n": trace.meta.n_experts})))
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


@pytest.mark.slow  # draws a page
def test_the_report_has_the_same_numbers(tmp_path: Path) -> None:
    path, page, written = tmp_path / "trace.npz", tmp_path / "out.html", tmp_path / "out.json"
    sticky_trace().save(path)
    report = profile_json("--trace", path, "--layer", "0", "--report", page)
    assert run("profile", "--trace", path, "--layer", "0", "--report", written).exit_code == 0
    complete, embedded = json.loads(written.read_text()), numbers_of(page)
    assert all(each["run"].pop("provenance")["version"] for each in (complete, embedded))  # with the time of each
    assert complete == embedded
    assert complete["model_profile"] == report.pop("model_profile")
    assert complete["layers"] == [{key: report[key] for key in complete["layers"][0]}]
    assert complete["run"] == {key: report[key] for key in complete["run"]}
