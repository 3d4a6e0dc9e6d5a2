"""The expert cache in panel, stats line and /stats."""

from __future__ import annotations

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from moeedge.policies.base import LookaheadStatus
from moeedge.records import as_dict
from moeedge.scheduler.cache_governor import CacheChoice
from moeedge.scheduler.stats import PlacementStats
from moeedge.ui import figures
from moeedge.ui.chat.live import render_panel
from tests.ui.test_figures import INFO, STATS

MIB = 1024 * 1024
PLACED = replace(
    INFO,
    device="emulated (CPU, link 2 GB/s)",
    policy="spac",
    cache_ratio=0.17,
    cache_slots=1044,
    pool_bytes=12 * MIB,
)
CACHE = PlacementStats(
    device="emulated (CPU, link 2 GB/s)",
    policy="spac",
    cache_ratio=0.17,
    n_layers=48,
    slots_used=1040,
    slots_total=1044,
    pool_bytes=12 * MIB,
    vram_used_bytes=0,  # an old reading: the slots know better
    vram_total_bytes=12 * MIB,
    steps=20,
    pairs=1000,
    pairs_hit=812,
    unique=400,
    unique_hit=272,
    uploads=800,
    evictions=790,
    bytes_moved=1_300_000_000,
    transfer_s=0.65,
    cpu_s=1.1,
    device_s=0.4,
    wait_s=0.08,
    draft_s=0.3,
    decode_s=2.0,
    tau=tuple(2 + 2 * math.sin(layer / 5) for layer in range(48)),
)


def _panel(cache: PlacementStats, columns: int, rows: int) -> list[str]:
    items = figures.live_figures(PLACED, STATS, cache, elapsed_s=1.0, full=True)
    console = Console(file=io.StringIO(), width=columns, force_terminal=True, color_system=None)
    console.print(render_panel(items, columns=columns, rows=rows, hint="Ctrl-C stops"))
    lines: list[str] = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert all(len(line) == columns for line in lines)
    return lines


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_the_panel_shows_everything_where_there_is_room(columns: int) -> None:
    shown = "\n".join(_panel(CACHE, columns, 30))
    for text in (
        "experts on emulated",
        "pair hits 81 %",
        "expert hits 68 %",
        "slots 1040/1044",
        "uploads/layer 0.83",
        "evictions/layer 0.82",
        "link 2 GB/s",
        "slots in RAM 12 MiB",
        "time: draft 15% CPU 55% wait 4% rest 26%"
        if columns == 60
        else f"experts on the CPU 55 %, waiting{' for the device' * (columns > 80)} 4 %, the rest 26 %",
        "tau 0-4",
    ):
        assert text in shown, text
    assert "…" not in shown


@pytest.mark.parametrize(("columns", "rows"), [(40, 10), (40, 5), (40, 3), (60, 15), (60, 5), (120, 4)])
def test_a_small_window_keeps_what_matters_most(columns: int, rows: int) -> None:
    lines = _panel(CACHE, columns, rows)
    assert len(lines) <= max(rows, 3)
    assert len(lines) >= min(rows, 9)  # rows that are there are used
    shown = "\n".join(lines)
    assert "speed 25.0 t/s" in shown
    assert "…" not in shown
    if rows >= 5:
        assert "pair hits 81 %" in shown


def test_narrow_lines_are_shortened() -> None:
    shown = "\n".join(_panel(CACHE, 40, 30))
    assert "draft 15% CPU 55% wait 4% rest 26%" in shown
    assert "tau 0-4" in shown


def test_before_the_first_step_there_are_dashes() -> None:
    fresh = PlacementStats(device="CUDA0 (A Card)", policy="lru", cache_ratio=0.5, slots_total=10, pool_bytes=5 * MIB)
    shown = "\n".join(_panel(fresh, 80, 30))
    for text in [
        "pair hits -",
        "expert hits -",
        "slots 0/10",
        "uploads/layer -",
        "link -",
        "VRAM slots 5 MiB",
        "time: -",
    ]:
        assert text in shown, text
    assert "tau" not in shown
    assert "time" not in {item.label for item in figures.cache_rows(fresh)}


def test_the_drivers_memory() -> None:
    card = replace(CACHE, device="CUDA0 (A Card)", vram_used_bytes=18 << 30, vram_total_bytes=24 << 30)
    assert figures.memory_figure(card) == figures.FigureRow("VRAM", "18.0 of 24.0 GiB")


def test_the_range_of_the_thresholds() -> None:
    assert figures.tau_text((0.0, math.inf)) == "0-inf" and figures.tau_text((1.0, 1.0)) == "1"


def test_a_lost_device_is_reported() -> None:
    lost = replace(CACHE, lost=True)
    shown = "\n".join(_panel(lost, 40, 10))
    assert "device lost: all on CPU" in shown
    assert "slots" not in shown
    assert figures.live_cache_figures(lost)[0] in figures.cache_rows(lost)


def test_the_table_of_stats() -> None:
    rows = [(row.label, row.value if row.draw is None else row.draw(70)) for row in figures.cache_rows(CACHE)]
    assert rows[0] == ("cache", "emulated (CPU, link 2 GB/s), ratio 0.17, policy spac")
    assert ("moved", "1.2 GiB") in rows
    assert "VRAM" not in {label for label, _ in rows}  # the emulated device has none
    assert {
        ("pair hits", "81 %"),
        ("expert hits", "68 %"),
        ("slots", "1040/1044"),
        ("uploads/layer", "0.83"),
        ("evictions/layer", "0.82"),
        ("link", "2 GB/s"),
        ("slots in RAM", "12 MiB"),
        ("time", "drafts 15 %, experts on the CPU 55 %, waiting for the device 4 %, the rest 26 %"),
        ("device busy", "20 % of that time"),
    } < set(rows)
    assert ("tau", "0-4") in rows


def test_hits_in_stats_and_in_totals() -> None:
    assert figures.FigureRow("pair hits", "81 %") in figures.answer_rows(PLACED, STATS, "eos", CACHE)
    other = replace(CACHE, pairs=3000, pairs_hit=188)  # 1000 of 4000: not the mean of the rates
    [row] = figures.total_rows(PLACED, [figures.Turn(PLACED, STATS, "eos", cache) for cache in (CACHE, other)])
    assert row.value.endswith("pair hits 25 %")


@pytest.mark.parametrize(
    ("status", "text"),
    [
        (LookaheadStatus(used=True), "on"),
        (LookaheadStatus(used=True, gain=0.124), "on, +12 % hits"),
        (LookaheadStatus(used=False, gain=0.001, reason="it does not pay here"), "off: it does not pay here"),
    ],
)
def test_the_judgement_of_lookahead_is_shown(status: LookaheadStatus, text: str) -> None:
    cache = replace(CACHE, lookahead=status)
    assert figures.FigureRow("lookahead", text) in figures.cache_rows(cache)
    assert not any("lookahead" in figure.label for figure in figures.cache_rows(CACHE))


def test_a_cache_that_does_not_pay() -> None:
    off = replace(CACHE, choice=CacheChoice(on=False, pays=False, gain=0.8))
    [shown] = [figure.value for figure in figures.live_cache_figures(off) if figure.label == "cache speed"]
    assert shown == figures.cache_effect(CacheChoice(pays=False, gain=0.8))
    assert "0.80x" in shown
    assert as_dict(off)["cache_choice"] == {"on": False, "is_trial": False, "pays": False, "gain": 0.8}
    assert "cache_choice" not in as_dict(CACHE)
    assert "expert cache off" in figures.turn_line(PLACED, STATS, "eos", off)
    assert "cache" not in figures.turn_line(PLACED, STATS, "eos", CACHE)
    live = figures.live_figures(PLACED, STATS, off, elapsed_s=1.0)
    assert any(figure.label == "expert cache" and "off" in figure.value for figure in live)


def test_the_panel_of_a_newcomer() -> None:
    live = figures.live_figures(PLACED, STATS, CACHE, elapsed_s=1.0)
    assert [(figure.label, figure.value) for figure in live[:-1]] == [
        ("speed", "25.0 t/s"),
        ("tokens", "51"),
        ("drafts accepted", "75 %"),
        ("experts on the emulated GPU", "81 %"),
    ]
    assert live[-1].draw is not None
    line = live[-1].draw(100)
    assert sum(int(word) for word in re.findall(r"(\d+) %", line)) == 100
    lost = figures.live_figures(PLACED, STATS, replace(CACHE, lost=True), elapsed_s=1.0)
    assert "device lost: all on CPU" in [figure.value for figure in lost]
