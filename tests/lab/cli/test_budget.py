"""`moeedge lab budget`, on the batches of a trace of the same run, and `lab pair`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import recorded_steps
from tests.conftest import TinyFactory
from tests.support.cases import MOE_CASES
from tests.support.commands import refused, run, run_json


@pytest.fixture
def short(tiny_moe: Path, tiny_draft: Path) -> list[str]:
    """The tiny target and draft, greedy and short, on two prompts of a file."""
    prompts = tiny_moe.with_name("prompts.jsonl")
    prompts.write_text('{"prompt": "one two three four"}\n{"prompt": "five six"}\n')
    options = ["-c", "512", "-n", "24", "-t", "1", "--raw", "--draft-max", "4", "--dataset", str(prompts)]
    return ["-m", str(tiny_moe), "-md", str(tiny_draft), *options]


def test_the_batches_are_those_of_a_trace(short: list[str], tmp_path: Path) -> None:
    """What is counted of them: tests/lab/analysis/test_expert_budget.py."""
    report = run_json("lab", "budget", *short, "--budgets", "4,8,16")
    run_json("profile", *short, "--trace-out", str(tmp_path / "trace.npz"))
    trace = Trace.load(tmp_path / "trace.npz")
    steps = recorded_steps(trace, (Phase.VERIFY,))
    batches = [rows[rows >= 0] for rows in steps.rows[steps.n_tokens > 1]]
    routing, n_tokens = report["routing"][0], sum(map(len, batches))
    assert (routing["group"], routing["batches"], routing["tokens"]) == ("all", len(batches), n_tokens)
    for layer, pairs in enumerate(report["co_activation"]):
        used = [trace.ids[batch, layer] for batch in batches]
        assert routing["unique_by_layer"][layer] == pytest.approx(np.mean([np.unique(each).size for each in used]))
        assert np.diag(pairs["counts"]).tolist() == np.bincount(np.concatenate(used).ravel(), minlength=16).tolist()
    assert max(np.diff(routing["cumulative_probability"], 2)) < 1e-5  # the best first


def test_errors(short: list[str]) -> None:
    """No error with all experts; the error falls with the budget."""
    report = run_json("lab", "budget", *short, "--budgets", "auto", "--layers", "1-2")
    assert report["layers"] == [1, 2] and report["budgets"] == [4, 6, 8, 10, 12, 16]
    errors = report["reconstruction_error"]
    assert errors["batches"] >= 2
    rows = {(row["ranking"], row["coverage"], row["budget"]): row["error"] for row in errors["rows"]}
    assert {key[0] for key in rows} == {"router", "static", "oracle", "picks"}
    assert all(rows[key] == 0 for key in rows if key[-1] == 16)
    for coverage in ("substitution", "truncation"):
        assert rows["router", coverage, 4] > rows["router", coverage, 12]
    assert rows["oracle", "truncation", 6] < rows["router", "truncation", 6]


def test_text(short: list[str]) -> None:
    result = run("lab", "budget", *short, "--budgets", "4,8")
    assert result.exit_code == 0
    for part in ("router, subst.", "oracle, trunc.", "B=8", "Eq. 9", "routing probability"):
        assert part in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_what_cannot_be_analysed(short: list[str]) -> None:
    for budgets in ("3", "17", "many", ""):
        refused("lab", "budget", *short, "--budgets", budgets)
    assert "moeedge lab budget" in refused("profile", *short, "--budget-analysis", "8")
    assert run("lab", "budget", *short, "--budgets", "8", "-md", "none").exit_code == 1  # nothing to verify


@pytest.mark.parametrize(
    "case", ["deepseek3", *(pytest.param(case, marks=pytest.mark.slow) for case in ("olmoe", "gpt-oss"))]
)
def test_other_routers(case: str, tiny: TinyFactory) -> None:
    """Weights not normalised; sigmoid with bias, groups and scale; softmax after the top-k."""
    arch, dimensions = MOE_CASES[case]
    options = ["-md", "ngram", "-c", "256", "-n", "30", "-t", "1", "--raw", "-p", "a b a b a b a b"]
    report = run_json("lab", "budget", "-m", tiny(arch, **dimensions), *options)
    most = report["n_experts"]
    rows = report["reconstruction_error"]["rows"]
    assert all(row["error"] == 0 for row in rows if row["budget"] == most)
    least = {row["ranking"]: row["error"] for row in rows if row["budget"] == report["budgets"][0]}
    assert "static" not in least and least["router"] > 0  # one prompt: no others to calibrate on


def test_weights_before_the_experts(tiny: TinyFactory) -> None:
    """llama4: routing is analysed, the errors are not, and the report says why."""
    options = ["-md", "ngram", "-c", "256", "-n", "40", "-t", "1", "--raw", "-p", "a b a b a b a b"]
    report = run_json("lab", "budget", "-m", str(tiny("llama4")), *options)
    assert report["reconstruction_error"] is None and "layer" in report["no_reconstruction_error"]


def test_draft_and_target_are_compared(pair: list[str]) -> None:
    found = run_json("lab", "pair", *pair, "-p", "one two three", "-n", "8")
    assert found["layers"] == [0, 1, 2] and len(found["entropy_popularity_bits"]) == 3
    assert "mean" in run("lab", "pair", *pair, "-p", "one two three", "-n", "8").stdout
    assert "-md" in refused("lab", "pair", *pair[:2], "-md", "none", "-p", "one")
