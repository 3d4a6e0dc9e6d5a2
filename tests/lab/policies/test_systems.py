"""Each published system's own rule, against its definition written out in plain Python or its paper's numbers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from moeedge.lab.policies.hybrimoe import Queue
from moeedge.lab.policies.prefetching import (
    AdapMoe,
    Arc,
    allocate,
    critical_experts,
    cutoff_layer,
    expected_loads,
    shallow_shares,
)
from moeedge.lab.sim.policy_replay import Slots
from moeedge.policies.base import CacheShape, ExpertPrediction, Observation, Plan, Policy, PolicyConfig, limit_uploads
from moeedge.policies.planner import even_shares
from moeedge.policies.registry import make_policy
from tests.support.costs import cost_model

N_EXPERTS = 8


def step_of(ids: NDArray[np.int32], n_experts: int = N_EXPERTS, **more: object) -> Observation:
    """ids [n_layers, n_tokens, k]."""
    counts = np.stack([np.bincount(layer.ravel(), minlength=n_experts) for layer in ids])
    return Observation(counts, ids.shape[1], ids.shape[1] - 1, None, ids, **more)


def requests(seed: int, n: int, n_experts: int = N_EXPERTS) -> list[int]:
    """One expert after the other, some more popular."""
    rng = np.random.default_rng(seed)
    return rng.choice(n_experts, n, p=rng.dirichlet(np.full(n_experts, 0.6))).tolist()


def resident_after(policy: Policy, shape: CacheShape, string: list[int]) -> list[set[int]]:
    """Experts in the slots of the only layer after each request."""
    slots = Slots(shape)
    seen = []
    for expert in string:
        policy.observe(step_of(np.full((1, 1, 1), expert, dtype=np.int32)))
        slots.push(policy.plan(slots.resident, []))
        seen.append(set(np.flatnonzero(slots.resident[0]).tolist()))
    return seen


@pytest.mark.parametrize("name", ["lru", "mixtral-offloading", "adapmoe", "sp-moe"])
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(1, 6))
def test_lru_is_an_ordered_dictionary(name: str, seed: int, size: int) -> None:
    shape = CacheShape.uniform(1, N_EXPERTS, size)
    string = requests(seed, 40)
    cache: OrderedDict[int, None] = OrderedDict()
    want = []
    for expert in string:
        cache.pop(expert, None)
        cache[expert] = None
        if len(cache) > size:
            cache.popitem(last=False)
        want.append(set(cache))
    assert resident_after(make_policy(name, shape), shape, string) == want


class PlainArc:
    """Megiddo & Modha (FAST 2003), Figure 4, for one request at a time; without its rule for |T1| exactly p."""

    def __init__(self, size: int) -> None:
        self.c, self.p = size, 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def replace(self) -> None:
        if self.t1 and (len(self.t1) > self.p or not self.t2):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None

    def request(self, x: int) -> None:
        if x in self.t1 or x in self.t2:  # case I
            self.t1.pop(x, None)
            self.t2.pop(x, None)
            self.t2[x] = None
        elif x in self.b1 or x in self.b2:  # cases II and III
            recent, other = (self.b1, self.b2) if x in self.b1 else (self.b2, self.b1)
            step = max(len(other) / len(recent), 1.0)
            self.p = min(self.p + step, self.c) if x in self.b1 else max(self.p - step, 0.0)
            self.replace()
            del recent[x]
            self.t2[x] = None
        else:  # case IV
            if len(self.t1) + len(self.b1) == self.c:
                if len(self.t1) < self.c:
                    self.b1.popitem(last=False)
                    self.replace()
                else:
                    self.t1.popitem(last=False)
            elif len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) >= self.c:
                if len(self.t1) + len(self.t2) + len(self.b1) + len(self.b2) == 2 * self.c:
                    self.b2.popitem(last=False)
                self.replace()
            self.t1[x] = None


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10_000), size=st.integers(2, 5))
def test_arc_follows_its_paper(seed: int, size: int) -> None:
    plain = PlainArc(size)
    ours = Arc(np.array([size]), 12)
    last = np.zeros((1, 12), dtype=np.float32)
    for now, expert in enumerate(requests(seed, 60, 12), start=1):
        used = np.zeros((1, 12), dtype=np.bool_)
        used[0, expert] = True
        last[0, expert] = now
        ours.request(used, last)
        plain.request(expert)
        assert set(np.flatnonzero(ours.held[0]).tolist()) == set(plain.t1) | set(plain.t2)


def test_fate_favours_the_first_layer() -> None:
    assert shallow_shares(CacheShape.uniform(4, 8, 32)).tolist() == [8, 8, 8, 8]
    shares = shallow_shares(CacheShape.uniform(24, 32, 122))
    assert shares.sum() == 122 and shares[0] == 30 and set(shares[1:].tolist()) == {4}


def test_moe_infinity_follows_the_most_similar_text() -> None:
    shape = CacheShape.uniform(2, N_EXPERTS, 4)
    policy = make_policy("moe-infinity", shape)
    for low, high in ((0, 1), (4, 5)):  # two texts: layer 0 uses `low`, layer 1 uses `high`
        for _ in range(3):
            policy.observe(step_of(np.array([[[low]], [[high]]], dtype=np.int32)))
        policy.reset()
    text = np.array([[[4]], [[7]]], dtype=np.int32)  # a third begins like the second
    policy.observe(step_of(text))
    slots = Slots(shape)
    slots.push(policy.plan(slots.resident, []))
    assert slots.resident[0, 4] and slots.resident[1, 5] and slots.resident[1, 7]


def test_a_prompt_alone_leaves_nothing_to_moe_infinitys_next_text() -> None:
    shape = CacheShape.uniform(1, N_EXPERTS, 4)
    policies = [make_policy("moe-infinity", shape) for _ in range(2)]
    policies[0].observe(replace(step_of(np.array([[[3]]], dtype=np.int32)), prefill=True))
    for policy in policies:
        policy.reset()
    empty = np.zeros((1, N_EXPERTS), dtype=np.uint8)
    first, second = (policy.plan(empty, []) for policy in policies)
    assert np.array_equal(first.utility, second.utility)


def test_moe_infinity_wants_near_layers_first() -> None:
    shape = CacheShape.uniform(4, 4, 2)
    policy = make_policy("moe-infinity", shape)
    policy.observe(step_of(np.full((4, 1, 1), 2, dtype=np.int32), 4))
    plan = policy.plan(np.zeros((4, 4), dtype=np.uint8), [])
    assert plan.uploads.tolist() == [[0, 2], [1, 2]]
    hot = plan.utility >= 1  # those that fit the slots
    assert hot.sum() == 2 and hot[[0, 1], [2, 2]].all() and (plan.utility[~hot] < 1).all()
    plan = policy.plan_layer(1, np.zeros((4, 4), dtype=np.uint8))
    assert plan.uploads.tolist() == [[2, 2], [3, 2]]


def test_hybrimoe_averages_the_highest_scores() -> None:
    """S = alpha TopP(s) + (1 - alpha) S with alpha 0.5; p is twice the experts per token."""
    shape = CacheShape.uniform(1, N_EXPERTS, 3)
    policy = make_policy("hybrimoe", shape)
    want = np.zeros(N_EXPERTS)
    rng = np.random.default_rng(1)
    for _ in range(5):
        scores = rng.dirichlet(np.ones(N_EXPERTS)).astype(np.float32)
        ids = np.argsort(-scores)[:2].astype(np.int32).reshape(1, 1, 2)
        policy.observe(step_of(ids, router_scores=scores.reshape(1, 1, -1)))
        top = np.where(scores >= np.sort(scores)[-4], scores, 0.0)
        want = 0.5 * top + 0.5 * want
    assert np.allclose(policy._score[0], want, atol=1e-6)


def greedy_queue(tokens: list[int], there: list[bool]) -> float:
    """HSS as HybriMoE's repository runs it, with its constants; when the slower side is done."""
    cached = sorted((t for t, here in zip(tokens, there, strict=True) if here and t), reverse=True)
    absent = sorted((t for t, here in zip(tokens, there, strict=True) if not here and t), reverse=True)
    queue = [(t, False) for t in cached] + [(t, True) for t in absent]
    gpu = cpu = moved = 0.0
    first = True
    while queue:
        gpu_time = 0.5
        if queue[0][1]:
            gpu_time += max(moved + 0.418 - gpu, 0.0)
        cpu_time = queue[-1][0] + (0.79 if first else 0.0)
        if gpu + gpu_time <= cpu + cpu_time:
            moved += 0.418 if queue[0][1] else 0.0
            gpu += gpu_time
            queue.pop(0)
        else:
            cpu += cpu_time
            first = False
            queue.pop()
    return max(gpu, cpu)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_hybrimoe_shares_a_layer_as_well_as_its_queue(seed: int) -> None:
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, 6, (3, N_EXPERTS))
    there = rng.random((3, N_EXPERTS)) < 0.4
    done = Queue(None)._split(tokens.astype(np.float32), there)[2]
    for row in range(3):
        greedy = greedy_queue(tokens[row].tolist(), there[row].tolist())
        assert done[row] <= greedy + 1e-9
        assert greedy <= done[row] + 0.5 + 0.418 + 6.79  # the greedy rule is off by one expert at most


def test_hybrimoe_prefetches_where_it_saves_most() -> None:
    counts = np.zeros((3, N_EXPERTS), dtype=np.float32)
    counts[1, 2], counts[2, 5] = 1, 9
    queue = Queue(cost_model(1e-3, 1e-4, 5e-3))  # a slow link: what is absent stays on the CPU
    assert queue.most_impact(counts, np.zeros((3, N_EXPERTS), dtype=np.bool_)) == (2, 5)
    assert queue.most_impact(counts, np.ones((3, N_EXPERTS), dtype=np.bool_)) is None
    there = np.zeros((3, N_EXPERTS), dtype=np.bool_)
    there[1, 2] = there[2, 5] = True
    counts[2, 4] = 3
    assert queue.most_impact(counts, there) == (2, 4)


def test_adapmoe_expects_the_loads_of_its_repository() -> None:
    """src/dp.py without gating: f2 + f3 + f4 for two of eight experts."""
    for accuracy in (0.0, 0.57, 0.9):
        for size in range(9):
            both = (8 - size) * (7 - size) / 56
            one = 2 * (8 - size) * size / 56
            f = 2 * both * (1 - accuracy) + both * accuracy + one * (1 - accuracy)
            assert expected_loads(8, np.array([accuracy]), 2)[0, size] == pytest.approx(f)


def test_adapmoe_allocates_as_dynamic_programming() -> None:
    accuracy = np.array([0.0, 0.95, 0.6])
    loads = expected_loads(6, accuracy, 2)
    for n_slots in range(19):
        shares = allocate(CacheShape.uniform(3, 6, n_slots), accuracy, 2)
        assert shares.sum() == n_slots
        best = min(
            loads[0, a] + loads[1, b] + loads[2, n_slots - a - b]
            for a in range(7)
            for b in range(7)
            if 0 <= n_slots - a - b <= 6
        )
        assert loads[np.arange(3), shares].sum() == pytest.approx(best)


def test_adapmoe_prefetches_one_expert_per_layer() -> None:
    shape = CacheShape.uniform(2, N_EXPERTS, 6)
    policy = make_policy("adapmoe", shape)
    hints = ExpertPrediction(np.array([[[1, 2], [1, 3]], [[4, 5], [5, 6]]], dtype=np.int32))
    plan = policy.plan(np.zeros((2, N_EXPERTS), dtype=np.uint8), [], hints)
    assert plan.uploads.tolist() == [[0, 1], [1, 5]]


def test_adapmoe_measures_every_layer_within_the_steps() -> None:
    """As in engine and simulator: before each layer, with predictions for the layers after it alone."""
    shape = CacheShape.uniform(3, N_EXPERTS, 12)
    policy = make_policy("adapmoe", shape)
    assert isinstance(policy, AdapMoe)
    ids = np.tile(np.array([[2, 3]], dtype=np.int32), (3, 1, 1))
    resident = np.zeros((3, N_EXPERTS), dtype=np.uint8)
    for _ in range(16):
        policy.plan(resident, [])
        for layer in range(3):
            predicted = np.full((3, 1, 2), -1, dtype=np.int32)
            predicted[layer + 1 :] = [2, 3]
            predicted[2] = [2, 5] if layer == 1 else [6, 7]  # the nearest look counts: half of it is right
            policy.plan_layer(layer, resident, ExpertPrediction(predicted))
        policy.observe(step_of(ids))
    want = allocate(shape, np.array([0.0, 1.0, 0.5]), 2)
    assert policy.shares.tolist() == want.tolist() != even_shares(shape).tolist()


@pytest.mark.parametrize("name", ["fate", "adapmoe", "mixtral-offloading", "hybrimoe"])
@pytest.mark.parametrize(("predicted_layer", "uploads"), [(3, [[3, 5]]), (1, [])])
def test_gates_look_ahead_over_layers_without_experts(
    name: str, predicted_layer: int, uploads: list[list[int]]
) -> None:
    """As in llama4, whose every other layer is dense: the next layer with experts is prefetched, no earlier one."""
    shape = CacheShape(5, N_EXPERTS, np.array([-1, 0, -1, 0, -1], dtype=np.int32), np.array([8], dtype=np.int32))
    predicted = np.full((5, 2, 1), -1, dtype=np.int32)
    predicted[predicted_layer] = 5
    resident = np.zeros((5, N_EXPERTS), dtype=np.uint8)
    plan = make_policy(name, shape).plan_layer(1, resident, ExpertPrediction(predicted))
    assert plan.uploads.tolist() == uploads


def ends_s(n_layers: int, k: int, layer_s: float, transfer_s: float) -> float:
    """When the last of k experts of each of so many layers has arrived: each is known once its layer is computed."""
    free_s = 0.0
    for layer in range(n_layers):
        free_s = max(free_s, (layer + 1) * layer_s) + k * transfer_s
    return free_s


def test_sp_moe_solves_its_constraints() -> None:
    """The deepest layer whose experts find room and arrive while the draft works (section 3.2)."""
    assert cutoff_layer(32, 1, 1000, 0.25, 0.014) == 17  # Mixtral's 14 ms per expert
    # layers of 10 ms and loads of 1 ms: the last layer's experts are known as drafting ends
    assert cutoff_layer(32, 1, 1000, 32 * 0.010, 0.001) == 31
    rng = np.random.default_rng(0)
    for _ in range(300):
        n_layers, k, n_slots = int(rng.integers(1, 40)), int(rng.integers(1, 7)), int(rng.integers(0, 200))
        layer_s, transfer_s = rng.uniform(1e-4, 1e-2, 2)
        found = cutoff_layer(n_layers, k, n_slots, n_layers * layer_s, transfer_s)
        fits = [
            n
            for n in range(n_layers + 1)
            if n * k <= n_slots and ends_s(n, k, layer_s, transfer_s) <= n_layers * layer_s
        ]
        assert found == max(fits)
    # two drafts of 0.1 s: the second one's experts of a layer take 4 ms, those of both 6 ms
    assert cutoff_layer(10, 6, 1000, 0.1, 0.001, 2, 4) == min(9, int((0.2 - 0.01) / 0.006))
    assert cutoff_layer(10, 60, 1000, 0.1, 0.001, 2, 4) == int((0.2 - 0.01) / 0.06)
    assert cutoff_layer(10, 2, 100, 0.0, 0.0) == 10  # nothing measured: memory alone
    assert cutoff_layer(10, 2, 100, 0.0, 1e-3) == 0  # no draft, no time


def test_sp_moe_expects_more_experts_of_more_drafts() -> None:
    """With gamma tokens both the time and the experts grow, the experts by less than gamma."""
    rng = np.random.default_rng(0)
    for k, gamma, n in ((2, 1, 8), (4, 8, 32), (8, 3, 128)):
        drawn = [np.unique(rng.random((gamma, n)).argsort(axis=1)[:, :k]).size for _ in range(2000)]
        assert critical_experts(k, gamma, n, n) == pytest.approx(np.mean(drawn), rel=0.02)
        assert critical_experts(k, gamma, n, 0) == k
    shape, units = CacheShape.uniform(24, 32, 24 * 32), cost_model(1.0, 0.1, 1e-3, draft_token_s=0.03)
    configs = [PolicyConfig(gamma=gamma, cost_model=units) for gamma in (1, 8)]
    cutoffs = [make_policy("sp-moe", shape, config).cutoff(4) for config in configs]
    assert cutoffs == [7, 11]  # 30 / 4 ms; 240 / 21 ms, not 240 / 4


def test_sp_moe_prefetches_before_its_cutoff_only() -> None:
    shape = CacheShape.uniform(3, N_EXPERTS, 9)
    ids = np.tile(np.array([[1, 2]], dtype=np.int32), (3, 2, 1))
    for cutoff in range(4):
        policy = make_policy("sp-moe", shape, PolicyConfig(cutoff_layer=cutoff))
        plan = policy.plan(np.zeros((3, N_EXPERTS), dtype=np.uint8), [7, 8], ExpertPrediction(ids))
        assert plan.uploads.tolist() == [[layer, expert] for layer in range(cutoff) for expert in (1, 2)]


def test_sp_moe_keeps_what_it_just_brought() -> None:
    """It goes to the recent end of the queue (section 4.4)."""
    shape = CacheShape.uniform(1, N_EXPERTS, 3)
    policy = make_policy("sp-moe", shape)
    slots = Slots(shape)
    policy.observe(step_of(np.array([[[0], [1], [2]]], dtype=np.int32)))
    slots.push(policy.plan(slots.resident, []))
    slots.push(policy.plan(slots.resident, [1, 2], ExpertPrediction(np.array([[[5]]], dtype=np.int32))))
    assert set(np.flatnonzero(slots.resident[0])) == {1, 2, 5}
    policy.observe(step_of(np.array([[[6]]], dtype=np.int32)))
    slots.push(policy.plan(slots.resident, []))
    assert set(np.flatnonzero(slots.resident[0])) == {2, 5, 6}


def test_llama_cpp_keeps_the_last_layers_and_accelerate_the_first() -> None:
    shape = CacheShape.uniform(5, N_EXPERTS, 2 * N_EXPERTS + 3)
    for name, layers in (("llama-cpp", [3, 4]), ("llama-cpp-sd", [3, 4]), ("vllm", [3, 4]), ("accelerate", [0, 1])):
        slots = Slots(shape)
        policy = make_policy(name, shape)
        for _ in range(2):
            slots.push(policy.plan(slots.resident, []))
        assert np.flatnonzero(slots.resident.all(axis=1)).tolist() == layers, name
        assert np.count_nonzero(slots.resident) == 2 * N_EXPERTS
        assert len(policy.plan(slots.resident, []).uploads) == 0


def test_fiddler_places_the_most_popular_for_good() -> None:
    shape = CacheShape.uniform(2, 4, 3)
    profile = np.array([[9, 1, 1, 1], [1, 8, 7, 1]])
    policy = make_policy("fiddler", shape, PolicyConfig(profile=profile))
    plan = policy.plan(np.zeros((2, 4), dtype=np.uint8), [])
    assert {tuple(pair) for pair in plan.uploads.tolist()} == {(0, 0), (1, 1), (1, 2)}
    slots = Slots(shape)
    slots.push(plan)
    policy.observe(step_of(np.full((2, 9, 1), 3, dtype=np.int32), 4))
    assert len(policy.plan(slots.resident, []).uploads) == 0


def test_a_limited_plan_keeps_its_best_uploads_and_what_is_loaded_already() -> None:
    score = np.array([[5.0, 1.0, 4.0, 3.0]], dtype=np.float32)
    pairs = np.array([[0, 3], [0, 1], [0, 0], [0, 2]], dtype=np.int32)
    plan = Plan(
        tau=np.ones(1, dtype=np.float32),
        utility=score,
        uploads=pairs,
        priority=np.array([3, 2, 1, 1], dtype=np.uint8),
        victims=pairs[:0],
        victim_utility=np.zeros(0, dtype=np.float32),
    )
    assert limit_uploads(plan, score, None).uploads.tolist() == pairs.tolist()
    limited = limit_uploads(plan, score, 2)
    assert (limited.uploads[:, 1].tolist(), limited.priority.tolist()) == ([0, 2], [1, 1])
    staged = np.array([[False, True, False, False]])
    limited = limit_uploads(plan, score, 1, staged)
    assert (limited.uploads[:, 1].tolist(), limited.priority.tolist()) == ([1, 0], [2, 1])


def test_the_link_does_not_limit_what_is_kept_of_the_loads_on_demand() -> None:
    """An LRU that loads each missing expert keeps it, whatever the link carries in addition."""
    rng = np.random.default_rng(0)
    shape = CacheShape.uniform(2, 8, 6)
    counts = [(rng.random((2, 8)) < 0.3).astype(np.uint32) for _ in range(20)]
    kept = []
    for max_uploads in (None, 0.0):
        policy = make_policy("mixtral-offloading", shape, PolicyConfig(max_uploads=max_uploads))
        slots = Slots(shape)
        for frame in counts:
            policy.observe(Observation(frame, 9, 8))
            slots.push(policy.plan(slots.resident, []))
        kept.append(slots.resident.tolist())
    assert kept[0] == kept[1] and np.count_nonzero(kept[0]) == 6
