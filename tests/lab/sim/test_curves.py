"""Curves of hits over uploads: their points against plain replays, their intervals against resampled texts."""

from __future__ import annotations

import json

import numpy as np
import pytest

from moeedge.lab.sim.curves import CurvePanel, bootstrap_weights, trace_curves
from moeedge.lab.sim.replay import ReplayConfig, ReplayInput
from moeedge.lab.traces.schedule import cut_schedule, recorded_schedule
from tests.lab.sim.test_replay import rows_of, walk
from tests.support.progress import SeenProgress
from tests.support.traces import two_texts

POLICIES = ("spac", "lfu", "mixtral-offloading", "hybrimoe")
LIMITS = (0.2, 1.0)


def panel_of(
    n_texts: int,
    policies: tuple[str, ...] = POLICIES,
    limits: tuple[float, ...] = LIMITS,
    *,
    fresh_memory: bool = False,
) -> tuple[ReplayInput, CurvePanel]:
    schedule = cut_schedule(walk(30, 3, n_texts=n_texts), gamma=2, acceptance_chance=0.7, seed=1)
    given = ReplayInput(schedule, "walk.npz")
    config = ReplayConfig(policies=policies, ratios=(0.3,), fresh_memory=fresh_memory)
    return given, trace_curves([given], config, limits)[0]


@pytest.mark.parametrize("fresh_memory", [False, True])
def test_points_are_replays_at_each_limit(fresh_memory: bool) -> None:
    given, panel = panel_of(9, fresh_memory=fresh_memory)
    n_layers = len(given.schedule.trace.expert_layers())
    for limit in (*LIMITS, None):
        rows = rows_of(given, *POLICIES, ratio=0.3, max_uploads=limit, fresh_memory=fresh_memory)
        for point in panel.points:
            if point.max_uploads != limit:
                continue
            row = rows[point.policy]
            assert point.hit_rate_pairs.value == row.hit_rate_pairs
            assert point.uploads_per_layer_step == row.uploads_per_layer_step
            assert point.pairs_hit.sum() / panel.pairs.sum() == pytest.approx(row.hit_rate_pairs, abs=1e-6)
            assert point.uploads.sum() / panel.steps / n_layers == pytest.approx(row.uploads_per_layer_step, abs=1e-6)
    assert [point.policy for point in panel.points].count("spac") == 3
    assert [point.policy for point in panel.points].count("mixtral-offloading") == 1  # loads on demand: no limit
    assert [point.policy for point in panel.points].count("hybrimoe") == 1  # its predictor lacks its input
    assert panel.apart == ("mixtral-offloading", "hybrimoe")


def test_limits_that_bind_no_policy_are_left_out() -> None:
    _, panel = panel_of(9, limits=(0.2, 50.0))
    assert [point.max_uploads for point in panel.points if point.policy == "spac"] == [0.2, None]
    reached = {(entry.policy, entry.uploads): entry.hit_rate_pairs for entry in panel.at_most}
    assert reached["spac", 50.0] == reached["spac", None]


def test_at_most_is_the_best_point_that_uses_no_more() -> None:
    _, panel = panel_of(9)
    for entry in panel.at_most:
        reached = [
            point.hit_rate_pairs.value
            for point in panel.points
            if point.policy == entry.policy
            and (entry.uploads is None or point.uploads_per_layer_step <= entry.uploads + 1e-6)
        ]
        assert entry.hit_rate_pairs.value == max(reached)
    named = {(entry.policy, entry.uploads) for entry in panel.at_most}
    assert ("mixtral-offloading", 0.2) not in named and ("mixtral-offloading", None) in named
    best = {(entry.policy, entry.uploads): entry.hit_rate_pairs.value for entry in panel.at_most}
    assert best["spac", 0.2] <= best["spac", 1.0] <= best["spac", None]


def test_intervals_are_those_of_resampled_texts() -> None:
    """The same texts drawn one by one, from the sums of each text; a policy is no better than itself."""
    _, panel = panel_of(40, policies=("spac", "lfu"))
    entries = {(entry.policy, entry.uploads): entry for entry in panel.at_most}
    spac, lfu = (
        next(
            point
            for point in panel.points
            if (point.policy, point.max_uploads) == (name, entries[name, 1.0].max_uploads)
        )
        for name in ("spac", "lfu")
    )
    rng = np.random.default_rng(5)
    rates, leads = [], []
    for _ in range(2000):
        drawn = rng.integers(0, 40, 40)
        pairs = panel.pairs[drawn].sum()
        rates.append(spac.pairs_hit[drawn].sum() / pairs)
        leads.append(rates[-1] - lfu.pairs_hit[drawn].sum() / pairs)
    rate, lead = entries["spac", 1.0].hit_rate_pairs, entries["spac", 1.0].beyond_reference
    assert rate == spac.hit_rate_pairs and rate.low < rate.value < rate.high
    assert [rate.low, rate.high] == pytest.approx(np.percentile(rates, [2.5, 97.5]).tolist(), abs=0.004)
    assert lead.value == pytest.approx(rate.value - lfu.hit_rate_pairs.value, abs=1e-6)
    assert [lead.low, lead.high] == pytest.approx(np.percentile(leads, [2.5, 97.5]).tolist(), abs=0.004)
    itself = entries["lfu", 1.0].beyond_reference
    assert (itself.low, itself.value, itself.high) == (0, 0, 0)


def test_few_texts_are_resampled_in_blocks_of_steps() -> None:
    given, panel = panel_of(2)
    assert panel.unit == "4 steps" and panel.pairs.size == -(-given.schedule.n_steps // 4)
    assert panel_of(9)[1].unit == "text"


def test_the_same_whatever_the_number_of_processes() -> None:
    schedule = recorded_schedule(two_texts())
    inputs, config = [ReplayInput(schedule)], ReplayConfig(policies=("spac", "lfu"), ratios=(0.25, 0.5))
    progress = SeenProgress()
    alone, shared = (
        json.dumps(
            [panel.as_dict() for panel in trace_curves(inputs, config, LIMITS, n_processes=n, progress=progress)]
        )
        for n in (1, 2)
    )
    assert alone == shared and all(panel["points"] for panel in json.loads(alone))
    assert progress.amounts == [1] * 12


@pytest.mark.parametrize("limits", [(), (-1.0,), (float("nan"),)])
def test_impossible_limits_are_refused(limits: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="limits"):
        trace_curves([], ReplayConfig(policies=("lfu",), ratios=(0.3,)), limits)


def test_every_resample_has_as_many_units() -> None:
    weights = bootstrap_weights(7, 50, 0)
    assert weights.shape == (50, 7) and (weights.sum(axis=1) == 7).all()
    assert (weights == bootstrap_weights(7, 50, 0)).all()
