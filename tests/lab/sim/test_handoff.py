"""Calls between GPU and host: their times, the moments of a layer, and the events that follow from them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.lab.sim.model_shape import read_data
from moeedge.lab.sim.step_costs import Calls, CallTimes, Handoff, find_handoff
from moeedge.policies.base import ExecutionModel
from tests.lab.sim.test_simulate_events import CPU, DENSE, DEVICE, HEAD, run

TIMES = CallTimes(
    blocking_copy_s=8e-9,
    queued_copy_s=3e-9,
    wait_s=4e-9,
    sync_s=1e-9,
    event_s=1e-9,
    launch_s=7e-9,
    cpu_region_s=5e-9,
    divide_s=2e-9,
    pageable_bytes_per_s=1e9,
)
DOWN, SUBMIT, JOIN, UP = Calls(gets=2, waits=1, bytes_down=10), Calls(launches=1), Calls(syncs=1), Calls(sets_async=1)
DOWN_NS, SUBMIT_NS, JOIN_NS, UP_NS = 2 * 8 + 4 + 10, 7, 1, 3
ONE = {"down": DOWN, "submit": SUBMIT, "join": JOIN, "up": UP}
HANDOFF = Handoff(name="test", one=ONE, nine=ONE, times=TIMES, cpu_regions=2, divides=True)
HYBRID = ExecutionModel()
RECORDS = Path(__file__).parents[3] / "docs" / "benchmarks"
FREE: dict[str, object] = {"transfer_ns": 0, "latency_ns": 0, "link_bytes_per_s": 1e12}  # uploads take no time


def fixed_s(handoff: Handoff, link_bytes_per_s: float, n_tokens: int = 1) -> float:
    """All that a layer costs apart from its experts."""
    moments = ("down", "submit", "join", "up")
    calls_s = sum(handoff.seconds(moment, n_tokens, link_bytes_per_s) for moment in moments)
    return calls_s + handoff.divide_s(n_tokens) + handoff.cpu_regions * handoff.times.cpu_region_s


def test_blocking_copies_take_the_rate_of_pageable_memory() -> None:
    assert DOWN.seconds(TIMES, 1e12) == pytest.approx(DOWN_NS * 1e-9)
    assert Calls(gets_async=2, bytes_down=1000).seconds(TIMES, 1e12) == pytest.approx(7e-9)
    assert HANDOFF.seconds("down", 18, 1e12) == pytest.approx((DOWN_NS + 10) * 1e-9)  # twice the bytes of nine tokens
    fixed_ns = DOWN_NS + SUBMIT_NS + JOIN_NS + UP_NS + 2 + 2 * 5
    assert fixed_s(HANDOFF, 1e12) == pytest.approx(fixed_ns * 1e-9)


@pytest.mark.parametrize("hit", [0, 1, 2])
def test_a_divided_layer_by_hand(hit: int) -> None:
    """Experts 0 and 1 are used; `hit` of them are on the device."""
    found = run(HYBRID, [(0, expert) for expert in range(hit)], handoff=HANDOFF, **FREE)
    before_ns = DOWN_NS + 2 + (SUBMIT_NS if hit else 0)
    after_ns = UP_NS + 5 + (JOIN_NS if hit else 0)
    halves_ns = max(hit * DEVICE, (2 - hit) * CPU + (5 if hit < 2 else 0))
    assert found.total_ns == DENSE + HEAD + before_ns + halves_ns + after_ns == sum(found.ns.values())
    assert found.ns["host"] == before_ns + after_ns


def test_a_half_that_is_launched_ahead_hides_the_way_down() -> None:
    ahead = replace(HANDOFF, launched_ahead=True)
    found = run(HYBRID, [(0, 0), (0, 1)], handoff=ahead, **FREE)
    assert found.total_ns == DENSE + HEAD + 2 * DEVICE + JOIN_NS + UP_NS + 5  # longer than the way down
    slow = run(HYBRID, [(0, 0)], handoff=ahead, **FREE)
    assert slow.total_ns == DENSE + HEAD + DOWN_NS + 2 + CPU + 5 + JOIN_NS + UP_NS + 5


def test_a_whole_layer_on_the_device_exchanges_nothing() -> None:
    layers = ExecutionModel(layerwise=True)
    found = run(layers, [(0, 0), (0, 1)], handoff=HANDOFF, **FREE)
    assert found.total_ns == DENSE + HEAD + 2 * DEVICE and found.ns["host"] == 0


def test_every_step_of_the_lean_path_exchanges_less() -> None:
    names = ("one CPU graph", "launched ahead")
    for n_tokens in (1, 9):
        times = [fixed_s(find_handoff(name), 25e9, n_tokens) for name in names]
        assert times == sorted(times, reverse=True)
    assert find_handoff("launched ahead").launched_ahead


@pytest.mark.parametrize(
    ("program", "file", "lane"),
    [
        ("--n-cpu-moe", "round-trips-0.6.0.json", "stock"),
        ("launched ahead", "round-trips.json", "moeedge-0.5-ahead"),
    ],
)
def test_the_calls_are_those_that_were_counted(program: str, file: str, lane: str) -> None:
    """Per layer, of one token and of nine; bytes of a block's two halves depend on the hit rate."""
    record = json.loads((RECORDS / file).read_text(encoding="utf-8"))
    handoff = find_handoff(program)
    for n_tokens, moments in ((1, handoff.one), (9, handoff.nine)):
        counted = next(row for row in record["rows"] if (row["lane"], row["n_tokens"]) == (lane, n_tokens))["per_layer"]
        calls = moments.values()
        for name in ("gets", "sets", "gets_async", "sets_async", "copies", "launches"):
            assert sum(getattr(call, name) for call in calls) == pytest.approx(counted[name], abs=0.05), name
        assert sum(call.waits + call.syncs for call in calls) == pytest.approx(counted["syncs"], abs=0.05)
        assert moments["up"].bytes_up == pytest.approx(counted["bytes_up"], rel=0.01) or handoff.divides
        assert moments["down"].bytes_down <= counted["bytes_down"] * 1.01


def test_every_handoff_of_a_program_is_described() -> None:
    programs, data = read_data("programs.json")["programs"], read_data("handoffs.json")
    named = {entry["handoff"] for entry in programs.values() if "handoff" in entry}
    assert named <= set(data["programs"])
    assert all(entry["source"] for entry in data["programs"].values())
    assert set(data["calls"]) - {"sources"} == set(data["calls"]["sources"])
    assert np.isfinite([fixed_s(find_handoff(name), 25e9) for name in data["programs"]]).all()
