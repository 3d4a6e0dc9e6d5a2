"""What a model larger than the memory needs of its disk: slots for experts in RAM, hits, bytes and seconds per token.

The seconds are a limit, for perfect overlap of reading and computing:

    t/s <= A / (t_dense + max(U b / BW_ram, U b (1 - h) / BW_disk) + t_draft)

A: tokens gained by a step, U: distinct experts that it uses, b: bytes of one, h: share of these that are in RAM,
t_dense: the dense weights at the memory's rate, t_draft: the drafts of the step at the same rate.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.planning.memory_map import MemoryMap
from moeedge.scheduler.sizing import default_reserve, plan_budget

ASSUMED_DISK_BYTES_PER_S = 1e9
ASSUMED_RAM_BYTES_PER_S = 20e9  # of a CPU that computes from memory, two channels of DDR4
MORE_RAM = (1.5, 2.0, 3.0)  # times the free memory

# Hits of distinct experts by the share of the experts in RAM: policy lfu, one token at a time. At each share the lowest
# of gpt-oss-20b's published routing, Qwen3-30B-A3B's synthetic routing and the bundled pair's (docs/log.md, 2026-11-22)
_ASSUMED_SHARES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
_ASSUMED_HITS = (0.0, 0.617, 0.814, 0.921, 0.953, 0.982, 0.988, 1.0)

Source = Literal["measured", "given", "assumed"]
RoutingSource = Literal["trace", "kept", "assumed"]  # kept: activations of earlier runs


@dataclass(frozen=True)
class Disk:
    """The rate at which experts are read."""

    bytes_per_s: float
    source: Source


@dataclass(frozen=True)
class StepRouting:
    """The experts of a step where a share of all experts is in RAM."""

    n_tokens: float  # that a step gives
    unique: float  # distinct experts per layer
    hit_rate_experts: float  # share of these that are in RAM


Forecast = Callable[[Sequence[float]], Sequence[StepRouting]]  # by shares of the experts in RAM


@dataclass(frozen=True)
class RamTierRequest:
    """What is known of disk and routing, which neither the model's header nor the machine says."""

    disks: tuple[Disk, ...]  # at least one; the first is the machine's
    plain: Forecast | None = None  # one token at a time; None: the assumed hits
    drafted: Forecast | None = None  # steps with drafts
    n_drafts: int = 0  # of these
    source: RoutingSource = "assumed"
    trace: str = ""  # the trace's name
    n_tokens: float = 0.0  # that the activations of earlier runs are of
    sizes: tuple[int, ...] = ()  # free bytes of other machines; empty: MORE_RAM


@dataclass(frozen=True)
class StepLimit:
    """What a step needs of the disk, and the speed that this allows."""

    hit_rate_experts: float  # of distinct experts
    bytes_per_token: float  # read from the disk
    limit_ts: float
    limited_by: Literal["disk", "memory"]


@dataclass(frozen=True)
class RamTierRow:
    """One machine: a size of memory with a disk."""

    ram_free_bytes: int
    disk: Disk
    n_slots: int
    slots_bytes: int
    ratio: float  # share of the experts in host memory that have a slot
    plain: StepLimit  # one token at a time
    drafted: StepLimit | None  # None: no drafts, or nothing is known of them

    @property
    def limit_ts(self) -> float:
        """The higher of the two limits."""
        return max(self.plain.limit_ts, 0.0 if self.drafted is None else self.drafted.limit_ts)


@dataclass(frozen=True)
class RamTierPlan:
    """Experts of a model larger than the memory, in slots in RAM."""

    n_ctx: int
    n_experts: int  # of all layers in host memory
    rows: tuple[RamTierRow, ...]  # the machine, the machine with each other disk, with more memory, with both
    source: RoutingSource
    trace: str
    n_kept_tokens: float  # that the activations of earlier runs are of
    tokens_per_step: float  # with drafts; 1 without
    n_drafts: int
    ram_bytes_per_s: float = ASSUMED_RAM_BYTES_PER_S

    @property
    def machine(self) -> RamTierRow:
        """The row of the planned machine."""
        return self.rows[0]


def assumed_routing(n_expert_used: int) -> Forecast:
    """One token at a time, with the lowest hits that policy lfu had on the routing of three models."""

    def forecast(ratios: Sequence[float]) -> list[StepRouting]:
        hits = np.interp(ratios, _ASSUMED_SHARES, _ASSUMED_HITS)
        return [StepRouting(1.0, float(n_expert_used), float(hit)) for hit in hits]

    return forecast


def kept_routing(counts: NDArray[np.float64], n_expert_used: int) -> Forecast:
    """One token at a time, with the experts in RAM that earlier runs used most.

    counts: [n_layers, n_experts] activations; layers without experts are zeros. A policy that follows the text finds
    more. Nothing is known of steps with drafts, whose tokens share experts.
    """
    used = counts[counts.sum(axis=1) > 0].reshape(-1)
    hits = np.concatenate([[0.0], np.cumsum(-np.sort(-used))])

    def forecast(ratios: Sequence[float]) -> list[StepRouting]:
        slots = [min(round(ratio * used.size), used.size) for ratio in ratios]
        return [StepRouting(1.0, float(n_expert_used), float(hits[n] / hits[-1])) for n in slots]

    return forecast


def plan_ram_tier(
    found: MemoryMap,
    request: RamTierRequest,
    *,
    n_expert_layers: int,
    n_experts: int,
    n_expert_used: int,
    expert_bytes: int,
    draft_bytes: int,
) -> RamTierPlan | None:
    """Slots, hits and limits on the machine of a memory map, with its disks and with more memory.

    n_expert_layers: layers whose experts are in host memory. n_experts: per layer. expert_bytes: of all of these.
    draft_bytes: weights of the draft model. None where not even one expert per layer fits.
    """
    ram = found.places[-1]
    n_all = n_expert_layers * n_experts
    others_bytes = ram.used_bytes - expert_bytes  # KV cache, dense weights, buffers
    more = request.sizes or tuple(round(ram.free_bytes * factor) for factor in MORE_RAM)
    sizes = list(dict.fromkeys((ram.free_bytes, *more)))
    budgets = {
        size: plan_budget(
            expert_bytes_total=expert_bytes,
            n_expert_layers=n_expert_layers,
            n_experts=n_experts,
            free_bytes=max(0, size - others_bytes),
            reserve_bytes=default_reserve(size),
        )
        for size in sizes
    }
    if budgets[sizes[0]].n_slots == 0:
        return None
    if not request.sizes:  # enough is enough
        sizes = [size for i, size in enumerate(sizes) if i == 0 or budgets[sizes[i - 1]].n_slots < n_all]
    ratios = [budgets[size].n_slots / n_all for size in sizes]
    plain = (request.plain or assumed_routing(n_expert_used))(ratios)
    drafted = None if request.drafted is None else request.drafted(ratios)
    dense_bytes = sum(line.n_bytes for line in ram.lines if line.what == "dense weights")

    def limit(step: StepRouting, disk: Disk, n_drafts: int) -> StepLimit:
        used_bytes = n_expert_layers * step.unique * expert_bytes / n_all
        read_bytes = used_bytes * (1 - step.hit_rate_experts)
        compute_s, read_s = used_bytes / ASSUMED_RAM_BYTES_PER_S, read_bytes / disk.bytes_per_s
        other_s = (dense_bytes + n_drafts * draft_bytes) / ASSUMED_RAM_BYTES_PER_S
        return StepLimit(
            hit_rate_experts=step.hit_rate_experts,
            bytes_per_token=read_bytes / step.n_tokens,
            limit_ts=step.n_tokens / (other_s + max(compute_s, read_s)),
            limited_by="disk" if read_s > compute_s else "memory",
        )

    rows = tuple(
        RamTierRow(
            ram_free_bytes=size,
            disk=disk,
            n_slots=budgets[size].n_slots,
            slots_bytes=budgets[size].pool_bytes,
            ratio=ratios[i],
            plain=limit(plain[i], disk, 0),
            drafted=None if drafted is None else limit(drafted[i], disk, request.n_drafts),
        )
        for i, size in enumerate(sizes)
        for disk in request.disks
    )
    return RamTierPlan(
        n_ctx=found.n_ctx,
        n_experts=n_all,
        rows=rows,
        source=request.source,
        trace=request.trace,
        n_kept_tokens=request.n_tokens,
        tokens_per_step=1.0 if drafted is None else drafted[0].n_tokens,
        n_drafts=0 if drafted is None else request.n_drafts,
    )
