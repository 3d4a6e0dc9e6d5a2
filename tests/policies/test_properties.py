"""What every policy owes the mover, for any shape of cache, any residency and any ablation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.policies import ABLATIONS, POLICIES, PolicyConfig, ignored_ablations, make_policy
from moeedge.scheduler.policy import CacheShape, Observation, Plan, check_plan
from moeedge.scheduler.units import Units
from tests.policies.replay import Slots, count


def units(cap: int, device_s: float, transfer_s: float) -> Units:
    """A machine whose CPU takes 100 us per expert."""
    return Units(
        cpu_expert_s=np.r_[0.0, np.linspace(1e-4, 2e-4, 9)],
        device_expert_s=np.r_[0.0, np.linspace(1, 1.5, 9)] * device_s,
        transfer_expert_s=transfer_s,
        draft_token_s=1e-4,
        block_overhead_s=1e-5,
        r_c=np.linspace(0.2, 0.9, cap + 1),
        r_g=np.linspace(0.9, 0.1, cap + 1),
    )


@st.composite
def shapes(draw: st.DrawFn) -> CacheShape:
    """One to three groups, interleaved; some layers may have no experts, some groups no slots."""
    n_layers, n_experts, n_groups = draw(st.integers(1, 6)), draw(st.integers(1, 12)), draw(st.integers(1, 3))
    group = draw(st.lists(st.integers(-1, n_groups - 1), min_size=n_layers, max_size=n_layers))
    capacity = draw(st.lists(st.integers(0, n_layers * n_experts), min_size=n_groups, max_size=n_groups))
    return CacheShape(n_layers, n_experts, np.array(group, dtype=np.int32), np.array(capacity, dtype=np.int32))


@st.composite
def configs(draw: st.DrawFn) -> PolicyConfig:
    cap = draw(st.integers(1, 6))
    measured = draw(st.sampled_from([None, units(cap, 1e-6, 0.0), units(cap, 1e-3, 1e-4), units(cap, 1e-5, 1e-2)]))
    return PolicyConfig(
        gamma=draw(st.integers(0, 8)),
        cap=cap,
        ablations=draw(st.frozensets(st.sampled_from(sorted(ABLATIONS)), max_size=3)),
        units=measured,
        lookahead_bytes=draw(st.sampled_from([0, 300, 64 << 20])),
    )


def observations(shape: CacheShape, seed: int, n_steps: int) -> list[Observation]:
    """Random steps: prefills, plain decoding and verifications, with and without ids, some rows not recorded."""
    rng = np.random.default_rng(seed)
    n_used = min(3, shape.n_experts)
    steps = []
    for step in range(n_steps):
        prefill = step == 0 or rng.random() < 0.1
        n_tokens = int(rng.integers(1, 40 if prefill else 10))
        order = rng.random((shape.n_layers, n_tokens, shape.n_experts)).argsort(axis=2)[:, :, :n_used]
        ids = order.astype(np.int32)
        ids[shape.group < 0] = -1
        if rng.random() < 0.3:
            ids[-1, : n_tokens // 2] = -1
        counts = count(ids, shape.n_experts)
        tokens = rng.integers(0, 30, n_tokens).astype(np.int32)
        known = rng.random() < 0.8
        steps.append(
            Observation(
                counts,
                n_tokens,
                0 if prefill else int(rng.integers(0, n_tokens)),
                tokens if known else None,
                ids if known else None,
                prefill=prefill,
            )
        )
    return steps


@pytest.mark.parametrize("name", POLICIES)
@settings(max_examples=60, deadline=None)
@given(shape=shapes(), config=configs(), seed=st.integers(0, 1000))
def test_plans_keep_the_rules(name: str, shape: CacheShape, config: PolicyConfig, seed: int) -> None:
    """Every plan passes `check_plan`, and carried out it never fills more slots than there are."""
    policy = make_policy(name, shape, config)
    cap = 1 if "no-spec-ue" in config.ablations and name.startswith("spac") else config.cap
    slots = Slots(shape)
    rng = np.random.default_rng(seed)
    for observation in observations(shape, seed, 8):
        policy.observe(observation)
        for upcoming in ([], [3], rng.integers(0, 40, 5).tolist()):
            resident = slots.resident.copy()
            # some of them are still on their way, and a backend may show residency as truth values
            resident[(resident == 1) & (rng.random(resident.shape) < 0.2)] = 2
            check_plan(policy.plan(resident, upcoming), shape, resident, cap)
            truth = slots.resident.astype(np.bool_)
            check_plan(policy.plan(truth, upcoming), shape, truth, cap)
            plan = policy.plan(slots.resident, upcoming)
            check_plan(plan, shape, slots.resident, cap)
            slots.execute(plan)
            for group, capacity in enumerate(shape.capacity):
                assert np.count_nonzero(slots.resident[shape.group == group]) <= capacity
        if rng.random() < 0.1:
            policy.reset()


def copied(plan: Plan) -> list[np.ndarray]:
    return [
        field.copy() for field in (plan.tau, plan.utility, plan.uploads, plan.levels, plan.victims, plan.victim_utility)
    ]


@pytest.mark.parametrize("name", POLICIES)
def test_same_input_same_plans(name: str) -> None:
    shape = CacheShape.uniform(5, 16, 20)
    runs = []
    for _ in range(2):
        policy = make_policy(name, shape, PolicyConfig(units=units(4, 2e-5, 1e-5)))
        slots, plans = Slots(shape), []
        for observation in observations(shape, 1, 12):
            policy.observe(observation)
            plan = policy.plan(slots.resident, [1, 2, 3])
            plans += copied(plan)
            slots.execute(plan)
        runs.append(plans)
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("name", POLICIES)
def test_inputs_stay_as_they_are(name: str) -> None:
    shape = CacheShape.uniform(4, 8, 10)
    policy = make_policy(name, shape)
    resident = np.zeros((4, 8), dtype=np.uint8)
    for observation in observations(shape, 2, 4):
        kept = (observation.counts.copy(), observation.ids.copy() if observation.ids is not None else None)
        policy.observe(observation)
        policy.plan(resident, [1])
        assert np.array_equal(observation.counts, kept[0])
        assert observation.ids is None or np.array_equal(observation.ids, kept[1])
    assert not resident.any()


# not spac-paper: the same counts in every step are no fluctuation, so no utility moves after the first
@pytest.mark.parametrize("name", ["spac", "lru", "static"])
def test_all_slots_hold_what_is_used_when_everything_fits(name: str) -> None:
    shape = CacheShape.uniform(3, 8, 24)
    policy = make_policy(name, shape)
    slots = Slots(shape)
    ids = np.tile(np.array([1, 4, 6], dtype=np.int32), (3, 2, 1))
    for _ in range(12):
        policy.observe(Observation(count(ids, 8), 2, 1, np.array([7, 8], dtype=np.int32), ids))
        slots.execute(policy.plan(slots.resident, []))
    assert slots.resident[:, [1, 4, 6]].all()


class Asked(frozenset[str]):
    """An empty set that remembers what was looked for."""

    def __init__(self) -> None:
        self.names: set[object] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(name)
        return False


@pytest.mark.parametrize("name", POLICIES)
def test_an_ablation_is_ignored_where_the_policy_has_no_part_for_it(name: str) -> None:
    asked = Asked()
    config = PolicyConfig()
    object.__setattr__(config, "ablations", asked)
    make_policy(name, CacheShape.uniform(2, 4, 3), config)
    heeded = set(ABLATIONS) - set(ignored_ablations(name, frozenset(ABLATIONS)))
    assert heeded == asked.names | {"no-sd"}


def test_names_and_mistakes() -> None:
    shape = CacheShape.uniform(2, 4, 3)
    for name in POLICIES:
        assert make_policy(name, shape).name == name
    with pytest.raises(ValueError, match="spac-paper"):
        make_policy("mru", shape)
    with pytest.raises(ValueError, match="no-evict"):
        PolicyConfig(ablations=frozenset({"no-cache"}))
    with pytest.raises(ValueError, match="profile"):
        make_policy("static", shape, PolicyConfig(profile=np.ones((3, 4))))
    for mistake in ({"cap": 0}, {"gamma": -1}, {"forgetting": 2.0}, {"lookahead_bytes": -1}):
        with pytest.raises(ValueError):
            PolicyConfig(**mistake)
