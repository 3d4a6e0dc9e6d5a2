"""The row of llama.cpp's own expert cache: not run, but replayed on the routing that a benchmark has recorded.

The pinned llama.cpp has no `--moe-cache-mib`. Which experts such a cache would have held follows from the routing alone
(policy `llama-cpp-cache`); how fast it would have been is simulated, where the costs of this machine were measured.
"""

from __future__ import annotations

from typing import Any

from moeedge.bench.config import BenchMode
from moeedge.bench.harness import BenchArm
from moeedge.bench.records import BenchRow
from moeedge.bench.samples import CacheFigures
from moeedge.bench.scores import Scores
from moeedge.hardware.devices import EMULATED_RATIO
from moeedge.sim.batches import cache_shape
from moeedge.sim.replay import ReplayArm, ReplayConfig, replay_arms
from moeedge.sim.simulate import SimulationConfig, simulate
from moeedge.sim.step_costs import measured_costs
from moeedge.trace.format import Trace
from moeedge.trace.schedule import as_computed

POLICY = "llama-cpp-cache"


def replayed_row(mode: BenchMode, test: str, trace: Trace, arm: BenchArm, setup: dict[str, Any]) -> BenchRow:
    """Returns the row of a cache that holds as many experts as the device of `arm` does, or as `mode` asks for.

    trace: the routing of `arm`'s answers, of all layers that are not on the GPU anyway (-ncmoe). setup: of its row. The
    cache begins empty, and what it keeps of a text is there for the next one.
    """
    ratio = _ratio(mode, trace, arm)
    schedule = as_computed(trace)
    config = ReplayConfig(policies=(POLICY,), ratios=(ratio,), expert_bytes=trace.expert_bytes())
    (stats,) = replay_arms(schedule, [ReplayArm(POLICY, ratio)], config)
    simulated = {policy: _simulated_ts(policy, ratio, trace, arm) for policy in (POLICY, arm.session.info.policy)}
    n_slots = int(cache_shape(trace, ratio).capacity[0])
    return BenchRow(
        mode=mode.name,
        test=test,
        policy=POLICY,
        cache_ratio=ratio,
        pp=None,
        tg=None,
        tg_drained_ts=None,
        drain_s=None,
        ttft_s=None,
        acceptance_rate=schedule.acceptance_rate,
        tokens_per_step=schedule.tokens_per_step,
        experts_per_verification=stats.hits.unique / max(schedule.n_steps * len(trace.expert_layers()), 1),
        cache=CacheFigures(
            hit_rate_pairs=stats.hits.hit_rate_pairs,
            hit_rate_experts=stats.hits.hit_rate_experts,
            uploads_per_layer_step=stats.hits.uploads / max(schedule.n_steps * len(trace.expert_layers()), 1),
            bytes_moved=stats.bytes if config.expert_bytes is not None else None,
        ),
        output=None,
        scores=Scores(),
        ratio=None,
        ratio_pp=None,
        ratio_drained=None,
        ratio_cpu=None,
        setup=_own(setup) | {"policy": POLICY, "cache_ratio": ratio, "cache_slots": n_slots},
        samples=(),
        asked_ratio=mode.cache_ratio,
        simulated_ts=simulated[POLICY],
        simulated_moeedge_ts=simulated[arm.session.info.policy],
    )


def _ratio(mode: BenchMode, trace: Trace, arm: BenchArm) -> float:
    """Returns the share of the traced experts that the device of `arm` holds: in slots, or in whole layers."""
    if mode.cache_ratio is not None:
        return mode.cache_ratio
    model, layers = arm.session.model, trace.expert_layers()
    n_whole = len(set(layers) - set(model.host_expert_layers))
    n_held = arm.session.info.cache_slots + n_whole * model.info.n_experts
    return min(n_held / (len(layers) * model.info.n_experts), 1.0) if n_held else EMULATED_RATIO


def _simulated_ts(policy: str, ratio: float, trace: Trace, arm: BenchArm) -> float | None:
    """Returns tokens/s by the simulator with the costs that were measured here; None where none were."""
    calibration = arm.session.calibration
    if calibration is None or calibration.units is None:
        return None
    config = SimulationConfig(policy=policy, cache_ratio=ratio, gamma=trace.meta.gamma)
    return simulate(measured_costs(calibration.units), trace, config).tg_ts


def _own(setup: dict[str, Any]) -> dict[str, Any]:
    """Returns the set-up without what was measured of the mode that was recorded."""
    others = ("lookahead_", "device_", "vram_bytes", "pool_bytes", "whole_layers")
    return {key: None if key.startswith(others) else value for key, value in setup.items()}
