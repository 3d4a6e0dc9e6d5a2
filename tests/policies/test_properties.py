"""Rules that every policy keeps, for any shape of cache, any residency and any ablation; and their settings."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moeedge.errors import InputError
from moeedge.experts import count_ids
from moeedge.lab.policies.spac_paper import SpacProgram
from moeedge.lab.sim.policy_replay import Slots
from moeedge.policies.base import (
    ABLATIONS,
    REQUIRED_INPUTS,
    CacheShape,
    ExpertPrediction,
    Observation,
    Plan,
    Policy,
    PolicyConfig,
)
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.policies.registry import (
    BOUNDS,
    POLICIES,
    SIMULATED,
    TABLE,
    expand_names,
    further,
    ignored_ablations,
    make_policy,
)
from tests.support.costs import cost_model
from tests.support.plans import check_plan

FURTHER = further()  # modules without a row of the table
# one of each kind
FAST = ("spac", "spac-paper", "lru", "lfu", "static", "moe-infinity", "fate", "sp-moe-prefetch", *FURTHER)
PLANNING = [name for name in TABLE if name not in BOUNDS]
EVERY_POLICY = [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in PLANNING]

# whose layers have slots of their own
LAYERWISE = ("fate", "adapmoe", "hybrimoe", "sp-moe", "sp-moe-prefetch", "mixtral-offloading")


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
    times = draw(st.sampled_from([None, (1e-6, 0.0), (1e-3, 1e-4), (1e-5, 1e-2)]))
    return PolicyConfig(
        gamma=draw(st.integers(0, 8)),
        cap=cap,
        ablations=draw(st.frozensets(st.sampled_from(sorted(ABLATIONS)), max_size=3)),
        cost_model=None if times is None else cost_model(1e-4, *times, cap=cap),
        predictor_bytes=draw(st.sampled_from([0, 300, 64 << 20])),
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
        counts = count_ids(ids, shape.n_experts).astype(np.uint32)
        tokens = rng.integers(0, 30, n_tokens).astype(np.int32)
        known = rng.random() < 0.8
        scores = rng.dirichlet(np.ones(shape.n_experts), (shape.n_layers, n_tokens)).astype(np.float32)
        steps.append(
            Observation(
                counts,
                n_tokens,
                0 if prefill else int(rng.integers(0, n_tokens)),
                tokens if known else None,
                ids if known else None,
                (np.ones(ids.shape) / n_used).astype(np.float32) if known else None,
                prefill=prefill,
                router_scores=scores if rng.random() < 0.3 else None,
            )
        )
    return steps


def prediction_of(shape: CacheShape, rng: np.random.Generator) -> ExpertPrediction | None:
    """Experts predicted for some tokens and some layers; None at times."""
    if rng.random() < 0.3:
        return None
    n_used = min(3, shape.n_experts)
    order = rng.random((shape.n_layers, int(rng.integers(1, 9)), shape.n_experts)).argsort(axis=2)
    ids = order[:, :, :n_used].astype(np.int32)
    ids[rng.random(shape.n_layers) < 0.3] = -1
    ids[shape.group < 0] = -1
    return ExpertPrediction(ids)


def within_capacity(slots: Slots, shape: CacheShape) -> bool:
    held = [np.count_nonzero(slots.resident[shape.group == group]) for group in range(shape.n_groups)]
    return bool((np.array(held) <= shape.capacity).all())


def slots_of_another_policy(shape: CacheShape, rng: np.random.Generator) -> Slots:
    """Slots as another policy may have left them: any experts, as many as there is room for at most."""
    slots = Slots(shape)
    for group, capacity in enumerate(shape.capacity.tolist()):
        layers = np.flatnonzero(shape.group == group)
        flat_ids = rng.permutation(layers.size * shape.n_experts)[: int(rng.integers(0, capacity + 1))]
        slots.resident[layers[flat_ids // shape.n_experts], flat_ids % shape.n_experts] = 1
        slots._held[group] = flat_ids.size
    return slots


@pytest.mark.parametrize("name", EVERY_POLICY)
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), config=configs(), seed=st.integers(0, 1000))
def test_plans_keep_the_rules(name: str, shape: CacheShape, config: PolicyConfig, seed: int) -> None:
    """Every plan passes `check_plan`, and carried out it never fills more slots than there are."""
    observed = observations(shape, seed, 8)
    policy = make_policy(name, shape, config)
    cap = SpacProgram.CAP if name == "spac-program" else config.cap  # the program's own
    cap = 1 if "no-spec-ue" in config.ablations and name.startswith("spac") else cap
    slots = Slots(shape)
    rng = np.random.default_rng(seed)
    for observation in observed:
        policy.observe(observation)
        if rng.random() < 0.2:
            slots = slots_of_another_policy(shape, rng)
        for upcoming in ([], [3], rng.integers(0, 40, 5).tolist()):
            resident = slots.resident.copy()
            # some of them are still on their way, and a backend may show residency as truth values
            resident[(resident == 1) & (rng.random(resident.shape) < 0.2)] = 2
            check_plan(policy.plan(resident, upcoming, prediction_of(shape, rng)), shape, resident, cap)
            truth = slots.resident.astype(np.bool_)
            check_plan(policy.plan(truth, upcoming, prediction_of(shape, rng)), shape, truth, cap)
            plan = policy.plan(slots.resident, upcoming, prediction_of(shape, rng))
            check_plan(plan, shape, slots.resident, cap)
            slots.push(plan)
            assert within_capacity(slots, shape)
        plan_layers(policy, shape, slots, cap, rng)
        if rng.random() < 0.1:
            policy.reset()


def plan_layers(policy: Policy, shape: CacheShape, slots: Slots, cap: int, rng: np.random.Generator) -> None:
    """One verification of a policy that plans within it: the rules hold, and no expert in use is evicted."""
    if not policy.execution_model.prefetch_within_step:
        return
    for layer in range(shape.n_layers):
        plan = policy.plan_layer(layer, slots.resident, prediction_of(shape, rng))
        check_plan(plan, shape, slots.resident, cap)
        assert layer not in plan.victims[:, 0], "a layer that computes loses an expert"
        slots.push(plan)
        assert within_capacity(slots, shape)


@pytest.mark.parametrize("name", LAYERWISE)
@settings(max_examples=25, deadline=None)
@given(shape=shapes(), seed=st.integers(0, 1000))
def test_layers_grow_beyond_their_shares_into_free_slots_only(name: str, shape: CacheShape, seed: int) -> None:
    policy = make_policy(name, shape)
    slots, rng = slots_of_another_policy(shape, np.random.default_rng(seed)), np.random.default_rng(seed)
    for observation in observations(shape, seed, 24):  # adapmoe shares out anew after 16
        policy.observe(observation)
        before = slots.resident.sum(axis=1, dtype=int)
        slots.push(policy.plan(slots.resident, [1, 2], prediction_of(shape, rng)))
        shares = policy.shares  # type: ignore[attr-defined]
        lent = np.maximum(slots.resident.sum(axis=1, dtype=int) - np.maximum(before, shares), 0)
        for group, capacity in enumerate(shape.capacity.tolist()):
            mine = shape.group == group
            # a slot beyond a layer's share is free, too: its expert may leave instead
            borrowed = np.maximum(before - shares, 0)[mine].sum()
            assert lent[mine].sum() <= capacity - before[mine].sum() + borrowed
            assert shares[mine].sum() <= capacity


def copied(plan: Plan) -> list[np.ndarray]:
    return [field.copy() for field in vars(plan).values() if field is not None]


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_same_input_same_plans_and_inputs_stay_as_they_are(name: str) -> None:
    shape = CacheShape.uniform(5, 16, 20)
    observed = observations(shape, 1, 12)
    runs = []
    for _ in range(2):
        policy = make_policy(name, shape, PolicyConfig(cost_model=cost_model(1e-4, 2e-5, 1e-5)))
        slots, plans, rng = Slots(shape), [], np.random.default_rng(7)
        for observation in observed:
            policy.observe(observation)
            for _ in range(2):
                before, predicted = slots.resident.copy(), prediction_of(shape, rng)
                told = None if predicted is None else predicted.layer_ids.copy()
                plan = policy.plan(slots.resident, [1, 2, 3], predicted)
                assert np.array_equal(slots.resident, before)
                assert predicted is None or np.array_equal(predicted.layer_ids, told)
                plans += copied(plan)
                slots.push(plan)
            if policy.execution_model.prefetch_within_step:
                plan = policy.plan_layer(2, slots.resident, prediction_of(shape, rng))
                plans += copied(plan)
                slots.push(plan)
        runs.append(plans)
    assert all(np.array_equal(a, b) for a, b in zip(*runs, strict=True))
    for one, other in zip(observed, observations(shape, 1, 12), strict=True):
        assert np.array_equal(one.counts, other.counts)
        assert one.ids is None or np.array_equal(one.ids, other.ids)


# not spac-paper: the same counts in every step are no fluctuation, so no utility moves after the first
SYSTEMS = ("lfu", "moe-infinity", "fate", "adapmoe", "hybrimoe", "fiddler", "sp-moe", "mixtral-offloading")


@pytest.mark.parametrize("name", ["spac", "lru", "static", *SYSTEMS])
def test_all_slots_hold_what_is_used_when_everything_fits(name: str) -> None:
    shape = CacheShape.uniform(3, 8, 24)
    policy = make_policy(name, shape)
    slots = Slots(shape)
    ids = np.tile(np.array([1, 4, 6], dtype=np.int32), (3, 2, 1))
    for _ in range(12):
        policy.observe(Observation(count_ids(ids, 8), 2, 1, np.array([7, 8], dtype=np.int32), ids))
        slots.push(policy.plan(slots.resident, []))
    assert slots.resident[:, [1, 4, 6]].all()


class RecordingSet(frozenset[str]):
    """An empty set that records which names were looked up."""

    def __init__(self) -> None:
        self.names: set[object] = set()

    def __contains__(self, name: object) -> bool:
        self.names.add(name)
        return False


@pytest.mark.parametrize("name", EVERY_POLICY)
def test_the_table_lists_the_ablations_that_each_policy_reads(name: str) -> None:
    read = RecordingSet()
    config = PolicyConfig()
    object.__setattr__(config, "ablations", read)
    make_policy(name, CacheShape.uniform(2, 4, 3), config)
    listed = set(ABLATIONS) - set(ignored_ablations(name, frozenset(ABLATIONS)))
    assert listed == read.names | {"no-sd"} or (name in FURTHER and listed > read.names)


def test_names_and_mistakes() -> None:
    shape = CacheShape.uniform(2, 4, 3)
    for name in PLANNING:
        policy = make_policy(name, shape)
        assert policy.name == name
        assert policy.required_inputs <= set(REQUIRED_INPUTS)
        assert name not in ("llama-cpp", "llama-cpp-sd") or policy.execution_model.layerwise
    assert not set(POLICIES) & (set(SIMULATED) | set(BOUNDS))
    assert expand_names(["all"]) == [name for name in POLICIES | SIMULATED if name != "none"]
    for name in BOUNDS:
        with pytest.raises(ValueError, match="steps to come"):
            make_policy(name, shape)
    with pytest.raises(ValueError, match="spac-paper"):
        make_policy("mru", shape)
    with pytest.raises(ValueError, match="no-evict"):
        PolicyConfig(ablations=frozenset({"no-cache"}))
    with pytest.raises(ValueError, match="profile"):
        make_policy("static", shape, PolicyConfig(profile=np.ones((3, 4))))
    for mistake in ({"cap": 0}, {"gamma": -1}, {"forgetting": 2.0}, {"predictor_bytes": -1}, {"cutoff_layer": -1}):
        with pytest.raises(ValueError):
            PolicyConfig(**mistake)


@pytest.mark.parametrize("wrong", [{"budget": 0}, {"budget": -1}, {"ranking": "static"}, {"coverage": "none"}])
def test_unusable_expert_budgets_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        ExpertBudget(**{"budget": 4} | wrong)


def test_expert_budgets_by_layer_and_their_labels() -> None:
    layers = np.array([1, 2])
    assert ExpertBudget(budget=16).per_layer(layers, 3, 64, 8).tolist() == [0, 16, 16]
    for large in (99, 1 << 31, 1 << 80):
        assert ExpertBudget(budget=large).per_layer(layers, 3, 64, 8).tolist() == [0, 64, 64]
    assert ExpertBudget(budget=8).per_layer(layers, 3, 64, [0, 6, 8]).tolist() == [0, 8, 8]
    for used in (8, [0, 6, 8]):
        with pytest.raises(InputError):
            ExpertBudget(budget=7).per_layer(layers, 3, 64, used)
    assert ExpertBudget(budget=16).label == "budget 16 (lossy)"
    assert ExpertBudget(budget=16, coverage="truncation").label == "budget 16 truncation (lossy)"
    assert ExpertBudget(budget=8, ranking="router").label == "budget 8 router (lossy)"
