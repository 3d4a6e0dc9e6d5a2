"""How many experts of a trace are found in RAM, by the share of the experts that has a slot there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from moeedge.sim.replay import ReplayArm, ReplayConfig, replay_arms
from moeedge.trace.format import Trace
from moeedge.trace.schedule import cut_schedule, recorded_schedule, texts_of

_TOKENS_MAX = 4096  # of the trace, in entire texts: a replay of them takes seconds
_ACCEPTANCE = 0.8  # of a draft, where the trace was recorded with others


@dataclass(frozen=True)
class RamHits:
    """A replay with one share of the experts in RAM."""

    ratio: float
    n_tokens: float  # that a step gives
    unique: float  # distinct experts per layer and step
    hit_rate_experts: float  # share of these that were in RAM


def replay_ram_hits(trace: Trace, ratios: Sequence[float], *, gamma: int, policy: str = "lfu") -> list[RamHits]:
    """Replays the first texts of a trace with drafts of `gamma` tokens, 0 without; a result for each ratio.

    Raises InputError where no text is as long as a step.
    """
    numbers, first, lengths = np.unique(trace.sequence, return_index=True, return_counts=True)
    in_order = lengths[np.argsort(first)]
    n_texts = max(1, int(np.searchsorted(np.cumsum(in_order), _TOKENS_MAX, side="right")))
    trace = texts_of(trace, 0, min(n_texts, numbers.size))
    recorded = recorded_schedule(trace) if 0 < gamma == trace.meta.gamma else None
    schedule = recorded or cut_schedule(trace, gamma=gamma, acceptance_chance=_ACCEPTANCE)
    config = ReplayConfig(policies=(policy,), ratios=tuple(ratios))
    found = replay_arms(schedule, [ReplayArm(policy, ratio) for ratio in ratios], config)
    layer_steps = schedule.n_steps * len(schedule.trace.expert_layers())
    return [
        RamHits(ratio, schedule.tokens_per_step, stats.hits.unique / layer_steps, stats.hits.hit_rate_experts)
        for ratio, stats in zip(ratios, found, strict=True)
    ]
