"""Figures of expert placement: one record of the native library's counters and the engine's own."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.native.cache import CacheStats
from moeedge.policies.base import LookaheadStatus
from moeedge.records import counter, counters, gauge, quotient
from moeedge.scheduler.cache_governor import CacheChoice
from moeedge.scheduler.governor import DraftChoice

# What has become of a tier since it was opened. shrunk: it has given slots back, where memory ran short; lost: its
# experts are computed from elsewhere, as the device failed or the file cannot be read; fallen back: llama.cpp's GPU
# failed, and the answer went on with another context, without plans
TierState = Literal["whole", "shrunk", "lost", "fallen back"]


@dataclass(kw_only=True, eq=False)  # arrays do not compare to one truth value
class StepRecord:
    """One step of the loop: draft, verify, observe, plan, prefetch."""

    tokens: list[int]  # emitted: accepted drafts and the one token that the target adds, already cut at a stop token
    n_drafted: int = 0
    n_accepted: int = 0
    n_verified: int = 0  # tokens in the verification batch; 0: a prompt
    experts_unique: float = 0.0  # distinct ones that verification computed, mean over MoE layers; 0: dense or stock
    experts_natural: float = 0.0  # those that the router had selected, where an expert budget computes fewer
    experts_max: int = 0  # most distinct experts of any layer under an expert budget
    # share of the routing probability that shortlisted experts hold of the router's, mean; None: no budget
    kept_probability: float | None = None
    substituted_layers: int = 0  # where truncation was asked for, and the experts' weights were not recognised
    draft_s: float = 0.0
    verify_s: float = 0.0
    observe_s: float = 0.0  # sensing and scheduling; set at the end of the step
    drafts: list[int] = field(default_factory=list)  # the drafted tokens, rejected ones included
    # float32 [n_states, n_embd], the draft's hidden states of the batch's first tokens; None where they are not kept
    hidden_states: NDArray[np.float32] | None = None
    confidences: list[float] = field(default_factory=list)  # of the drafts, where `choice` depends on them
    choice: DraftChoice | None = None  # of the draft length; None where it is fixed


@dataclass(frozen=True, kw_only=True)
class PlacementStats(CacheStats):
    """Figures of expert placement since the session began, those of the native cache included.

    `newer - older` gives the counters of the interval, and the gauges of the newer record.
    """

    device: str = gauge("Label of the device", default="")
    is_device: bool = gauge("Whether the slots are on a device, not in RAM", default=True, in_json=False)
    place: str = gauge('Where they are, as "on CUDA0" or "in RAM"', default="", in_json=False)
    state: TierState = gauge("What has become of the tier", default="whole", in_json=False)
    policy: str = gauge("The policy", default="")
    cache_ratio: float = gauge("Share of all experts that have a slot", default=0.0, most=1)
    n_layers: int = gauge("Layers whose experts share the slots")
    slots_total: int = gauge("Slots")
    pool_bytes: int = gauge("Memory of the slots", "bytes")
    vram_used_bytes: int | None = gauge(
        "Memory in use on the entire device, as its driver says; null: unknown", "bytes", default=None
    )
    vram_total_bytes: int | None = gauge("Memory of the device; null: unknown", "bytes", default=None)
    steps: int = counter("verifications and plain decodes")
    tokens: int = counter("emitted by these steps", "tokens")
    schedule_s: float = counter("what the decoding thread pays for placement", "s")
    plan_s: float = counter("policy and plans, in a thread next to the models where there is one", "s")
    draft_s: float = counter("drafting", "s")
    decode_s: float = counter("entire steps", "s")
    tau: tuple[float, ...] = gauge(
        "Thresholds of the layers, the newest: an expert of this utility or more is hot; empty for other policies",
        default=(),
        least=None,
        kind=list[float | None],
    )
    lookahead: LookaheadStatus | None = gauge(
        "Whether experts are predicted from the drafts; null where the policy does not judge it", default=None
    )
    ram: PlacementStats | None = gauge(
        "The same of experts in RAM, next to those on the device; left out where there are none",
        default=None,
        optional=True,
    )
    choice: CacheChoice | None = gauge(
        "Whether the cache pays by what steps take; left out where it is not asked",
        default=None,
        key="cache_choice",
        optional=True,
    )

    hit_rate_pairs = quotient("pairs_hit", "pairs", "Pair hits: share of pairs that the device computed", most=1)
    hit_rate_experts = quotient(
        "unique_hit", "unique", "Expert hits: share of distinct experts per block that were resident", most=1
    )
    uploads_per_layer_step = quotient("uploads", "n_layers steps", "Experts uploaded per layer and step")
    evictions_per_layer_step = quotient("evictions", "n_layers steps", "Experts evicted per layer and step")
    link_bytes_per_s = quotient("bytes_moved", "transfer_s", "Rate while a transfer was under way", "bytes/s")
    bytes_per_token = quotient(
        "bytes_moved", "tokens", "Experts moved per emitted token, those of prompts too", "bytes"
    )
    wait_share = quotient("wait_s", "decode_s", "Share of the steps' time that waited for the device, or for the disk")

    @property
    def tiers(self) -> list[PlacementStats]:
        """The figures of each tier, fastest first."""
        return [self] if self.ram is None else [self, self.ram]

    def __sub__(self, older: PlacementStats) -> PlacementStats:
        intervals = {name: getattr(self, name) - getattr(older, name) for name in counters(PlacementStats)}
        ram = self.ram if self.ram is None or older.ram is None else self.ram - older.ram
        return PlacementStats(**{**vars(self), **intervals, "ram": ram})
