"""What placement counts beside the native library, and how both become one record."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.native.cache import CacheStats


@dataclass(frozen=True)
class StepRecord:
    """One step of the loop: draft -> verify -> observe -> schedule -> prefetch.

    `tokens` are those emitted in this step (accepted drafts and the one token that the target adds), already cut at a
    stop token. `experts_unique` is the mean over the MoE layers of the number of distinct experts that verification
    touched (0 for a dense model or in stock mode).
    """

    tokens: list[int]
    n_drafted: int
    n_accepted: int
    n_verified: int  # tokens in the verification batch
    experts_unique: float
    draft_s: float
    verify_s: float
    observe_s: float  # sensing and scheduling
    drafts: list[int] = field(default_factory=list)  # the drafted tokens, refused ones included
    # float32 [n_states, n_embd], the draft's hidden states of the batch's first tokens; None where they are not kept
    hidden_states: NDArray[np.float32] | None = None


@dataclass(frozen=True)
class PlacementStats:
    """Counters of expert placement since the session began; `newer - older` gives those between.

    Figures that are no counters (slots_used, tau, memory, medians, lost) are those of the newer one.
    """

    device: str  # label
    policy: str
    cache_ratio: float
    slots_used: int
    slots_total: int
    pool_bytes: int
    vram_used_bytes: int | None  # of the whole device, as its driver says; None: unknown
    vram_total_bytes: int | None
    steps: int = 0  # verifications and plain decodes
    pairs: int = 0  # (token, expert) pairs computed, prefill included
    pairs_hit: int = 0  # of these on the device
    unique: int = 0  # distinct experts per block, of batches of at most 64 tokens
    unique_hit: int = 0
    uploads: int = 0
    evictions: int = 0
    cancelled: int = 0  # uploads that a newer plan dropped before they began
    bytes_moved: int = 0
    transfers: int = 0  # of one expert or of several
    transfer_s: float = 0.0  # the mover's, beside everything else
    cpu_s: float = 0.0  # of computing blocks
    device_s: float = 0.0
    wait_s: float = 0.0  # for the device, after the CPU's part was done
    partition_s: float = 0.0  # splitting, gathering, scattering, submitting
    schedule_s: float = 0.0  # policy and plan
    draft_s: float = 0.0
    decode_s: float = 0.0  # whole steps
    blocks: int = 0
    blocks_unknown: int = 0  # chains that were not understood: on the CPU
    tau: tuple[float, ...] = ()  # per expert layer, the newest
    lost: bool = False
    partition_us_median_1: float | None = None  # per block of 1 token; None: no such block yet
    partition_us_median_9: float | None = None  # per block of 9 tokens

    @property
    def hit_rate_pairs(self) -> float | None:
        """Share of the pairs that the device computed; None before the first."""
        return self.pairs_hit / self.pairs if self.pairs else None

    @property
    def hit_rate_unique(self) -> float | None:
        """Share of the distinct experts per block that were resident; None before the first."""
        return self.unique_hit / self.unique if self.unique else None

    @property
    def uploads_per_step(self) -> float | None:
        """Experts uploaded per step; None before the first."""
        return self.uploads / self.steps if self.steps else None

    @property
    def evictions_per_step(self) -> float | None:
        """Experts evicted per step; None before the first."""
        return self.evictions / self.steps if self.steps else None

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second while something was being transferred; None before the first transfer."""
        return self.bytes_moved / self.transfer_s if self.transfer_s > 0 else None

    def __sub__(self, older: PlacementStats) -> PlacementStats:
        counted = {name: getattr(self, name) - getattr(older, name) for name in _COUNTERS}
        return replace(self, **counted)

    def to_dict(self) -> dict[str, Any]:
        """All fields and rates, as a JSON record holds them."""
        rates = ("hit_rate_pairs", "hit_rate_unique", "uploads_per_step", "evictions_per_step", "link_bytes_per_s")
        record: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(self)}
        record["tau"] = list(self.tau)
        return record | {name: getattr(self, name) for name in rates}


_COUNTERS = (
    "steps",
    "pairs",
    "pairs_hit",
    "unique",
    "unique_hit",
    "uploads",
    "evictions",
    "cancelled",
    "bytes_moved",
    "transfers",
    "transfer_s",
    "cpu_s",
    "device_s",
    "wait_s",
    "partition_s",
    "schedule_s",
    "draft_s",
    "decode_s",
    "blocks",
    "blocks_unknown",
)


_WATCHED_TOKENS = (1, 9)  # plain decoding, and a verification with gamma 8
_KEPT_BLOCKS = 1 << 14  # newest records per watched batch size: 340 steps of a model of 48 layers


class Counters:
    """The Python side's sums since the session began, and the native counters when it did."""

    def __init__(self, start: CacheStats) -> None:
        self.steps = 0
        self.schedule_s = 0.0
        self.draft_s = 0.0
        self.decode_s = 0.0
        self._start = start
        self._partition_us: dict[int, deque[float]] = {n: deque(maxlen=_KEPT_BLOCKS) for n in _WATCHED_TOKENS}

    def add_step(self, record: StepRecord) -> None:
        """A verification or plain decode; its scheduling is added by itself."""
        self.steps += 1
        self.draft_s += record.draft_s
        self.decode_s += record.draft_s + record.verify_s + record.observe_s

    def add_schedule(self, seconds: float) -> None:
        """Time that the policy and its plan took, which is part of a step's."""
        self.schedule_s += seconds
        self.decode_s += seconds

    def take_blocks(self, records: NDArray[Any]) -> None:
        """Keeps the partition times of `records` (BLOCK_RECORD) whose pairs were split."""
        split = records[records["pairs_device"] > 0]
        for n_tokens, kept in self._partition_us.items():
            kept.extend((split["partition_ns"][split["n_tokens"] == n_tokens] * 1e-3).tolist())

    def partition_us_median(self, n_tokens: int) -> float | None:
        """Median over the kept blocks of `n_tokens` tokens; None without one."""
        kept = self._partition_us[n_tokens]
        return float(np.median(kept)) if kept else None

    def record(
        self,
        now: CacheStats,
        *,
        device: str,
        policy: str,
        cache_ratio: float,
        slots_total: int,
        pool_bytes: int,
        vram: tuple[int, int] | None,
        tau: tuple[float, ...],
    ) -> PlacementStats:
        """Everything since the session began; `vram` is used and total bytes of the device."""
        start = self._start
        return PlacementStats(
            device=device,
            policy=policy,
            cache_ratio=cache_ratio,
            slots_used=now.slots_used,
            slots_total=slots_total,
            pool_bytes=pool_bytes,
            vram_used_bytes=vram[0] if vram else None,
            vram_total_bytes=vram[1] if vram else None,
            steps=self.steps,
            pairs=now.pairs - start.pairs,
            pairs_hit=now.pairs_hit - start.pairs_hit,
            unique=now.unique - start.unique,
            unique_hit=now.unique_hit - start.unique_hit,
            uploads=now.uploads - start.uploads,
            evictions=now.evictions - start.evictions,
            cancelled=now.cancelled - start.cancelled,
            bytes_moved=now.bytes_moved - start.bytes_moved,
            transfers=now.transfers - start.transfers,
            transfer_s=now.transfer_s - start.transfer_s,
            cpu_s=now.cpu_s - start.cpu_s,
            device_s=now.device_s - start.device_s,
            wait_s=now.wait_s - start.wait_s,
            partition_s=now.partition_s - start.partition_s,
            schedule_s=self.schedule_s,
            draft_s=self.draft_s,
            decode_s=self.decode_s,
            blocks=now.blocks - start.blocks,
            blocks_unknown=now.blocks_unknown - start.blocks_unknown,
            tau=tau,
            lost=now.lost,
            partition_us_median_1=self.partition_us_median(1),
            partition_us_median_9=self.partition_us_median(9),
        )
