"""How figures of an answer and of the expert cache are worded, and the panel that shows them."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from moeedge.engine.types import EngineInfo, GenerationStats
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.records import as_dict
from moeedge.run import Decision
from moeedge.scheduler.cache_governor import CacheChoice
from moeedge.scheduler.governor import DraftChoice
from moeedge.scheduler.stats import PlacementStats
from moeedge.ui import figures
from moeedge.ui.chat.live import render_panel
from moeedge.ui.figures import FigureRow, Turn, shares

MIB = 1024 * 1024
INFO = EngineInfo(
    model="t.gguf", architecture="qwen3moe", n_layers=48, n_expert_layers=48, n_experts=128, n_expert_used=8,
    n_ctx=4096, n_threads=2, gamma=4, draft="d.gguf", device="none", policy="none",
)  # fmt: skip
STATS = GenerationStats(
    prompt_tokens=120, cached_tokens=20, prefill_tokens=100, generated_tokens=51, prefill_s=0.5, decode_s=2.0,
    ttft_s=0.25, steps=20, drafted=80, accepted=60, experts_sum=20 * 18.25,
)  # fmt: skip
EMULATED: Any = {"device": "emulated (CPU, link 2 GB/s)", "place": "on the emulated GPU"}
PLACED = replace(INFO, **EMULATED, policy="spac", cache_ratio=0.17, cache_slots=1044, pool_bytes=12 * MIB)
CACHE = PlacementStats(
    **EMULATED, policy="spac", cache_ratio=0.17, n_layers=48, slots_used=1040, slots_total=1044,
    pool_bytes=12 * MIB, vram_used_bytes=0, vram_total_bytes=12 * MIB,  # an old reading: the slots know better
    steps=20, pairs=1000, pairs_hit=812, unique=400, unique_hit=272, uploads=800, evictions=790,
    bytes_moved=1_300_000_000, transfer_s=0.65, cpu_s=1.1, device_s=0.4, wait_s=0.08, draft_s=0.3, decode_s=2.0,
    tau=tuple(2 + 2 * math.sin(layer / 5) for layer in range(48)),
)  # fmt: skip


def lines_of(items: Sequence[FigureRow], columns: int, rows: int) -> list[str]:
    """The panel of these figures, whose lines are as wide as the window."""
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    console.print(render_panel(items, columns=columns, rows=rows, hint="Ctrl-C stops"))
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) == columns for line in lines)
    return lines


def panel(cache: PlacementStats, columns: int, rows: int = 30) -> list[str]:
    return lines_of(figures.live_figures(PLACED, STATS, cache, elapsed_s=1.0, full=True), columns, rows)


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
        assert "budget 16 (lossy)" in "\n".join(lines_of(live, 40, 5))


def test_the_line_after_an_answer() -> None:
    line = figures.turn_line(INFO, STATS, "eos")
    assert line == "51 tokens, 25.0 t/s, first after 0.2 s, 75 % of drafts accepted"
    assert figures.turn_line(INFO, STATS, "length") == f"{line}, cut at -n tokens"
    info, stats = replace(INFO, n_experts=0), GenerationStats(prompt_tokens=3)
    assert figures.turn_line(info, stats, None) == "0 tokens"  # nothing measured is a dash, or left out
    assert figures.answer_rows(info, stats, None)[0].value == "0 tokens at -"
    choice = DraftChoice(gamma=0, gamma_max=16, best=0, speed_up=1.0, other=1, other_speed_up=0.9, n_measured=40)
    assert choice.decision == Decision("draft length", "off", 1 / 0.9, "drafts of 1", "by estimate")
    stats = replace(STATS, drafted=0, accepted=0, choice=choice)
    assert "draft length off" in figures.turn_line(INFO, stats, "eos")
    assert "draft length off" not in figures.turn_line(INFO, replace(stats, choice=None), "eos")


def test_totals_are_sums_and_rates_of_sums() -> None:
    one = replace(STATS, context_shifts=2, dropped_tokens=60)
    other = replace(one, generated_tokens=11, decode_s=0.5, steps=10, drafted=20, accepted=0, ttft_s=0.75)
    rarely = replace(CACHE, pairs=3000, pairs_hit=188)
    [row] = figures.total_rows(INFO, [Turn(INFO, one, "eos", CACHE), Turn(INFO, other, "eos", rarely)])
    assert row.label == "all 2 answers"
    assert row.value.split(", ") == [
        "62 tokens at 24.0 t/s",  # 60 tokens in 2.5 s: the first of each answer is prefill's
        "prompts 200 tokens at 200 t/s",
        "first token after 500 ms on average",
        "60 % of drafts accepted (60 of 100)",
        "2.00 tokens per step",
        "120 tokens dropped from the context in 4 shifts",
        "pair hits 25 %",  # 1000 of 4000: not the mean of the rates
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


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_panel_shows_every_figure_unbroken(columns: int) -> None:
    for full in (False, True):
        items = figures.live_figures(INFO, STATS, elapsed_s=1.0, full=full)
        lines = lines_of(items, columns, 20)
        for item in items:
            assert f"{item.label} {item.value}".strip() in "\n".join(lines)
        assert len(lines) <= 4 or full
    shown = "\n".join(panel(CACHE, columns))
    waiting = f"waiting{' for the device' * (columns > 80)} 4 %"
    time = "time: draft 15% CPU 55% wait 4% rest 26%"
    if columns > 60:
        time = f"experts on the CPU 55 %, {waiting}, the rest 26 %"
    for text in (
        *("experts on the emulated GPU", "pair hits 81 %", "expert hits 68 %", "slots 1040/1044", "uploads/layer 0.83"),
        *("evictions/layer 0.82", "link 2 GB/s", "memory of slots 12 MiB", time, "tau 0-4"),
    ):
        assert text in shown, text
    assert "…" not in shown


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (40, 5), (40, 3), (60, 15), (60, 5), (120, 4)])
def test_a_small_window_keeps_what_matters_most(columns: int, rows: int) -> None:
    lines = panel(CACHE, columns, rows)
    assert len(lines) <= max(rows, 3)
    assert len(lines) >= min(rows, 9)  # rows that are there are used
    shown = "\n".join(lines)
    assert "speed 25.0 t/s" in shown
    assert "…" not in shown
    if rows >= 5:
        assert "pair hits 81 %" in shown


def test_before_the_first_step_there_are_dashes() -> None:
    fresh = PlacementStats(device="CUDA0 (A Card)", policy="lru", cache_ratio=0.5, slots_total=10, pool_bytes=5 * MIB)
    shown = "\n".join(panel(fresh, 80))
    for text in (
        "pair hits -",
        "expert hits -",
        "slots 0/10",
        "uploads/layer -",
        "link -",
        "memory of slots 5 MiB",
        "time: -",
    ):
        assert text in shown, text
    assert "tau" not in shown


RAM = replace(CACHE, device="RAM", is_device=False, place="in RAM")
BOTH = replace(CACHE, ram=RAM)


@pytest.mark.parametrize(
    ("stats", "lines"),
    [
        (replace(CACHE, state="lost", lost=True), ["device lost: all on CPU"]),
        (replace(RAM, state="lost", lost=True), ["RAM lost: mapped file"]),
        (replace(CACHE, state="shrunk"), ["shrunk to 1,044 slots on the emulated GPU"]),
        (replace(BOTH, ram=replace(RAM, state="shrunk")), ["shrunk to 1,044 slots in RAM"]),
        (
            replace(BOTH, state="lost", lost=True, ram=replace(RAM, state="lost", lost=True)),
            ["device lost: all on CPU", "RAM lost: mapped file"],
        ),
        (
            replace(BOTH, state="fallen back", lost=True, ram=replace(RAM, state="fallen back")),
            ["fallen back to the CPU"],
        ),
    ],
)
def test_what_has_become_of_tiers_is_shown(stats: PlacementStats, lines: list[str]) -> None:
    """A tier that is lost has no other figures; the other one still has."""
    rows = [FigureRow("", line) for line in lines]
    shown = figures.live_cache_figures(stats)
    assert [row for row in shown if not row.label and row.draw is None] == rows
    assert set(rows) <= set(figures.cache_rows(stats))
    assert set(rows) <= set(figures.live_figures(PLACED, STATS, stats, elapsed_s=1.0))
    ram = stats if not stats.is_device else stats.ram
    labels = {row.label for row in shown}
    assert ("pair hits" in labels) == (stats.is_device and not stats.lost)
    assert ("RAM pair hits" in labels) == (ram is not None and not ram.lost)


def test_a_cache_that_does_not_pay() -> None:
    off = replace(CACHE, choice=CacheChoice(on=False, pays=False, gain=0.8))
    (row,) = figures.decided(off.choice, rank=2)
    assert as_dict(off)["cache_choice"] == {"on": False, "is_trial": False, "pays": False, "gain": 0.8}
    assert "cache_choice" not in as_dict(CACHE)
    assert "expert cache off" in figures.turn_line(PLACED, STATS, "eos", off)
    live = figures.live_figures(PLACED, STATS, off, elapsed_s=1.0)
    assert row.label == "expert cache" and row in live and row in figures.live_cache_figures(off)


def test_the_panel_of_a_newcomer() -> None:
    *live, time = figures.live_figures(PLACED, STATS, CACHE, elapsed_s=1.0)
    assert [f"{figure.label} {figure.value}" for figure in live] == [
        *("speed 25.0 t/s", "tokens 51", "drafts accepted 75 %", "experts on the emulated GPU 81 %")
    ]
    assert time.draw is not None and sum(map(int, re.findall(r"(\d+) %", time.draw(100)))) == 100
