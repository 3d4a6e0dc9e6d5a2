"""Models larger than the memory: slots for experts in RAM, hits, bytes and seconds per token, by the disk's rate.

The seconds are a limit, for one token at a time and perfect overlap of reading and computing:

    t/s <= 1 / (t_dense + max(k b / BW_ram, k b (1 - h) / BW_disk))

k: experts of a token, b: bytes of one, h: share of these that are in RAM, t_dense: the dense weights at the memory's
rate. Drafts are not in it: nothing is known of the experts that their tokens share.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.hardware.memory import default_reserve
from moeedge.planning.headers import ModelFacts
from moeedge.planning.memory_map import MemoryMap
from moeedge.records import derived, figure
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.kept_activations import KeptActivations
from moeedge.scheduler.sizing import CacheBudget, plan_budget

ASSUMED_DISK_BYTES_PER_S = 1e9
ASSUMED_RAM_BYTES_PER_S = 20e9  # of a CPU that computes from memory, two channels of DDR4
MORE_RAM = (1.5, 2.0, 3.0)  # times the free memory

# Hits of distinct experts by the share of the experts in RAM: policy lfu, one token at a time. At each share the lowest
# of gpt-oss-20b's published routing, Qwen3-30B-A3B's synthetic routing and the bundled pair's (docs/log.md)
_ASSUMED_SHARES = (0.0, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 1.0)
_ASSUMED_HITS = (0.0, 0.617, 0.814, 0.921, 0.953, 0.982, 0.988, 1.0)

Source = Literal["measured", "given", "assumed"]
RoutingSource = Literal["kept", "assumed"]  # kept: activations of earlier runs


@dataclass(frozen=True)
class Disk:
    bytes_per_s: float = figure("Rate of the disk", "bytes/s")
    source: Source = figure("Where the rate is from")


Hits = Callable[[Sequence[float]], NDArray[np.float64]]  # of a token's experts, by shares of all experts in RAM


@dataclass(frozen=True)
class RamTierRequest:
    """Disk and routing, which neither the model's header nor the machine tells."""

    disks: tuple[Disk, ...]  # at least one; the first is the machine's
    hits: Hits | None = None  # None: the assumed ones
    source: RoutingSource = "assumed"
    n_tokens: float = 0.0  # that the activations of earlier runs are of
    sizes: tuple[int, ...] = ()  # free bytes of other machines; empty: MORE_RAM


def known_tier(
    facts: ModelFacts, file: Path, disk_rates: Sequence[float] | None, sizes: tuple[int, ...]
) -> RamTierRequest:
    """The given or measured rates of the disk, and the activations of earlier runs of this file.

    disk_rates: bytes/s; None: what was measured. sizes: free bytes of other machines.
    """
    measured = read_kept(file) if facts.is_here else None
    disks: tuple[Disk, ...] = (Disk(ASSUMED_DISK_BYTES_PER_S, "assumed"),)
    if disk_rates is not None:
        disks = tuple(Disk(rate, "given") for rate in disk_rates)
    elif measured is not None:
        disks = (Disk(measured.best.bytes_per_s, "measured"),)
    if facts.is_here and facts.n_experts:
        activations = KeptActivations.open(file, facts.n_layers, facts.n_experts)
        if (earlier := activations.earlier_runs) is not None:
            return RamTierRequest(disks, kept_hits(activations.counts), "kept", earlier.n_tokens, sizes)
    return RamTierRequest(disks, sizes=sizes)


@dataclass(frozen=True)
class RamTierRow:
    """One machine: a size of memory with a disk."""

    ram_free_bytes: int = figure("Free RAM", "bytes")
    disk: Disk = figure("", prefix="disk_")
    n_slots: int = figure("Slots for experts")
    slots_bytes: int = figure("The slots", "bytes")
    ratio: float = figure("Share of the experts in host memory that have a slot", most=1)
    hit_rate_experts: float = figure("Share of a token's experts that are in RAM", most=1)
    bytes_per_token: float = figure("Read from the disk", "bytes")
    limit_ts: float = figure("Limit of decoding", "t/s")
    limited_by: Literal["disk", "memory"] = figure("What limits it")


@dataclass(frozen=True)
class RamTierPlan:
    """Experts of a model larger than the memory, in slots in RAM."""

    n_ctx: int = figure("Context size, in tokens")
    n_experts: int = figure("Experts of all layers in host memory")
    rows: tuple[RamTierRow, ...] = figure("The machine, with each other disk, with more memory, with both")
    source: RoutingSource = figure("Where the hits are from: kept by earlier runs, or assumed", key="hits_source")
    n_kept_tokens: float = figure("Tokens that the activations of earlier runs are of")
    ram_bytes_per_s: float = figure("Rate of the memory, an assumption", "bytes/s", default=ASSUMED_RAM_BYTES_PER_S)

    @derived("Whether the hits are an assumption from other models")
    def hits_assumed(self) -> bool:
        return self.source == "assumed"

    @property
    def machine(self) -> RamTierRow:
        return self.rows[0]


def assumed_hits(ratios: Sequence[float]) -> NDArray[np.float64]:
    """The lowest hits that policy lfu had on the routing of three models."""
    return np.interp(ratios, _ASSUMED_SHARES, _ASSUMED_HITS)


def kept_hits(counts: NDArray[np.float64]) -> Hits:
    """Hits with the experts in RAM that earlier runs used most; a policy that follows the text finds more.

    counts: [n_layers, n_experts] activations; layers without experts are zeros.
    """
    used = counts[counts.sum(axis=1) > 0].reshape(-1)
    hits = np.concatenate([[0.0], np.cumsum(-np.sort(-used))])
    return lambda ratios: hits[[min(round(ratio * used.size), used.size) for ratio in ratios]] / hits[-1]


def plan_ram_tier(
    memory_map: MemoryMap,
    request: RamTierRequest,
    *,
    n_expert_layers: int,
    n_experts: int,
    n_expert_used: int,
    expert_bytes: int,
) -> RamTierPlan | None:
    """Slots, hits and limits on the machine of a memory map, with its disks and with more memory.

    n_expert_layers: layers whose experts are in host memory. n_experts: per layer. expert_bytes: of all of these.
    None where not even one expert per layer fits.
    """
    ram = memory_map.places[-1]
    n_all = n_expert_layers * n_experts
    others_bytes = ram.used_bytes - expert_bytes  # KV cache, dense weights
    more = request.sizes or tuple(round(ram.free_bytes * factor) for factor in MORE_RAM)
    sizes = list(dict.fromkeys((ram.free_bytes, *more)))
    budgets = [
        plan_budget(
            expert_bytes_total=expert_bytes,
            n_expert_layers=n_expert_layers,
            n_experts=n_experts,
            free_bytes=max(0, size - others_bytes),
            reserve_bytes=default_reserve(size),
        )
        for size in sizes
    ]
    if budgets[0].n_slots == 0:
        return None
    machines = list(zip(sizes, budgets, strict=True))
    if not request.sizes:  # enough is enough
        machines = [machine for i, machine in enumerate(machines) if i == 0 or budgets[i - 1].n_slots < n_all]
    hits = (request.hits or assumed_hits)([budget.ratio for _, budget in machines])
    dense_bytes = sum(line.n_bytes for line in ram.lines if line.what == "dense weights")
    used_bytes = n_expert_layers * n_expert_used * expert_bytes / n_all

    def row(size: int, budget: CacheBudget, hit_rate: float, disk: Disk) -> RamTierRow:
        read_bytes = used_bytes * (1 - hit_rate)
        compute_s, read_s = used_bytes / ASSUMED_RAM_BYTES_PER_S, read_bytes / disk.bytes_per_s
        return RamTierRow(
            ram_free_bytes=size,
            disk=disk,
            n_slots=budget.n_slots,
            slots_bytes=budget.pool_bytes,
            ratio=budget.ratio,
            hit_rate_experts=hit_rate,
            bytes_per_token=read_bytes,
            limit_ts=1 / (dense_bytes / ASSUMED_RAM_BYTES_PER_S + max(compute_s, read_s)),
            limited_by="disk" if read_s > compute_s else "memory",
        )

    pairs = list(zip(machines, hits.tolist(), strict=True))
    rows = tuple(row(*machine, hit_rate, disk) for machine, hit_rate in pairs for disk in request.disks)
    return RamTierPlan(memory_map.n_ctx, n_all, rows, request.source, request.n_tokens)
