"""Policy hybrimoe: a cache by averaged routing scores, and a queue that shares each layer between CPU and GPU.

HybriMoE (Zhong et al., DAC 2025, arXiv 2504.05897; repository PKU-SEC-Lab/HybriMoE,
ktransformers/operators/experts.py):
- cache, "minus recent score" (KScoreAwareCache): S = alpha * TopP(s) + (1 - alpha) * S with the routing scores s, of
  which the p highest count, p about twice the experts per token, alpha 0.5; per layer the lowest S leaves.
- scheduling within a layer (HSS): experts wait in one queue, the resident ones with most tokens first, then the
  absent ones with most tokens first. The GPU takes from the front, bringing what is absent, the CPU from the back,
  whichever would be done sooner. So an absent expert that many tokens want is brought and stays cached.
- prefetch, "impact-driven": of the layers ahead, whose gates see this layer's input, the absent expert whose presence
  would shorten its layer most is brought. The shortening is that of HSS's time for what is foretold. This is the
  abstract's rule as far as it goes; the repository brings the next layer's highest S instead, and none by default.

The paper's text was not at hand. Scores of a step are the mean over its tokens (the repository decodes one token at a
time). Without the routers' full scores the weights of the chosen experts serve, without those an even share.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.cost_model import CostModel
from moeedge.policies.per_layer import PerLayerPlanner, layers_after, predicted_counts

FloatArray = NDArray[np.float32]
BoolArray = NDArray[np.bool_]

_ALPHA = np.float32(0.5)  # KScoreAwareCache
_TOP = 2  # p, in experts per token
_AHEAD = 3  # layers that the prefetch looks at
# model_cpu_time, model_gpu_time and model_move_time of the repository (DeepSeek-V2-Lite), in their own unit: where
# nothing was measured only the relations count. A CPU expert of s tokens takes s, and the first 0.79 more.
_CPU_TOKEN, _CPU_FIRST, _GPU_EXPERT, _MOVE = 1.0, 0.79, 0.5, 0.418


class HybriMoe:
    """Score: S."""

    name = "hybrimoe"
    execution_model = ExecutionModel(per_layer_slots=True, prefetch_within_step=True, speculation=False)
    required_inputs = frozenset({"block-inputs", "router-scores"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        cells = (shape.n_layers, shape.n_experts)
        self.shape = shape
        self._cap = np.float32(config.cap)
        self._planner = PerLayerPlanner(shape, config.cap)
        self._queue = Queue(config.units)
        self._score: FloatArray = np.zeros(cells, dtype=np.float32)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        self._counts: FloatArray = np.zeros(cells, dtype=np.float32)
        self._cells = np.arange(shape.n_layers)[:, None, None] * shape.n_experts

    def observe(self, observation: Observation) -> None:
        """Averages the scores."""
        np.copyto(self._counts, observation.counts, casting="unsafe")
        now = self._top(observation)
        now -= self._score
        now *= _ALPHA
        self._score += now
        np.maximum(self._score, 0.0, out=self._score)

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """What the queue brought for the step observed stays; with hints, what they make worth bringing."""
        counts = self._counts if hints is None else predicted_counts(hints, self.shape)
        brought = self._queue.brings(counts, resident != 0)
        return self._plan(resident, brought, counts)

    def plan_layer(self, layer: int, resident: Resident, hints: ExpertPrediction | None = None) -> Plan:
        """The one expert of the next layers that shortens its layer most."""
        counts: FloatArray = np.zeros(self._score.shape, dtype=np.float32)
        if hints is not None:
            reach = layers_after(self.shape, layer, _AHEAD)
            counts[reach] = predicted_counts(hints, self.shape)[reach]
        brought = np.zeros(counts.shape, dtype=np.bool_)
        best = self._queue.most_impact(counts, resident != 0)
        if best is not None:
            brought[best] = True
        return self._plan(resident, brought, counts, only=-1 if best is None else best[0])

    def reset(self) -> None:
        """What was wanted lately stays likely."""

    def _plan(self, resident: Resident, brought: BoolArray, counts: FloatArray, only: int | None = None) -> Plan:
        """What is brought is there, for whoever has the lowest score; `only`: the one layer that changes, -1: none."""
        score = self._score + np.float32(1e-6)
        score[brought] += np.float32(2.0)
        keep = self._planner.best(score, resident, brought)
        if only is not None:
            others = np.arange(self.shape.n_layers) != only
            keep[others] = resident[others] != 0
        np.minimum(counts, self._cap, out=self._utility)
        return self._planner.plan(keep, score, self._utility, resident)

    def _top(self, observation: Observation) -> FloatArray:
        """TopP(s), [n_layers, n_experts]: mean over the tokens of the highest scores, 0 for the others."""
        n_tokens = max(observation.n_tokens, 1)
        scores = observation.router_scores
        if scores is not None:
            n_used = 4 if observation.ids is None else observation.ids.shape[2]
            mean = scores.mean(axis=1, dtype=np.float32)
            kept = min(_TOP * n_used, self.shape.n_experts)
            least = np.partition(mean, self.shape.n_experts - kept, axis=1)[:, self.shape.n_experts - kept]
            return np.asarray(np.where(mean >= least[:, None], mean, np.float32(0.0)))
        if observation.weights is not None and observation.ids is not None:
            known = observation.ids >= 0
            flat = np.bincount(
                (observation.ids + self._cells)[known], observation.weights[known], minlength=self._score.size
            )
            return (flat.reshape(self._score.shape) / n_tokens).astype(np.float32)
        n_pairs = np.maximum(self._counts.sum(axis=1, keepdims=True), 1.0)
        return np.asarray(self._counts / n_pairs)


class Queue:
    """HSS for all layers at once: `counts` [n_layers, n_experts] tokens, `there` the same shape."""

    def __init__(self, units: CostModel | None) -> None:
        self._units = units

    def brings(self, counts: FloatArray, there: BoolArray) -> BoolArray:
        """The absent experts that the GPU brings and computes."""
        order, n_gpu, _ = self._split(counts, there)
        taken = np.zeros(counts.shape, dtype=np.bool_)
        np.put_along_axis(taken, order, np.arange(counts.shape[1]) < n_gpu[:, None], axis=1)
        return taken & ~there & (counts > 0)

    def most_impact(self, counts: FloatArray, there: BoolArray) -> tuple[int, int] | None:
        """Layer and expert whose presence saves most time; None where nothing saves any."""
        wanted = np.where(there, np.float32(0.0), counts)
        candidate = wanted.argmax(axis=1)
        rows = np.flatnonzero(wanted.max(axis=1) > 0)
        if rows.size == 0:
            return None
        with_it = there[rows].copy()
        with_it[np.arange(rows.size), candidate[rows]] = True
        saved = self._split(counts[rows], there[rows])[2] - self._split(counts[rows], with_it)[2]
        best = int(saved.argmax())
        return (int(rows[best]), int(candidate[rows[best]])) if saved[best] > 0 else None

    def _split(self, counts: FloatArray, there: BoolArray) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[Any]]:
        """The queue [n, n_experts], how many of it the GPU takes [n], and when both are done [n].

        The greedy rule stops where the GPU with one more would be later than the CPU with the rest; here the split
        with the least time of the slower side, which that approaches, for all lengths at once.
        """
        used = counts > 0
        order = np.argsort(-(counts + np.float32(1e6) * (there & used)), axis=1, kind="stable")
        tokens: NDArray[np.float64] = np.take_along_axis(counts, order, axis=1).astype(np.float64)
        moved = np.take_along_axis(used & ~there, order, axis=1)
        gpu_s, cpu_s, move_s, first_s = self._times(tokens)
        gpu_sum = np.cumsum(gpu_s, axis=1)
        moved_at = np.cumsum(moved, axis=1) * move_s  # when the transfer of the n-th is through
        # an expert starts when the one before is done and its weights are there
        gpu_done = gpu_sum + np.maximum.accumulate(np.where(moved, moved_at, 0.0) - (gpu_sum - gpu_s), axis=1).clip(0.0)
        cpu_left = cpu_s.sum(axis=1, keepdims=True) - np.cumsum(cpu_s, axis=1)
        cpu_left += np.where(cpu_left > 1e-12, first_s, 0.0)
        none = cpu_s.sum(axis=1) + first_s * used.any(axis=1)
        both = np.concatenate((none[:, None], np.maximum(gpu_done, cpu_left)), axis=1)
        n_gpu = both.argmin(axis=1)
        return order, n_gpu, both[np.arange(len(both)), n_gpu]

    def _times(self, tokens: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float]:
        """GPU and CPU time of every expert, of a transfer, and what the CPU's first expert takes more."""
        units = self._units
        if units is None:
            return np.multiply(_GPU_EXPERT, tokens > 0), _CPU_TOKEN * tokens, _MOVE, _CPU_FIRST
        return _at(units.device_expert_s, tokens), _at(units.cpu_expert_s, tokens), units.transfer_expert_s, 0.0


def _at(curve_s: NDArray[Any], tokens: NDArray[np.float64]) -> NDArray[Any]:
    """The curve between its points; beyond the last one in proportion to the tokens, as Units has it."""
    last = curve_s.size - 1
    return np.asarray(np.interp(tokens, np.arange(curve_s.size), curve_s) * np.maximum(tokens / last, 1.0))
