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
from moeedge.ui.chat.live import render_panel
from moeedge.ui.figures import FigureRow, Turn, shares

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
    cached_tokens=20,
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


def test_the_line_after_an_answer() -> None:
    assert figures.turn_line(INFO, STATS, "eos") == ("51 tokens, 25.0 t/s, first after 0.2 s, 75 % of drafts accepted")


def test_a_budget_is_named_with_every_figure_that_it_changes() -> None:
    info = replace(INFO, expert_budget=ExpertBudget(budget=16))
    stats = replace(STATS, budgeted_steps=20, experts_natural_sum=20 * 24.5, kept_probability_sum=20 * 0.925)
    rows = figures.answer_rows(info, stats, "eos")
    assert FigureRow("expert budget", "budget 16 (lossy): 24.5 without it, 92 % of probability kept") in rows
    assert FigureRow("expert budget", "budget 16 (lossy)") in figures.answer_rows(info, STATS, "eos")  # no draft yet
    assert "budget 16 (lossy)" in figures.turn_line(info, STATS, "eos")
    turns = [Turn(INFO, STATS, "eos"), Turn(info, stats, "eos")]
    assert "budget 16 (lossy)" in figures.total_rows(INFO, turns)[0].value
    for shown in (stats, replace(stats, ttft_s=0.0)):
        live = figures.live_figures(info, shown, elapsed_s=1.0)
        console = Console(file=io.StringIO(), width=40, force_terminal=True, color_system=None)
        console.print(render_panel(live, columns=40, rows=5, hint=""))
        assert "budget 16 (lossy)" in console.file.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("reason", "note"), [("length", "cut at -n tokens"), ("context", "context full"), ("interrupted", "stopped")]
)
def test_why_an_answer_ended(reason: str, note: str) -> None:
    assert figures.turn_line(INFO, STATS, reason).endswith(f", {note}")  # type: ignore[arg-type]


def test_nothing_measured_is_a_dash_or_left_out() -> None:
    info, stats = replace(INFO, n_experts=0), GenerationStats(prompt_tokens=3)
    assert figures.turn_line(info, stats, None) == "0 tokens"
    assert figures.answer_rows(info, stats, None)[0].value == "0 tokens at -"


def test_drafts_that_do_not_pay_are_said_to_be_off() -> None:
    choice = DraftChoice(gamma=0, gamma_max=16, best=0, speed_up=1.0, other=1, other_speed_up=0.9, n_measured=40)
    stats = replace(STATS, drafted=0, accepted=0, choice=choice)
    assert "drafts off" in figures.turn_line(INFO, stats, "eos")
    assert "drafts off" not in figures.turn_line(INFO, replace(stats, choice=None), "eos")


def totals(*answers: GenerationStats) -> list[FigureRow]:
    return figures.total_rows(INFO, [Turn(INFO, stats, "eos") for stats in answers])


def test_totals_are_sums_and_rates_of_sums() -> None:
    other = replace(STATS, generated_tokens=11, decode_s=0.5, steps=10, drafted=20, accepted=0, ttft_s=0.75)
    shifted = replace(STATS, context_shifts=2, dropped_tokens=60)
    [row] = totals(shifted, replace(shifted, context_shifts=1, dropped_tokens=30))
    assert "90 tokens dropped from the context in 3 shifts" in row.value
    [row] = totals(STATS, other)
    assert "dropped" not in row.value
    assert row.label == "all 2 answers"
    assert row.value.split(", ") == [
        "62 tokens at 24.0 t/s",  # 60 tokens in 2.5 s: the first of each answer is prefill's
        "prompts 200 tokens at 200 t/s",
        "first token after 500 ms on average",
        "60 % of drafts accepted (60 of 100)",
        "2.00 tokens per step",
    ]


@pytest.mark.parametrize(
    ("parts_s", "total_s", "expected"),
    [
        ({"a": 1.0, "b": 1.0}, 4.01, [25, 25, 50]),
        ({"a": 0.005, "b": 0.006}, 1.0, [0, 1, 99]),
        ({"a": 3.0, "b": 1.0}, 2.0, [75, 25, 0]),  # clocks of several threads
        ({"a": 0.0}, 0.0, []),
    ],
)
def test_shares_of_a_time_add_up(parts_s: dict[str, float], total_s: float, expected: list[int]) -> None:
    assert [int(part.value.removesuffix(" %")) for part in shares(parts_s, total_s)] == expected


@given(st.lists(st.floats(0, 1e3), min_size=1, max_size=6), st.floats(0.001, 1e3))
def test_shares_are_whole_and_add_up_to_100(parts_s: list[float], total_s: float) -> None:
    found = shares({str(index): part_s for index, part_s in enumerate(parts_s)}, total_s)
    assert sum(int(part.value.removesuffix(" %")) for part in found) == 100


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_panel_shows_every_figure_unbroken(columns: int) -> None:
    for full in (False, True):
        items = figures.live_figures(INFO, STATS, elapsed_s=1.0, full=full)
        console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
        console.print(render_panel(items, columns=columns, rows=20, hint="Ctrl-C stops"))
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        for item in items:
            assert f"{item.label} {item.value}".strip() in shown
        assert all(len(line) == columns for line in shown.splitlines())
        assert len(shown.splitlines()) <= 4 or full


@pytest.mark.parametrize(
    ("n_read", "n_to_read", "elapsed_s", "text"),
    [
        (0, 0, 2.04, "2.0 s"),
        (0, 6000, 1.0, "0 of 6,000 tokens"),
        (512, 6000, 0.1, "512 of 6,000 tokens"),  # too early to tell
        (2000, 6000, 5.0, "2,000 of 6,000 tokens, about 10 s left"),
        (6000, 6000, 5.0, "6,000 of 6,000 tokens"),
    ],
)
def test_how_far_the_prompt_is_read(n_read: int, n_to_read: int, elapsed_s: float, text: str) -> None:
    stats = GenerationStats(prompt_tokens=9)
    items = figures.live_figures(INFO, stats, read=(n_read, n_to_read), elapsed_s=elapsed_s)
    assert items == [FigureRow("reading the prompt", text)]


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (DraftChoice(gamma=2, gamma_max=16, best=2), "measuring"),
        (DraftChoice(gamma=2, gamma_max=16, best=2, speed_up=4.0, n_measured=3), "measuring"),
        (
            DraftChoice(gamma=2, gamma_max=16, best=2, speed_up=1.5, n_measured=40),
            "2 of 16, 1.50 times the speed without, by estimate",
        ),
        (
            DraftChoice(gamma=0, gamma_max=16, best=0, speed_up=1.0, other=1, other_speed_up=0.9, n_measured=40),
            "off, 1 would give 0.90 times the speed, by estimate",
        ),
    ],
)
def test_draft_length(choice: DraftChoice, text: str) -> None:
    """An estimate of a few steps is not shown."""
    assert figures.draft_length(choice) == text
