"""Figures of expert placement: one record of the native library's counters and the engine's own."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.native.cache import CacheStats, ExpertCache
from moeedge.native.structs import counter, counters
from moeedge.policies.base import LookaheadStatus
from moeedge.scheduler.cache_governor import CacheChoice
from moeedge.scheduler.governor import DraftChoice


@dataclass(kw_only=True, eq=False)  # arrays do not compare to one truth value
class StepRecord:
    """One step of the loop: draft, verify, observe, plan, prefetch. `n_verified` 0: a prompt.

    `tokens` are those emitted in this step (accepted drafts and the one token that the target adds), already cut at a
    stop token. `experts_unique` is the mean over the MoE layers of the number of distinct experts that verification
    used (0 for a dense model or in stock mode). Under an expert budget it counts the experts that were computed,
    `experts_natural` those that the router had selected, and `kept_probability` is not None.
    """

    tokens: list[int]
    n_drafted: int = 0
    n_accepted: int = 0
    n_verified: int = 0  # tokens in the verification batch
    experts_unique: float = 0.0
    experts_natural: float = 0.0
    experts_max: int = 0  # most distinct experts of any layer under an expert budget
    # share of the routing probability of the router's experts that shortlisted ones hold, mean over layers
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

    device: str = ""  # label
    policy: str = ""
    cache_ratio: float = 0.0
    n_layers: int = 0  # whose experts share the slots
    slots_total: int = 0
    pool_bytes: int = 0
    vram_used_bytes: int | None = None  # of the entire device, as its driver says; None: unknown
    vram_total_bytes: int | None = None
    steps: int = counter("verifications and plain decodes")
    tokens: int = counter("emitted by these steps", "tokens")
    schedule_s: float = counter("what the decoding thread pays for placement", "s")
    plan_s: float = counter("policy and plans, in a thread next to the models where there is one", "s")
    draft_s: float = counter("drafting", "s")
    decode_s: float = counter("entire steps", "s")
    tau: tuple[float, ...] = ()  # [n_cached_layers], the newest
    lookahead: LookaheadStatus | None = None  # None: the policy does not judge it
    ram: PlacementStats | None = None  # of experts in RAM next to those on the device; None: no cache there
    choice: CacheChoice | None = None  # whether the cache pays by what steps take; None: not asked

    @property
    def hit_rate_pairs(self) -> float | None:
        """Share of the (token, expert) pairs that the device computed; None before the first."""
        return self.pairs_hit / self.pairs if self.pairs else None

    @property
    def hit_rate_experts(self) -> float | None:
        """Share of the distinct experts per block that were resident; None before the first."""
        return self.unique_hit / self.unique if self.unique else None

    @property
    def uploads_per_layer_step(self) -> float | None:
        """Experts uploaded per layer and step; None before the first."""
        return self._per_layer_step(self.uploads)

    @property
    def evictions_per_layer_step(self) -> float | None:
        """Experts evicted per layer and step; None before the first."""
        return self._per_layer_step(self.evictions)

    def _per_layer_step(self, n_experts: int) -> float | None:
        n_layer_steps = self.n_layers * self.steps
        return n_experts / n_layer_steps if n_layer_steps else None

    @property
    def link_bytes_per_s(self) -> float | None:
        """Bytes per second while a transfer was under way; None before the first transfer."""
        return self.bytes_moved / self.transfer_s if self.transfer_s > 0 else None

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of experts moved per emitted token, those of prompts included; None before the first."""
        return self.bytes_moved / self.tokens if self.tokens else None

    @property
    def wait_share(self) -> float | None:
        """Share of the steps' time that waits for the device, or for the disk; None before the first."""
        return self.wait_s / self.decode_s if self.decode_s > 0 else None

    def __sub__(self, older: PlacementStats) -> PlacementStats:
        intervals = {name: getattr(self, name) - getattr(older, name) for name in counters(self)}
        ram = self.ram if self.ram is None or older.ram is None else self.ram - older.ram
        return PlacementStats(**{**vars(self), **intervals, "ram": ram})

    def to_dict(self) -> dict[str, Any]:
        """Fields and rates, as a JSON record holds them."""
        names = [field.name for field in fields(self) if field.name not in _NOT_IN_JSON]
        lookahead = None if self.lookahead is None else asdict(self.lookahead)
        ram = {} if self.ram is None else {"ram": self.ram.to_dict()}
        choice = {} if self.choice is None else {"cache_choice": asdict(self.choice)}
        return {name: getattr(self, name) for name in (*names, *_RATES)} | {
            "tau": list(self.tau),
            "lookahead": lookahead,
            **ram,
            **choice,
        }


_NOT_IN_JSON = ("failed", "plans", "in_flight", "queued", "pinned", "ram", "choice")
_RATES = (
    *("hit_rate_pairs", "hit_rate_experts", "uploads_per_layer_step", "evictions_per_layer_step", "link_bytes_per_s"),
    *("bytes_per_token", "wait_share"),
)


_TIMES = ("schedule_s", "plan_s", "draft_s", "decode_s")  # that the recorder counts


class StatsRecorder:
    """Sums up what the Python side counts next to an open cache's own figures.

    n_layers: whose experts share the slots. n_all: experts of the model.
    """

    def __init__(self, cache: ExpertCache, *, n_layers: int, n_all: int) -> None:
        self._cache, self._n_layers, self._n_all = cache, n_layers, n_all
        self._sums: dict[str, Any] = {"steps": 0, "tokens": 0} | dict.fromkeys(_TIMES, 0.0)
        self._start = PlacementStats(**vars(cache.stats()))

    def add_step(self, record: StepRecord) -> None:
        """A verification or plain decode; the time of scheduling it is added with `add_schedule`."""
        step_s = record.draft_s + record.verify_s + record.observe_s
        self._add(steps=1, tokens=len(record.tokens), draft_s=record.draft_s, decode_s=step_s)

    def add_schedule(self, seconds: float) -> None:
        """Time that the policy and its plan took, part of a step's."""
        self._add(schedule_s=seconds, decode_s=seconds)

    def skip(self, before: CacheStats, after: CacheStats) -> None:
        """Does not count what the cache has done in between."""
        self._start = self._start - (PlacementStats(**vars(before)) - PlacementStats(**vars(after)))

    def time_plan(self, call: Callable[[], object]) -> None:
        """Runs the policy and its plans, in whichever thread, and counts the time."""
        start_s = time.perf_counter()
        call()
        self._add(plan_s=time.perf_counter() - start_s)

    def _add(self, **amounts: float) -> None:
        for name, amount in amounts.items():
            self._sums[name] += amount

    def read(self, **gauges: Any) -> PlacementStats:
        """All figures since the session began; `gauges` are fields of PlacementStats."""
        info = self._cache.info
        size = {"slots_total": info.n_slots, "pool_bytes": info.pool_bytes, "cache_ratio": info.n_slots / self._n_all}
        values = vars(self._cache.stats()) | size | {"n_layers": self._n_layers} | gauges | self._sums
        return PlacementStats(**values) - self._start
