"""The answer of `moeedge plan`: memory map, other contexts, advice and command; the plan of a model beyond RAM, too."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.hardware.host import default_reserve
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.llama.model_memory import DEFAULT_N_CTX
from moeedge.planning.headers import ModelFacts
from moeedge.planning.memory_map import MemoryMap, MemoryPool, PlannedMachine, in_mib
from moeedge.planning.planner import Planner
from moeedge.records import derived, figure
from moeedge.scheduler.disk import read_kept
from moeedge.scheduler.ram_tier import KeptActivations
from moeedge.scheduler.sizing import CacheBudget, plan_budget
from moeedge.units import format_bytes

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
    """Experts of a model larger than the memory, in slots in RAM, by the disk's rate.

    The seconds are a limit, for one token at a time and perfect overlap of reading and computing:

        t/s <= 1 / (t_dense + max(k b / BW_ram, k b (1 - h) / BW_disk))

    k: experts of a token, b: bytes of one, h: share of these that are in RAM, t_dense: the dense weights at the
    memory's rate. Drafts are not in it: nothing is known of the experts that their tokens share.
    """

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


_CONTEXTS = (4096, 8192, 16384, 32768, 65536, 131072)  # tokens; those above the trained context are left out

# bits per weight of llama.cpp's presets (tools/quantize/README.md of the pinned version, for Llama-3.1-8B)
_PRESETS = {
    "Q8_0": 8.50,
    "Q6_K": 6.56,
    "Q5_K_M": 5.70,
    "Q4_K_M": 4.89,
    "IQ4_XS": 4.46,
    "Q3_K_M": 4.00,
    "Q2_K": 3.16,
    "IQ2_XXS": 2.38,
}
_MIN_SAVING = 0.95  # of the file's size; a larger file is no other quantization


@dataclass(frozen=True)
class SessionPlan:
    """Everything known before loading."""

    machine: PlannedMachine
    model: ModelFacts = figure("The model")
    draft: ModelFacts | None = figure("The model that drafts; null: none")
    map: MemoryMap = figure("Memory at the context of the plan", key="plan")
    contexts: tuple[MemoryMap, ...] = figure("Memory at other context sizes")
    largest_n_ctx: int = figure("Largest context, with the cache of the requested ratio, in tokens; 0: none fits")
    command: str = figure("What runs it; empty: it does not fit")
    notes: tuple[str, ...] = figure("Sentences for the user")
    ram_tier: RamTierPlan | None = figure("Experts in RAM of a model larger than the memory", default=None)
    estimated: bool = figure("Whether sizes are estimates, without the model's header", default=False)
    provenance: Provenance = figure("Versions, machine and time", default_factory=read_provenance)

    @derived("Kind of the device", key="device.kind")
    def device_kind(self) -> str:
        return self.machine.device.kind

    @derived("Its name", key="device.name")
    def device_name(self) -> str:
        return self.machine.device.label

    @derived("Whether its memory was measured; else given by --vram", key="device.measured")
    def vram_measured(self) -> bool:
        return not self.machine.vram_given

    @derived("Whether the RAM was measured; else given by --ram-size")
    def ram_measured(self) -> bool:
        return not self.machine.ram_given


def make_session_plan(
    planner: Planner, *, given: Sequence[str] = (), beyond_ram: RamTierRequest | None = None
) -> SessionPlan:
    """Returns the plan at the planner's context.

    given: options of `moeedge chat`, as the user typed them; they go into the command. beyond_ram: the disk and the
    routing, for a model that is larger than the memory.
    """
    chosen = planner.default_map()
    trained = planner.facts.n_ctx_train
    sizes = sorted({*(n for n in _CONTEXTS if n <= trained), chosen.n_ctx})
    contexts = tuple(chosen if n == chosen.n_ctx else planner.map(n) for n in sizes)
    ratio = planner.config.placement.cache_ratio or 0.0
    largest = planner.largest_n_ctx(ratio, from_disk=_ram(chosen).storage != "loaded")
    notes = [*_about_files(planner), *planner.machine.notes, *planner.notes, *chosen.budget.notes]
    tier, has_room = None, True
    if beyond_ram is not None and _ram(chosen).storage == "on demand":
        # experts in RAM at the user's context, or at the one that such a session has without one
        n_ctx, (n_layers, n_bytes) = planner.config.n_ctx or min(chosen.n_ctx, DEFAULT_N_CTX), planner.host_experts
        tier = plan_ram_tier(
            chosen if n_ctx == chosen.n_ctx else planner.map(n_ctx),
            beyond_ram,
            n_expert_layers=n_layers,
            n_experts=planner.facts.n_experts,
            n_expert_used=planner.facts.n_expert_used,
            expert_bytes=n_bytes,
        )
        has_room = tier is not None
    has_slots = planner.loads_on_demand and has_room
    notes += _advice(planner, chosen, largest, has_slots=has_slots)
    advised = chosen
    is_runnable = chosen.verdict == "fits" or (has_slots and chosen.verdict == "from disk")
    if not planner.config.n_ctx and not is_runnable and largest:
        rows = [row.n_ctx for row in contexts if row.n_ctx <= largest]
        advised = planner.map(max(rows, default=largest))  # a step below the largest leaves room for experts
    slots_bytes = tier.machine.slots_bytes if tier is not None and has_slots and planner.machine.ram_given else 0
    command = "" if advised.verdict == "does not fit" else _command(planner, advised, given, slots_bytes)
    if not has_room:
        notes.append("Not even one expert per layer fits the memory next to the rest.")
    return SessionPlan(
        planner.machine, planner.facts, planner.draft_facts, chosen, contexts, largest, command, tuple(notes), tier
    )


def _ram(memory_map: MemoryMap) -> MemoryPool:
    return memory_map.places[-1]


def _about_files(planner: Planner) -> list[str]:
    notes = []
    for facts in (planner.facts, planner.draft_facts):
        if facts is not None and not facts.is_here:
            notes.append(f"moeedge pull {facts.file} downloads {format_bytes(facts.file_bytes)}.")
        elif facts is not None and facts.missing_bytes:
            text = f"{facts.file} is incomplete: {format_bytes(facts.missing_bytes)} of its weights are missing."
            notes.append(f"{text} The plan needs only its header.")
    return notes


def _advice(planner: Planner, chosen: MemoryMap, largest: int, *, has_slots: bool) -> list[str]:
    """Returns notes on what does not fit and what the user can do; has_slots: experts are loaded into slots in RAM."""
    facts, ram = planner.facts, _ram(chosen)
    notes = [chosen.refused] if chosen.refused else []
    where = f" for a context of {chosen.n_ctx:,} tokens"
    for place in chosen.places[:-1]:
        if place.verdict != "fits":
            notes.append(f"{place.name} lacks {format_bytes(-place.left_bytes)}{where}.")
    if ram.verdict == "does not fit":
        notes.append(f"{format_bytes(ram.fixed_bytes - ram.free_bytes)} of RAM are missing{where}.")
    if ram.verdict == "from disk":
        effect = "that much of the mapped weights is read from the disk again and again, which is slow."
        if has_slots:
            effect = "experts that are not in memory are read from the disk as they are needed."
        notes.append(f"The total exceeds the free memory by {format_bytes(-ram.left_bytes)}: {effect}")
    if chosen.verdict != "fits" and 0 < largest < chosen.n_ctx:
        notes.append(f"A context of {largest:,} tokens fits: -c {largest}.")
    if ram.verdict != "fits":
        weights = facts.experts_bytes + facts.dense_bytes
        most = min(weights + ram.left_bytes, _MIN_SAVING * weights)
        sizes = {name: round(bits * facts.n_weights / 8) for name, bits in _PRESETS.items()}
        name = next((name for name, n_bytes in sizes.items() if n_bytes <= most), "")  # the largest that fits
        about = f"about {format_bytes(sizes.get(name, 0))} instead of {format_bytes(weights)}"
        notes.append(f"A file in {name} fits: {about}." if name else "No smaller quantization fits.")
        notes.append(f"RAM that holds it all: {format_bytes(ram.used_bytes)} free.")
    elif chosen.verdict != "fits":
        notes.append("Leave all but N layers to the CPU with -ngl N, or plan without the device with -dev none.")
    return notes


def _command(planner: Planner, advised: MemoryMap, options: Sequence[str], ram_slots_bytes: int) -> str:
    """Returns the command: the options of the user, and those that keep a chat to the plan.

    ram_slots_bytes: of experts that are loaded from the file into RAM, where the user gave the RAM; 0 elsewhere.
    """
    config, machine = planner.config, planner.machine
    words = ["moeedge", "chat", *options]
    if not config.n_ctx and not advised.whole_on_gpu:  # entirely on the GPU it uses the rest for its context
        words += ["-c", str(advised.n_ctx)]
    has_size = config.placement.cache_ratio is not None or planner.reserve > 0
    device = machine.device  # a GPU's division between whole layers and cache is measured without a ratio
    if advised.budget.n_slots and (has_size or (device.default_ratio is None and device.kind != "gpu")):
        ratio = math.floor(advised.cache_ratio * 1000 + 1e-9) / 1000  # rounded down so that it fits
        words += ["--cache-ratio", f"{ratio:g}"]
    elif config.placement.cache_ratio == 0:
        words += ["--cache-ratio", "0"]
    elif advised.budget.n_slots and machine.vram_given:
        whole_bytes = planner.facts.experts_bytes - planner.host_experts[1]
        words += ["--vram", in_mib(advised.budget.pool_bytes + whole_bytes)]  # experts alone, as chat counts them
    if ram_slots_bytes:
        words += ["--ram", in_mib(ram_slots_bytes)]
    return shlex.join(words)
