"""How figures are worded, and the panel that shows them."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from moeedge.engine.types import EngineInfo, GenerationStats
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.scheduler.governor import DraftChoice
from moeedge.ui import figures
from moeedge.ui.chat.panel import render_panel
from moeedge.ui.figures import bar, resample, sparkline

INFO = EngineInfo(
    model="t.gguf",
    architecture="qwen3moe",
    n_layers=48,
    n_expert_layers=48,
    n_experts=128,
    n_expert_used=8,
    n_ctx=4096,
    n_threads=2,
    gamma=4,
    draft="d.gguf",
    device="none",
    policy="none",
)
STATS = GenerationStats(
    prompt_tokens=120,
    prefill_tokens=100,
    generated_tokens=51,
    prefill_s=0.5,
    decode_s=2.0,
    ttft_s=0.25,
    steps=20,
    drafted=80,
    accepted=60,
    experts_sum=20 * 18.25,
)


def test_the_stats_line() -> None:
    assert figures.join_parts(figures.turn_parts(INFO, STATS, "eos")) == (
        "51 tokens | decode 25.0 t/s | prefill 200 t/s (100 tokens, 20 kept) | TTFT 250 ms | accepted 75 % (60/80) | "
        "2.50 tokens/step | 18.2 of 128 experts/step | no device"
    )


def test_a_budget_is_named_with_every_figure_that_it_changes() -> None:
    info = replace(INFO, expert_budget=ExpertBudget(budget=16))
    stats = replace(STATS, budgeted_steps=20, experts_natural_sum=20 * 24.5, kept_probability_sum=20 * 0.925)
    parts = figures.turn_parts(info, stats, "eos")
    assert "budget 16 (lossy): 24.5 without it, 92 % of probability kept" in parts
    assert "budget 16 (lossy)" in figures.turn_parts(info, STATS, "eos")  # no draft yet: nothing was left out
    assert "budget 16 (lossy)" in figures.total_parts(INFO, [STATS, stats], budgets=["budget 16 (lossy)"])
    live = figures.live_figures(info, stats, ram_bytes=1 << 30, elapsed_s=1.0)
    console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
    console.print(render_panel(live, columns=40, rows=4, hint=""))
    assert "budget 16 (lossy)" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reason", "note"), [("length", "cut at -n tokens"), ("context", "context full"), ("interrupted", "stopped")]
)
def test_why_an_answer_ended(reason: str, note: str) -> None:
    assert figures.turn_parts(INFO, STATS, reason)[-1] == note  # type: ignore[arg-type]


def test_nothing_measured_is_a_dash_or_left_out() -> None:
    line = figures.join_parts(figures.turn_parts(replace(INFO, n_experts=0), GenerationStats(prompt_tokens=3), None))
    assert line == "0 tokens | decode - | prefill - (0 tokens, 3 kept) | TTFT - | no device"


def test_totals_are_sums_and_rates_of_sums() -> None:
    other = replace(STATS, generated_tokens=11, decode_s=0.5, steps=10, drafted=20, accepted=0, ttft_s=0.75)
    assert figures.total_parts(INFO, [STATS, other]) == [
        "62 tokens",
        "decode 24.0 t/s",  # 60 tokens in 2.5 s: the first of each answer is prefill's
        "prefill 200 t/s (200 tokens)",
        "TTFT 500 ms",
        "accepted 60 % (60/100)",
        "2.00 tokens/step",
        "no device",
    ]


def test_lines_break_only_between_parts() -> None:
    text = figures.join_parts(["one two", "three", "four five"], columns=15)
    assert text == "one two | three\nfour five"


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_panel_shows_every_figure_unbroken(columns: int) -> None:
    items = figures.live_figures(INFO, STATS, ram_bytes=3 << 30, elapsed_s=1.0)
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    console.print(render_panel(items, columns=columns, rows=20, hint="Ctrl-C stops"))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for item in items:
        assert f"{item.label} {item.value}".strip() in shown
    assert all(len(line) == columns for line in shown.splitlines())


def test_the_panel_counts_while_the_prompt_is_read() -> None:
    items = figures.live_figures(INFO, GenerationStats(prompt_tokens=9), ram_bytes=1 << 20, elapsed_s=2.04)
    values = {item.label: item.value for item in items}
    assert values["prefill"] == "running, 2.0 s"
    assert (values["decode"], values["TTFT"], values["RAM"]) == ("-", "-", "1 MiB")


@pytest.mark.parametrize(
    ("share", "drawn"),
    [(0, "░░░░"), (1, "████"), (0.5, "██░░"), (0.3125, "█▎░░"), (-1, "░░░░"), (7, "████"), (0.999, "███▉")],
)
def test_a_bar(share: float, drawn: str) -> None:
    assert bar(share, 4) == drawn


@given(st.floats(-2, 3), st.integers(0, 60))
def test_a_bar_has_the_width_it_is_given(share: float, columns: int) -> None:
    assert len(bar(share, columns)) == columns


def test_values_are_resampled_to_means() -> None:
    assert resample([1, 3, 5, 7], 2) == [2, 6]
    assert resample([1, 2, 3], 2) == [1, 2.5]
    assert resample([1, 2], 5) == [1, 2]
    assert resample([], 5) == []


@given(st.lists(st.floats(0, 5), min_size=1, max_size=60), st.integers(1, 60))
def test_resampling_uses_every_value_once(values: list[float], n: int) -> None:
    means = resample(values, n)
    assert len(means) == min(n, len(values))
    assert min(values) - 1e-9 <= min(means) <= max(means) <= max(values) + 1e-9


def test_a_sparkline_is_as_wide_as_there_is_room() -> None:
    assert sparkline([0, 1, 2, 3, 4], 10, top=4) == "▁▃▅▆█"
    assert sparkline([0, 0, 4, 4], 2, top=4) == "▁█"
    assert sparkline([9, -1], 2, top=4) == "█▁"
    assert sparkline([1], 2, top=0) == ""


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (DraftChoice(gamma=2, gamma_max=16, best=2), "measuring"),
        (DraftChoice(gamma=2, gamma_max=16, best=2, speed_up=4.0, n_measured=3), "measuring"),
        (DraftChoice(gamma=2, gamma_max=16, best=2, speed_up=1.5, n_measured=40), "2 of 16, 1.50x plain by estimate"),
        (
            DraftChoice(gamma=0, gamma_max=16, best=0, speed_up=1.0, other=1, other_speed_up=0.9, n_measured=40),
            "off: 1 would be 0.90x plain",
        ),
    ],
)
def test_draft_length(choice: DraftChoice, text: str) -> None:
    """An estimate of a few steps is not shown."""
    assert figures.draft_length(choice) == text
