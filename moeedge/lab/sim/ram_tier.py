"""Experts of a model larger than the memory: slots in RAM, and a disk from which absent experts are read on demand.

The rules are those of the engine's cache in RAM. The CPU computes no expert that is not there. Once a layer's routing
is known, its absent experts are read one after the other, each into a free slot or that of the resident expert with the
lowest score, unless the layer uses it; of equal ones goes the one used longest ago. Scores are the policy's after the
last step. The CPU computes the resident experts meanwhile, and each of the others as it arrives. A prompt takes no
time, but its loads replace others in the same way, layer by layer. A batch that needs nearly all experts of a layer
adds its tokens' shares to the scores, and takes the slots of layers that it has passed before those of others.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import Residency
from moeedge.lab.sim.batches import HitStats, observation_of
from moeedge.lab.sim.clock import Clock, Log, to_ns
from moeedge.lab.sim.mover import Demand, Mover
from moeedge.lab.sim.step_costs import StepCosts
from moeedge.lab.traces.schedule import Batch
from moeedge.policies.base import CacheShape, ScoringPolicy

_NEARLY_ALL = 0.75  # of a layer's experts (ram_executor's nearly_all)


@dataclass(frozen=True, kw_only=True)
class RamTierConfig:
    """The slots and the disk."""

    ratio: float  # share of the experts that have a slot
    disk_bytes_per_s: float  # of several reads at a time (moeedge calibrate --disk)
    expert_bytes: float
    latency_s: float = 0.0  # of a load, in addition to its bytes
    policy: str = "lfu"  # whose scores say which expert leaves

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1:
            raise ValueError(f"the share of the experts in RAM must be in (0, 1], not {self.ratio}")
        if not (self.disk_bytes_per_s > 0 and self.expert_bytes > 0):
            raise ValueError("a disk has a rate above 0, and an expert has bytes")
        if not self.latency_s >= 0:
            raise ValueError(f"the latency of the disk must be >= 0, not {self.latency_s}")

    @property
    def load_ns(self) -> int:
        """Time of one load."""
        return to_ns(self.expert_bytes / self.disk_bytes_per_s + self.latency_s)

    def row(self, hits: HitStats, n_tokens: int) -> dict[str, Any]:
        """The tier and its figures, flat. hits: of experts that the CPU computed; n_tokens: of text."""
        return {
            "ram_ratio": self.ratio,
            "disk_bytes_per_s": self.disk_bytes_per_s,
            "ram_hit_rate_pairs": hits.hit_rate_pairs,
            "ram_hit_rate_experts": hits.hit_rate_experts,
            "disk_bytes_per_token": (hits.unique - hits.unique_hit) * self.expert_bytes / max(n_tokens, 1),
        }


class RamSlots(Mover):
    """The slots in RAM with their disk, which is a link that carries demands alone."""

    def __init__(
        self, clock: Clock, log: Log, costs: StepCosts, shape: CacheShape, policy: ScoringPolicy, tier: RamTierConfig
    ) -> None:
        loads = replace(costs, demand_ns=tier.load_ns, latency_ns=0)
        super().__init__(clock, log, loads, shape, batched=False, stream="disk")
        self.hits = HitStats()
        self._policy = policy
        self._score = policy.score.copy()  # until the next step
        self._used_at = np.zeros(self.resident.shape, dtype=np.int64)  # number of the block that used an expert last
        self._n_blocks = 0

    def begin_text(self) -> None:
        """A new text begins; what is in the slots stays."""
        self._policy.reset()

    def observe(self, batch: Batch) -> None:
        """Takes in the routing of a batch; a prompt's experts are loaded now."""
        if batch.prefill:
            for layer, counts in enumerate(batch.counts):
                used = np.flatnonzero(counts)
                is_scan = used.size >= _NEARLY_ALL * counts.size
                if is_scan:
                    self._score[layer] += counts / batch.n_tokens
                self._replace(layer, used, used[self.resident[layer, used] != Residency.RESIDENT], is_scan=is_scan)
        self._policy.observe(observation_of(batch))
        np.copyto(self._score, self._policy.score)
        self.clear_staging()

    def load(self, layer: int, counts: NDArray[np.int32], used: NDArray[np.intp]) -> list[tuple[int, Demand]]:
        """Begins to read the absent ones among the experts that the CPU computes for a layer; returns them."""
        is_hit = self.resident[layer, used] == Residency.RESIDENT
        self.hits.add(counts[used], is_hit)
        absent = used[~is_hit]
        self._replace(layer, used, absent)
        return [(expert, self.demand(layer, [expert])) for expert in absent.tolist()]

    def _replace(self, layer: int, used: NDArray[np.intp], absent: NDArray[np.intp], *, is_scan: bool = False) -> None:
        """Gives the absent ones of a layer's experts in use slots; no other layer asks for them before they arrive."""
        self._n_blocks += 1
        self._used_at[layer, used] = self._n_blocks
        for expert in absent.tolist():
            if self._make_room(layer, used, is_scan=is_scan):
                self.resident[layer, expert] = Residency.RESIDENT

    def _make_room(self, layer: int, used: NDArray[np.intp], *, is_scan: bool) -> bool:
        """Takes a slot for an expert of the layer; False where all are in use. is_scan: a later layer's last."""
        group = int(self.shape.group[layer])
        if self._free[group] > 0:
            self._free[group] -= 1
            return True
        may_leave = (self.resident == Residency.RESIDENT) & (self.shape.group == group)[:, None]
        may_leave[layer, used] = False
        if not may_leave.any():
            return False
        if is_scan and may_leave[: layer + 1].any():
            may_leave[layer + 1 :] = False
        score = np.where(may_leave, self._score, np.inf)
        lowest = score == score.min()
        oldest = np.where(lowest & may_leave, self._used_at, np.iinfo(np.int64).max).argmin()
        self.resident.flat[oldest] = Residency.ABSENT
        return True
