"""Predictions for a run on GPUs, made before it: stock llama.cpp and this engine, equal shares of experts in VRAM.

Qwen3-30B-A3B in Q4_K_M with the model's synthetic routing: plain decoding, and verifications of nine tokens. Every row
has the range of the constants' sources. The ratio to `--n-cpu-moe` compares both programs with the same constants, so
that its range is narrower than those of the speeds.

`break_even_hit_rate` is the hit rate at which this engine is as fast as `--n-cpu-moe`, by a formula apart from the
events: of a layer's time the CPU's share c (1 - H) and the fixed cost m stand against (1 - f) (s + c) + f g, with m
and s what a layer costs this engine and stock apart from its experts (moeedge.sim.handoff, and planning), c and g the
experts of a token on the CPU and on the GPU, f the share in VRAM: H* = f + (m - (1 - f) s - f g) / c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from moeedge.scheduler.config import PlacementConfig
from moeedge.sim.cases import Case, Cases
from moeedge.sim.constants import SIDES, Side
from moeedge.sim.model_shape import ModelShape, find_model
from moeedge.sim.simulate import Range, SimulationConfig
from moeedge.sim.step_costs import Framework, HardwareSpec, find_hardware, find_program

MODEL = "qwen3-30b-a3b-q4_k_m"
HARDWARE = ("rtx4090-pcie4", "rtx4090-server", "h200")
CACHE_RATIOS = (0.17, 0.3, 0.6)
GAMMAS = (0, 8)
_ACCEPTANCE = 0.7  # of a draft; a guess, equal for all programs
_TOKENS = 128
_WHOLE_SHARES = (0.25, 0.5)  # of the slots, for whole layers next to the cache
_POLICY = PlacementConfig().policy


@dataclass(frozen=True)
class System:
    """A program with a policy."""

    name: str
    policy: str
    program: str  # of sim/data/programs.json
    gammas: tuple[int, ...] = GAMMAS
    has_range: bool = True
    only_first: bool = False  # of HARDWARE
    whole_share: float = 0.0  # of the slots, which whole layers take


STOCK = System("--n-cpu-moe", "llama-cpp-sd", "llama.cpp")
SYSTEMS = (
    STOCK,
    System("--moe-cache-mib", "llama-cpp-cache", "llama.cpp, cache", gammas=(0,), only_first=True),
    System("moeedge 0.6", _POLICY, "moeedge 0.6", only_first=True),
    System("queued copies", _POLICY, "moeedge, queued copies", gammas=(0,), has_range=False, only_first=True),
    System("one CPU graph", _POLICY, "moeedge, one CPU graph", gammas=(0,), has_range=False, only_first=True),
    System("moeedge", _POLICY, "moeedge"),
    *(System("whole layers", _POLICY, "moeedge", (0,), has_range=False, whole_share=share) for share in _WHOLE_SHARES),
)


@dataclass(frozen=True)
class Prediction:
    """One row; the fields are those of -o json. Speeds in tokens per second."""

    hardware: str
    cache_ratio: float  # share of the experts in VRAM
    system: str
    policy: str
    gamma: int
    n_whole_layers: int  # on the GPU; the other slots are a cache, but for --n-cpu-moe
    tg_ts: float
    tg_low_ts: float | None  # None: simulated with the chosen constants alone
    tg_high_ts: float | None
    over_stock: float  # over the speed of --n-cpu-moe with the same draft
    over_stock_low: float | None
    over_stock_high: float | None
    hit_rate_pairs: float  # of the layers that are not whole on the GPU; of --n-cpu-moe: of all
    step_s: float  # of a verification, with its drafts
    host_s: float  # per token
    uploads_per_layer_step: float
    fixed_s: float  # m, or s: what a layer costs apart from its experts, with its share of planning
    break_even_hit_rate: float | None  # None: of stock llama.cpp itself, and with drafts


@dataclass(frozen=True)
class BreakEven:
    """H* with one side of the constants, and the terms of its formula in seconds."""

    hardware: str
    cache_ratio: float
    system: str
    side: Side
    m_s: float
    s_s: float
    c_s: float
    g_s: float
    break_even_hit_rate: float
    over_share: float  # above the share in VRAM


def predict(
    cases: Cases, *, systems: Sequence[System] = SYSTEMS, gammas: Sequence[int] = GAMMAS, seed: int = 0
) -> list[Prediction]:
    """All rows: by hardware, draft length and share, stock llama.cpp first."""
    asked = [
        (hardware, gamma, ratio, system)
        for hardware in HARDWARE
        for gamma in gammas
        for ratio in CACHE_RATIOS
        for system in systems
        if gamma in system.gammas and (hardware == HARDWARE[0] or not (gamma or system.only_first))
    ]
    ranges = cases.ranges(
        {side: _case(*row, side if row[-1].has_range else "chosen", seed) for side in SIDES} for row in asked
    )
    found = dict(zip(asked, ranges, strict=True))
    return [_row(*row, found[row], found[row[0], row[1], row[2], STOCK]) for row in asked]


def break_even_rows() -> list[BreakEven]:
    """H* of every program that divides layers, by hardware, share and side of the constants."""
    shape = find_model(MODEL)
    named: dict[str, str] = {}  # the first system of each program that divides layers
    for system in SYSTEMS:
        if system.program.startswith("moeedge"):
            named.setdefault(system.program, system.name)
    rows = []
    for hardware in HARDWARE:
        for ratio in CACHE_RATIOS:
            share = int(ratio * shape.n_expert_layers) / shape.n_expert_layers
            for program, name in named.items():
                for side in SIDES:
                    machine = find_hardware(hardware, side)
                    rows.append(_break_even(shape, machine, share, program, name, ratio, side))
    return rows


def break_even_hit_rate(share: float, m_s: float, s_s: float, c_s: float, g_s: float) -> float:
    """The hit rate H* of pairs at which the engine is as fast as whole layers on the GPU, at that share in VRAM."""
    return share + (m_s - (1 - share) * s_s - share * g_s) / c_s


def fixed_s(framework: Framework, hardware: HardwareSpec, shape: ModelShape, n_tokens: int = 1) -> float:
    """What a layer costs apart from its experts where the host has a part in it, with its share of planning."""
    exchanged_s = framework.handoff.fixed_s(hardware.link_bytes_per_s, n_tokens) if framework.handoff else 0.0
    return exchanged_s + framework.layer_overhead_s + framework.schedule_s / shape.n_expert_layers


def _break_even(
    shape: ModelShape, machine: HardwareSpec, share: float, program: str, name: str, ratio: float, side: Side
) -> BreakEven:
    stock, engine = find_program(STOCK.program, side), find_program(program, side)
    m_s, s_s = fixed_s(engine, machine, shape), fixed_s(stock, machine, shape)
    c_s = shape.k * shape.expert_bytes / machine.cpu_bytes_per_s
    g_s = shape.k * shape.expert_bytes / machine.gpu_bytes_per_s + stock.block_s
    wanted = break_even_hit_rate(share, m_s, s_s, c_s, g_s)
    return BreakEven(machine.name, ratio, name, side, m_s, s_s, c_s, g_s, wanted, wanted - share)


def _n_whole_layers(system: System, ratio: float, shape: ModelShape) -> int:
    return int(system.whole_share * ratio * shape.n_expert_layers)


def _case(hardware: str, gamma: int, ratio: float, system: System, side: Side, seed: int) -> Case:
    return Case(
        model=MODEL,
        n_tokens=_TOKENS * (2 if gamma else 1),
        hardware=find_hardware(hardware, side),
        framework=find_program(system.program, side),
        config=SimulationConfig(
            policy=system.policy,
            cache_ratio=ratio,
            gamma=gamma,
            acceptance=_ACCEPTANCE,
            seed=seed,
            n_whole_layers=_n_whole_layers(system, ratio, find_model(MODEL)),
        ),
    )


def _row(hardware: str, gamma: int, ratio: float, system: System, own: Range, stock: Range) -> Prediction:
    shape, machine = find_model(MODEL), find_hardware(hardware)
    over_stock = {side: getattr(own, side).tg_ts / getattr(stock, side).tg_ts for side in SIDES}
    time, framework = own.chosen.time, find_program(system.program)
    n_on_gpu = int(ratio * shape.n_expert_layers)
    is_engine = system.program.startswith("moeedge")
    share = n_on_gpu / shape.n_expert_layers
    wanted = _break_even(shape, machine, share, system.program, system.name, ratio, "chosen").break_even_hit_rate
    return Prediction(
        hardware=hardware,
        cache_ratio=ratio,
        system=system.name,
        policy=system.policy,
        gamma=gamma,
        n_whole_layers=n_on_gpu if system == STOCK else _n_whole_layers(system, ratio, shape),
        tg_ts=own.chosen.tg_ts,
        tg_low_ts=own.low_ts if system.has_range else None,
        tg_high_ts=own.high_ts if system.has_range else None,
        over_stock=over_stock["chosen"],
        over_stock_low=min(over_stock.values()) if system.has_range else None,
        over_stock_high=max(over_stock.values()) if system.has_range else None,
        hit_rate_pairs=time.hits.hit_rate_pairs,
        step_s=time.total_ns * 1e-9 / max(time.steps, 1),
        host_s=time.per_token_s("host"),
        uploads_per_layer_step=own.chosen.row()["uploads_per_layer_step"],
        fixed_s=fixed_s(framework, machine, shape, gamma + 1),
        break_even_hit_rate=wanted if is_engine and gamma == 0 else None,
    )


def to_rows(items: Sequence[Prediction | BreakEven]) -> list[dict[str, object]]:
    """Flat, as -o json prints them."""
    return [asdict(item) for item in items]
