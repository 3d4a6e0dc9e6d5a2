"""Every figure of a profile's JSON equals a recomputation from the written trace, by code that shares none with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from tests.support.commands import run, run_json
from tests.support.recomputed_profile import RecomputedProfile
from tests.support.traces import make_trace

RUN = {"model", "architecture", "n_layers", "n_experts", "n_experts_used", "gamma", "draft", "acceptance_rate"}


def assert_equal(shown: Any, expected: Any, where: str = "") -> None:
    """Compares numbers within the rounding of the JSON; both must have the same keys."""
    if isinstance(expected, dict):
        assert set(shown) == set(expected), where
        for key, value in expected.items():
            assert_equal(shown[key], value, f"{where}.{key}")
    elif isinstance(expected, list):
        assert len(shown) == len(expected), where
        for place, value in enumerate(expected):
            assert_equal(shown[place], value, f"{where}[{place}]")
    elif isinstance(expected, float) and shown is not None:
        assert shown == pytest.approx(expected, abs=1e-6, rel=1e-6), where
    else:
        assert shown == expected, where


def sticky_trace(*, gamma: int = 3, seed: int = 3) -> Trace:
    """Texts whose tokens keep most experts of the token before, with drafts of which some are rejected."""
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
    return trace


def check(report: dict[str, Any], recomputed: RecomputedProfile, layer: int) -> None:
    """The object of a layer with the model's profile."""
    model = report.pop("model_profile")
    expected = recomputed.layer(layer)
    run_keys = {"answers", "skipped", *RUN, *recomputed.meta["parameters"]}
    assert_equal({key: value for key, value in report.items() if key not in run_keys}, expected)
    layers = [recomputed.curves(each) for each in range(recomputed.meta["n_layers"])]
    assert_equal(model["by_layer"], layers)
    assert_equal(model["mean_of_layers"], recomputed.mean_curves())
    assert_equal(model["groups"], recomputed.groups())
    assert_equal(model["drafts"], recomputed.drafts())
    assert_equal(model["speculation"], recomputed.speculation())


@pytest.mark.parametrize("gamma", [0, 3])
def test_figures_of_a_trace(tmp_path: Path, gamma: int) -> None:
    path = tmp_path / "trace.npz"
    sticky_trace(gamma=gamma).save(path)
    report = run_json("profile", "--trace", path, "--layer", "1")
    recomputed = RecomputedProfile(path)
    if gamma:
        assert len(recomputed.groups()) == 4  # two data sets, two categories, one language
    check(report, recomputed, 1)


def test_figures_of_a_run(tiny_moe: Path, tiny_draft: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.npz"
    (tmp_path / "mine.jsonl").write_text(
        '{"prompt": "one two three", "category": "numbers", "language": "en"}\n'
        '{"prompt": "eins zwei", "category": "numbers", "language": "de"}\n'
    )
    options = ["-c", "512", "-n", "24", "-t", "1", "--raw", "--draft-max", "3", "--dataset", tmp_path / "mine.jsonl"]
    report = run_json("profile", "-m", tiny_moe, "-md", tiny_draft, *options, "--layer", "2", "--trace-out", path)
    recomputed = RecomputedProfile(path)
    assert [group["name"] for group in recomputed.groups()] == ["en", "de"]
    check(report, recomputed, 2)


@pytest.mark.slow  # draws a page
def test_the_report_has_the_same_numbers(tmp_path: Path) -> None:
    path, page, numbers = tmp_path / "trace.npz", tmp_path / "out.html", tmp_path / "out.json"
    sticky_trace().save(path)
    report = run_json("profile", "--trace", path, "--layer", "0", "--report", page)
    assert run("profile", "--trace", path, "--layer", "0", "--report", numbers).exit_code == 0
    complete = json.loads(numbers.read_text())
    text = page.read_text()
    embedded = json.loads(text[text.index('id="numbers">') + len('id="numbers">') : text.index("</script>")])
    assert complete == embedded
    assert complete["model_profile"] == report.pop("model_profile")
    assert complete["layers"] == [{key: report[key] for key in complete["layers"][0]}]
    assert complete["run"] == {key: report[key] for key in complete["run"]}
