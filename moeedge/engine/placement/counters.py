"""What placement counts beside the native library, and how both become one record."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.types import PlacementStats, StepRecord
from moeedge.native.cache import CacheStats

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
            pairs_hit=now.pairs_device - start.pairs_device,
            unique=now.unique - start.unique,
            unique_hit=now.unique_device - start.unique_device,
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
