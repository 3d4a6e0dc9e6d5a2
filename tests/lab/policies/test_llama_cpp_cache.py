"""llama.cpp's shared LRU against an ordered dictionary, in the replay and in the simulator."""

from __future__ import annotations

from collections import OrderedDict

import numpy as np
import pytest

from moeedge.lab.sim.execution import Execution
from moeedge.lab.sim.noisy_predictor import NO_PREDICTOR
from moeedge.lab.sim.step_costs import TOKENS_MAX
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape
from moeedge.policies.registry import make_policy
from tests.lab.sim.test_simulate_events import costs
from tests.support.plans import CheckedReplay

LINK_NS, SYNC_NS, LATENCY_NS = 100, 7, 3
DEVICE_NS = np.minimum(np.arange(TOKENS_MAX + 1), 1).astype(np.int64) * 10


class Lru:
    """Slots of one pool, oldest first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.slots: OrderedDict[tuple[int, int], None] = OrderedDict()

    def compute(self, layer: int, counts: np.ndarray) -> set[int]:
        """The experts that were resident: none where the batch might use more than there are slots."""
        if min(int(counts.sum()), counts.size) > self.capacity:
            return set()
        experts = np.flatnonzero(counts).tolist()
        hits = self.found(layer, experts)
        for expert in sorted(hits):
            self.slots.move_to_end((layer, expert))
        for expert in experts:
            if expert not in hits:
                if len(self.slots) >= self.capacity:
                    self.slots.popitem(last=False)
                self.slots[layer, expert] = None
        return hits

    def found(self, layer: int, experts: list[int]) -> set[int]:
        return {expert for expert in experts if (layer, expert) in self.slots}


def batches(n_layers: int, n_experts: int, lengths: list[int], seed: int = 0) -> list[Batch]:
    rng = np.random.default_rng(seed)
    found = []
    for index, n_tokens in enumerate(lengths):
        ids = rng.zipf(1.4, (n_layers, n_tokens, 2)).clip(1, n_experts).astype(np.int32) - 1
        counts = np.stack([np.bincount(layer.reshape(-1), minlength=n_experts) for layer in ids]).astype(np.int32)
        found.append(Batch(ids=ids, counts=counts, n_tokens=n_tokens, n_accepted=n_tokens - 1, is_first=index == 0))
    return found


def expected(steps: list[Batch], capacities: dict[int, int], group: list[int]) -> list[np.ndarray]:
    """Which experts each layer finds, bool [n_layers, n_experts] by step."""
    pools = {index: Lru(capacity) for index, capacity in capacities.items()}
    rows = []
    for step in steps:
        found = np.zeros(step.counts.shape, dtype=bool)
        for layer in range(len(group)):
            pool, used = pools[group[layer]], np.flatnonzero(step.counts[layer]).tolist()
            large = step.n_tokens > 32  # takes what is there
            hits = pool.found(layer, used) if large else pool.compute(layer, step.counts[layer])
            found[layer, list(hits)] = True
        rows.append(found)
    return rows


@pytest.mark.parametrize("capacities", [(14,), (3, 4), (10, 4), (25, 4)])
def test_replay_and_simulator_show_the_same_cache(capacities: tuple[int, ...]) -> None:
    group = [0, len(capacities) - 1, 0]
    shape = CacheShape(3, 12, np.array(group, dtype=np.int32), np.array(capacities, dtype=np.int32))
    steps = batches(3, 12, [2, 9, 3, 40, 2, 2, 9, 1] * 4)
    found = expected(steps, dict(enumerate(capacities)), group)
    n_hits = sum(int(step.counts[hit].sum()) for step, hit in zip(steps, found, strict=True))
    n_loads = sum(int(((step.counts > 0) & ~hit).sum()) for step, hit in zip(steps, found, strict=True))
    assert n_hits > 0

    replayed = CheckedReplay(make_policy("llama-cpp-cache", shape), shape, max_uploads=0.1)
    for step in steps:
        replayed.run(step)
    stats = replayed.stats
    assert (stats.hits.pairs_hit, stats.hits.uploads, stats.on_demand) == (n_hits, n_loads, n_loads)

    times = {"sync_ns": SYNC_NS, "transfer_ns": LINK_NS, "demand_ns": LINK_NS, "latency_ns": LATENCY_NS}
    simulated = costs(device_ns=DEVICE_NS, **times)
    time = Execution(simulated, shape, make_policy("llama-cpp-cache", shape), steps, accuracy=NO_PREDICTOR).run()
    assert (time.hits.pairs_hit, time.hits.uploads) == (n_hits, n_loads)
    layers_with_misses = sum(int(((s.counts > 0) & ~h).any(axis=1).sum()) for s, h in zip(steps, found, strict=True))
    assert time.ns["load"] == n_loads * LINK_NS + layers_with_misses * LATENCY_NS  # one transfer per layer
    assert time.ns["host"] == len(steps) * 3 * SYNC_NS
    assert time.ns["cpu"] == 0
