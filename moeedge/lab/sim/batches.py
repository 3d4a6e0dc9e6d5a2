"""What the replay and the simulator share: the cache for a trace, the observation of a batch, hits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, Observation
from moeedge.trace.format import Trace


def cache_shape(trace: Trace, ratio: float) -> CacheShape:
    """One pool of slots for a share `ratio` of the experts of all layers that the trace records."""
    meta, layers = trace.meta, trace.expert_layers()
    group = np.full(meta.n_layers, -1, dtype=np.int32)
    group[layers] = 0
    n_slots = int(ratio * len(layers) * meta.n_experts + 1e-9)
    return CacheShape(meta.n_layers, meta.n_experts, group, np.array([n_slots], dtype=np.int32))


def observation_of(batch: Batch) -> Observation:
    """What a policy sees of a batch after its computation; a trace has no weights and scores of routers."""
    return Observation(
        counts=batch.counts,
        n_tokens=batch.n_tokens,
        n_accepted=batch.n_accepted,
        tokens=batch.tokens,
        ids=batch.ids,
        prefill=batch.prefill,
    )


@dataclass
class HitStats:
    """Hits and uploads, summed over batches that are not prompts."""

    pairs: int = 0  # (token, expert)
    pairs_hit: int = 0
    unique: int = 0  # distinct experts, summed over batches and layers
    unique_hit: int = 0
    uploads: int = 0  # experts moved to the device, on demand or not

    def add(self, counts: NDArray[np.integer[Any]], is_hit: NDArray[np.bool_]) -> None:
        """Adds experts by their activations and by whether they were resident; arrays of the same shape."""
        used = counts > 0
        self.pairs += int(counts.sum())
        self.pairs_hit += int(counts[is_hit].sum())
        self.unique += int(np.count_nonzero(used))
        self.unique_hit += int(np.count_nonzero(used & is_hit))

    @property
    def hit_rate_pairs(self) -> float:
        """Share of the pairs whose expert was resident; 0 without any."""
        return self.pairs_hit / max(self.pairs, 1)

    @property
    def hit_rate_experts(self) -> float:
        """Share of the distinct experts that were resident; 0 without any."""
        return self.unique_hit / max(self.unique, 1)
