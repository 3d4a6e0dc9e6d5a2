"""Predictions for a run on GPUs, made before it: stock llama.cpp and this engine, equal shares of experts in VRAM.

Plain decoding, one token a step, of Qwen3-30B-A3B in Q4_K_M, with the model's synthetic routing. Every row has the
range of the constants' sources. The ratio to `--n-cpu-moe` compares both programs with the same constants, so that its
range is narrower than those of the speeds.

`break_even_hit_rate` is the hit rate at which this engine is as fast as `--n-cpu-moe`, by a formula apart from the
events: of a layer's time the CPU's share c (1 - H) and the round trip m stand against (1 - f) (s + c) + f g, with s the
round trip of a layer on the CPU, c and g the experts of a token on the CPU and on the GPU, f the share in VRAM:
H* = f + (m - (1 - f) s - f g) / c.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from moeedge.scheduler.config import PlacementConfig
from moeedge.sim.cases import Case, Cases
from moeedge.sim.constants import SIDES
from moeedge.sim.model_shape import ModelShape, find_model
from moeedge.sim.simulate import Range, SimulationConfig
from moeedge.sim.step_costs import Framework, HardwareSpec, find_hardware, program_of

MODEL = "qwen3-30b-a3b-q4_k_m"
HARDWARE = ("rtx4090-pcie4", "h200")
CACHE_RATIOS = (0.17, 0.3, 0.6)
STOCK = "llama-cpp"  # --n-cpu-moe
POLICIES = tuple(dict.fromkeys([STOCK, "llama-cpp-cache", PlacementConfig().policy, "lfu"]))
_TOKENS = 256


@dataclass(frozen=True)
class Prediction:
    """One row; the fields are those of -o json. Speeds in tokens per second."""

    hardware: str
    cache_ratio: float  # share of the experts in VRAM
    policy: str
    tg_ts: float
    tg_low_ts: float
    tg_high_ts: float
    over_stock: float  # over the speed of --n-cpu-moe
    over_stock_low: float
    over_stock_high: float
    hit_rate_pairs: float
    host_s: float  # per token
    break_even_hit_rate: float | None  # None: of stock llama.cpp itself
    n_cpu_moe: int | None  # of --n-cpu-moe; None: of other policies
    rejected_token_model: None = None  # nothing is drafted

    def row(self) -> dict[str, Any]:
        """Flat, as -o json prints it."""
        return asdict(self)


def predict(cases: Cases, *, policies: Sequence[str] = POLICIES, seed: int = 0) -> list[Prediction]:
    """All rows, hardware after hardware and share after share, stock llama.cpp first."""
    rows = []
    for hardware in HARDWARE:
        for ratio in CACHE_RATIOS:
            found = cases.ranges(
                {
                    side: Case(
                        model=MODEL,
                        n_tokens=_TOKENS,
                        hardware=find_hardware(hardware, side),
                        framework=program_of(policy, side),
                        config=SimulationConfig(policy=policy, cache_ratio=ratio, gamma=0, seed=seed),
                    )
                    for side in SIDES
                }
                for policy in policies
            )
            by_policy = dict(zip(policies, found, strict=True))
            rows += [_row(hardware, ratio, policy, by_policy) for policy in policies]
    return rows


def break_even_hit_rate(
    shape: ModelShape, hardware: HardwareSpec, share: float, stock: Framework, engine: Framework
) -> float:
    """The hit rate H* of pairs at which the engine is as fast as whole layers on the GPU, at that share in VRAM."""
    cpu_s = shape.k * shape.expert_bytes / hardware.cpu_bytes_per_s
    device_s = shape.k * shape.expert_bytes / hardware.gpu_bytes_per_s
    engine_s = engine.round_trip_s + hardware.sync_s + engine.schedule_s / shape.n_expert_layers
    return share + (engine_s - (1 - share) * stock.round_trip_s - share * device_s) / cpu_s


def _row(hardware: str, ratio: float, policy: str, found: dict[str, Range]) -> Prediction:
    shape, own, stock = find_model(MODEL), found[policy], found[STOCK]
    over_stock = {side: getattr(own, side).tg_ts / getattr(stock, side).tg_ts for side in SIDES}
    n_on_gpu = int(ratio * shape.n_expert_layers)
    is_engine = not policy.startswith("llama-cpp")
    return Prediction(
        hardware=hardware,
        cache_ratio=ratio,
        policy=policy,
        tg_ts=own.chosen.tg_ts,
        tg_low_ts=own.low_ts,
        tg_high_ts=own.high_ts,
        over_stock=over_stock["chosen"],
        over_stock_low=min(over_stock.values()),
        over_stock_high=max(over_stock.values()),
        hit_rate_pairs=own.chosen.time.hits.hit_rate_pairs,
        host_s=own.chosen.time.per_token_s("host"),
        break_even_hit_rate=break_even_hit_rate(
            shape, find_hardware(hardware), n_on_gpu / shape.n_expert_layers, program_of(STOCK), program_of(policy)
        )
        if is_engine
        else None,
        n_cpu_moe=shape.n_expert_layers - n_on_gpu if policy == STOCK else None,
    )
