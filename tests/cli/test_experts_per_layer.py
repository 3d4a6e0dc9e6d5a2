"""A file with a number of experts per token for each layer: every command that reads models takes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import TinyFactory
from tests.support.commands import refused, run, run_json


@pytest.fixture(scope="module")
def puzzle(tiny: TinyFactory) -> Path:
    """Layers of 0, 4, 0 and 3 experts per token, with recurrent states: no drafts."""
    return tiny("nemotron_h_moe", per_layer=True, expert_type="F32")


@pytest.fixture(scope="module")
def pair(tiny: TinyFactory) -> list[object]:
    """A list of equal numbers, with attention and a draft."""
    return ["-m", tiny("qwen3moe", per_layer=True, expert_type="F32"), "-md", tiny("qwen3")]


def test_answers_are_those_of_stock(puzzle: Path, pair: list[object]) -> None:
    """bench compares them: exit code 1 where they differ."""
    options = ("-dev", "emulated", "--cache-ratio", "0.3", "-p", "0", "-n", "12", "-r", "1")
    for model in (["-m", puzzle, "-md", "none"], pair):
        assert {row["mode"] for row in run_json("bench", *model, *options)} >= {"stock-ar", "moeedge"}


def test_budgets_with_drafts(pair: list[object]) -> None:
    answer = run_json("chat", *pair, "-p", "tell me", "-n", "12", "--temp", "0", "--expert-budget", "5")
    assert answer["stats"]["experts_max"] <= 5
    assert "4" in refused("chat", *pair, "-p", "tell me", "--expert-budget", "3")


def test_plan_reads_the_experts_of_each_layer(puzzle: Path, pair: list[object]) -> None:
    facts = run_json("plan", "-m", puzzle, "-md", "none")["model"]
    assert (facts["n_experts_used"], facts["n_experts_used_by_layer"]) == (4, [0, 4, 0, 3])
    row_bytes = 64 * 4  # of F32; an expert has two matrices of 32 rows in layer 1, of 64 in layer 3
    unread_bytes = facts["n_vocab"] * row_bytes  # the embeddings
    read_bytes = 2 * row_bytes * (4 * 32 + 3 * 64)
    assert facts["active_bytes"] == facts["dense_bytes"] - unread_bytes + read_bytes
    assert run_json("plan", *pair)["model"]["n_experts_used_by_layer"] == []


def test_a_profile_has_each_layers_own_number(puzzle: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.npz"
    options = ("-m", puzzle, "-md", "none", "-p", "tell me", "-n", "20")
    found = run_json("profile", *options, "--layer", "3", "--trace-out", trace)
    assert found["unique_experts"]["empirical"]["1"] == 3
    assert found["overlap_uniform"] == pytest.approx(3 / 16)
    rows = run_json("lab", "replay", trace, "--policy", "lru", "--cache-ratio", "0.4", "--expert-budget", "off,4")
    assert rows
    assert run("lab", "simulate", "--trace", trace, "--model", puzzle).exit_code == 0
