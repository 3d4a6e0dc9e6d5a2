"""The worked example of CONTRIBUTING.md: a new policy in thirty lines, checked as every policy is and replayed."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import moeedge.policies
from moeedge.lab.sim.policy_replay import Slots
from moeedge.lab.sim.replay import ReplayConfig, ReplayInput, replay
from moeedge.lab.traces.schedule import cut_schedule
from moeedge.policies import registry
from moeedge.policies.base import CacheShape, Observation, PolicyConfig
from moeedge.policies.planner import PooledPolicy
from moeedge.policies.registry import PolicyEntry, make_policy
from tests.support.plans import check_plan
from tests.support.traces import plain_text


class Window(PooledPolicy):
    """Keeps the experts that were used in most of the last `N_STEPS` steps.

    Score: the number of these steps that used the expert. Only experts of the last step are uploaded.
    """

    name = "window"
    N_STEPS = 8

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        size = (shape.n_layers, shape.n_experts)
        self._used = np.zeros(size, dtype=np.bool_)  # may be uploaded
        self._window = np.zeros((self.N_STEPS, *size), dtype=np.bool_)
        self._step = 0

    def observe(self, observation: Observation) -> None:
        """Takes in which experts the step used."""
        np.greater(observation.counts, 0, out=self._used)
        self._window[self._step % self.N_STEPS] = self._used
        self._step += 1
        self._score[:] = self._window.sum(axis=0)
        self._utility[:] = self._cap * self._score / self.N_STEPS  # 0..K: the integer part is the upload's priority


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in the table of moeedge/policies/registry.py does the same."""
    entry = PolicyEntry(Window, "most used in the last eight steps", ablations=registry.EVICTION_ABLATIONS)
    monkeypatch.setitem(registry.TABLE, "window", entry)


def test_a_module_of_the_package_is_a_policy_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ("from moeedge.policies.baselines import Lru", "class Coin(Lru):", '    name = "coin"')
    (tmp_path / "coin.py").write_text("\n".join(lines))
    monkeypatch.setattr(moeedge.policies, "__path__", [*moeedge.policies.__path__, str(tmp_path)])
    found = registry.further()
    assert "coin" in found and "coin" not in registry.TABLE
    assert found["coin"].make.name == "coin" and found["coin"].make.__module__ == "moeedge.policies.coin"
    monkeypatch.delitem(sys.modules, "moeedge.policies.coin")


def test_plans_keep_the_rules_and_hold_the_most_used_experts() -> None:
    shape = CacheShape.uniform(2, 8, 6)
    policy = make_policy("window", shape)
    slots, rng = Slots(shape), np.random.default_rng(0)
    for _ in range(30):
        counts = (rng.random((2, 8)) < 0.1).astype(np.uint32)
        counts[:, :3] = 2  # three experts of each layer are used in every step
        policy.observe(Observation(counts, n_tokens=4, n_accepted=3))
        plan = policy.plan(slots.resident, [])
        check_plan(plan, shape, slots.resident, cap=4)
        slots.push(plan)
    assert slots.resident[:, :3].all()


def test_the_replay_compares_it_with_the_bounds() -> None:
    schedule = cut_schedule(plain_text(40), gamma=3)
    rows = {
        row.policy: row
        for row in replay(ReplayInput(schedule), ReplayConfig(policies=("window", "lru"), ratios=(0.5,)))
    }
    assert 0 < rows["window"].hit_rate_pairs <= rows["oracle"].hit_rate_pairs
    assert rows["window"].hit_rate_experts <= rows["belady"].hit_rate_experts
