"""Hits of a cache whose slots are in several pools, each for some of the layers, by replay of a routing trace.

    python -m tests.benchmarks.split_pools TRACE... --out RECORD.json

A device limits the size of a tensor, so a large cache has several pools (native/src/slot-pools.h), and an expert can
take slots of its layer's pool only. "runs" gives a pool neighbouring layers, as the cache does, "strided" every n-th.
Slots are in proportion to layers; the number of pools 1 is a cache that no device limits.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moeedge.lab.sim.policy_replay import PolicyReplay
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import Schedule, cache_shape, schedules, texts_of
from moeedge.policies.base import CacheShape, PolicyConfig
from moeedge.policies.registry import make_policy
from tests.benchmarks.rows import keep_rows

SCHEMA = "moeedge-split-pools-1"


@dataclass(frozen=True, kw_only=True)
class Row:
    """What one policy found in one trace."""

    trace: str
    policy: str
    cache_ratio: float
    layout: str  # "runs" or "strided"
    n_pools: int
    n_slots: int
    pairs: int
    pairs_hit: int
    uploads: int

    @property
    def hit_rate(self) -> float:
        return self.pairs_hit / max(self.pairs, 1)

    def __str__(self) -> str:
        return (
            f"{self.trace} {self.policy} {self.cache_ratio} {self.n_pools} {self.layout}: "
            f"{self.hit_rate:.4f} hits, {self.uploads} uploads"
        )


def split(shape: CacheShape, n_pools: int, *, strided: bool) -> CacheShape:
    """The shape of one pool, with its layers divided among `n_pools`; as many slots in all."""
    layers = np.flatnonzero(shape.group >= 0)
    rank = np.arange(layers.size)
    pool = rank % n_pools if strided else rank * n_pools // layers.size
    group = shape.group.copy()
    group[layers] = pool
    ends = np.rint(np.cumsum(np.bincount(pool, minlength=n_pools)) * int(shape.capacity[0]) / layers.size)
    return CacheShape(shape.n_layers, shape.n_experts, group, np.diff(ends, prepend=0).astype(np.int32))


def measure(name: str, schedule: Schedule, policies: list[str], ratios: list[float], pools: list[int]) -> Iterator[Row]:
    """A row for each policy, size and number of pools."""
    for ratio in ratios:
        whole = cache_shape(schedule.trace, ratio)
        for policy in policies:
            for n_pools in pools:
                for strided in (False, True) if n_pools > 1 else (False,):
                    shape = split(whole, n_pools, strided=strided)
                    replay = PolicyReplay(make_policy(policy, shape, PolicyConfig(gamma=schedule.gamma)), shape)
                    for chunk in schedule.chunks():
                        replay.run(chunk)
                    hits = replay.stats.hits
                    yield Row(
                        trace=name,
                        policy=policy,
                        cache_ratio=ratio,
                        layout="strided" if strided else "runs",
                        n_pools=n_pools,
                        n_slots=int(shape.capacity.sum()),
                        pairs=hits.pairs,
                        pairs_hit=hits.pairs_hit,
                        uploads=hits.uploads,
                    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", nargs="+", type=Path)
    parser.add_argument("--policy", default="spac,lfu,lru")
    parser.add_argument("--cache-ratio", default="0.17,0.3,0.6")
    parser.add_argument("--pools", default="1,2,4,8")
    parser.add_argument("--gamma", type=int, default=0, help="draft length; 0: plain decoding")
    parser.add_argument("--texts", type=int, default=20, help="how many texts of each trace, from the first on")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    policies = options.policy.split(",")
    ratios = [float(ratio) for ratio in options.cache_ratio.split(",")]
    pools = [int(n) for n in options.pools.split(",")]
    rows = (
        row
        for path in options.traces
        for schedule in schedules(texts_of(read_trace(path), 0, options.texts), gamma=options.gamma)
        for row in measure(path.name, schedule, policies, ratios, pools)
    )
    keep_rows(rows, SCHEMA, options.out)


if __name__ == "__main__":
    main()
