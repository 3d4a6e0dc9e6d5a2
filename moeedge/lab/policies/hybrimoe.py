"""Policy hybrimoe: a cache by averaged routing scores, and a queue that divides each layer between CPU and GPU.

HybriMoE (Zhong et al., DAC 2025, arXiv 2504.05897; repository PKU-SEC-Lab/HybriMoE,
ktransformers/operators/experts.py); departures in docs/lab/policies.md:
- cache, "minus recent score" (KScoreAwareCache): S = alpha * TopP(s) + (1 - alpha) * S with the routing scores s, of
  which the p highest count, p about twice the experts per token, alpha 0.5; per layer the lowest S leaves. Without the
  routers' full scores the weights of the chosen experts replace them, without those an even share.
- scheduling within a layer (HSS): experts wait in one queue, the resident ones with most tokens first, then the absent
  ones with most tokens first. The GPU takes from the front, loading absent experts, the CPU from the back, whichever
  would finish sooner. So an absent expert with many tokens is loaded and stays cached.
- prefetch, "impact-driven": of the layers ahead, whose gates see this layer's input, the absent expert whose presence
  shortens its layer most (HSS's time of the predicted experts) is loaded. This is the abstract's rule; the repository
  loads the next layer's highest S instead, and none by default.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, Resident
from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, PolicyConfig
from moeedge.policies.cost_model import CostModel, expert_seconds
from moeedge.policies.planner import PerLayerPolicy, layers_after, predicted_counts

_ALPHA = np.float32(0.5)  # KScoreAwareCache
_TOP = 2  # p, in experts per token
_LAYERS_AHEAD = 3  # that the prefetch considers
# without a cost model: model_cpu_time, model_gpu_time and model_move_time of the repository (DeepSeek-V2-Lite), in
# their own unit, as only the relations count. A CPU expert of s tokens takes s, and the first 0.79 more
_CPU_TOKEN, _CPU_FIRST, _GPU_EXPERT, _MOVE = 1.0, 0.79, 0.5, 0.418


class HybriMoe(PerLayerPolicy):
    """Score: S, the moving average of routing scores."""

    name = "hybrimoe"
    execution_model = ExecutionModel(prefetch_within_step=True, speculation=False)
    required_inputs = frozenset({"block-inputs", "router-scores"})

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._queue = Queue(config.cost_model)
        self._counts: FloatArray = np.zeros(self._score.shape, dtype=np.float32)
        self._layer_start = np.arange(shape.n_layers)[:, None, None] * shape.n_experts

    def observe(self, observation: Observation) -> None:
        np.copyto(self._counts, observation.counts, casting="unsafe")
        change = self._top(observation)
        change -= self._score
        change *= _ALPHA
        self._score += change
        np.maximum(self._score, 0.0, out=self._score)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to keep the experts that the queue loads: for the predicted tokens, or else for the last step's."""
        counts = self._counts if prediction is None else predicted_counts(prediction, self.shape)
        return self._plan_loads(resident, self._queue.loads(counts, resident != 0), counts)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to prefetch the expert of the next layers that shortens its layer most."""
        counts: FloatArray = np.zeros(self._score.shape, dtype=np.float32)
        reach = layers_after(self.shape, layer, _LAYERS_AHEAD)
        counts[reach] = predicted_counts(prediction, self.shape)[reach]
        loads = np.zeros(counts.shape, dtype=np.bool_)
        best = self._queue.most_impact(counts, resident != 0)
        if best is not None:
            loads[best] = True
        return self._plan_loads(resident, loads, counts, only=np.array([-1 if best is None else best[0]]))

    def _plan_loads(
        self, resident: Resident, loads: BoolArray, counts: FloatArray, only: IndexArray | None = None
    ) -> Plan:
        """Each load replaces the expert with the lowest score; only: layers that may change, None: all."""
        score = self._score + np.float32(1e-6)
        score[loads] += np.float32(2.0)
        np.minimum(counts, self._cap, out=self._utility)
        return self._plan(score, resident, loads, only)

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
                (observation.ids + self._layer_start)[known], observation.weights[known], minlength=self._score.size
            )
            return (flat.reshape(self._score.shape) / n_tokens).astype(np.float32)
        n_pairs = np.maximum(self._counts.sum(axis=1, keepdims=True), 1.0)
        return np.asarray(self._counts / n_pairs)


class Queue:
    """HSS for all layers at once; `counts` are tokens and `resident` is bool, both [n_layers, n_experts]."""

    def __init__(self, cost_model: CostModel | None) -> None:
        self._cost_model = cost_model

    def loads(self, counts: FloatArray, resident: BoolArray) -> BoolArray:
        """The absent experts that the GPU loads and computes, bool [n_layers, n_experts]."""
        order, n_gpu, _ = self._split(counts, resident)
        taken = np.zeros(counts.shape, dtype=np.bool_)
        np.put_along_axis(taken, order, np.arange(counts.shape[1]) < n_gpu[:, None], axis=1)
        return taken & ~resident & (counts > 0)

    def most_impact(self, counts: FloatArray, resident: BoolArray) -> tuple[int, int] | None:
        """Layer and expert whose presence saves most time; None if no expert saves any."""
        missing = np.where(resident, np.float32(0.0), counts)
        candidate = missing.argmax(axis=1)
        rows = np.flatnonzero(missing.max(axis=1) > 0)
        if rows.size == 0:
            return None
        with_candidate = resident[rows].copy()
        with_candidate[np.arange(rows.size), candidate[rows]] = True
        saved = self._split(counts[rows], resident[rows])[2] - self._split(counts[rows], with_candidate)[2]
        best = int(saved.argmax())
        return (int(rows[best]), int(candidate[rows[best]])) if saved[best] > 0 else None

    def _split(self, counts: FloatArray, resident: BoolArray) -> tuple[IndexArray, IndexArray, NDArray[Any]]:
        """The queue [n, n_experts], how many of it the GPU takes [n], and the time when both are done [n].

        The greedy rule stops where the GPU with one expert more would finish later than the CPU with the rest. Here it
        is the split with the least time of the slower side, which the greedy rule approximates.
        """
        used = counts > 0
        order = np.argsort(-(counts + np.float32(1e6) * (resident & used)), axis=1, kind="stable")
        tokens: NDArray[np.float64] = np.take_along_axis(counts, order, axis=1).astype(np.float64)
        moved = np.take_along_axis(used & ~resident, order, axis=1)
        gpu_s, cpu_s, move_s, first_s = self._times(tokens)
        gpu_sum = np.cumsum(gpu_s, axis=1)
        moved_at = np.cumsum(moved, axis=1) * move_s  # when the transfer of the n-th ends
        # an expert starts when the one before it is done and its weights have arrived
        gpu_done = gpu_sum + np.maximum.accumulate(np.where(moved, moved_at, 0.0) - (gpu_sum - gpu_s), axis=1).clip(0.0)
        cpu_left = cpu_s.sum(axis=1, keepdims=True) - np.cumsum(cpu_s, axis=1)
        cpu_left += np.where(cpu_left > 1e-12, first_s, 0.0)
        cpu_only = cpu_s.sum(axis=1) + first_s * used.any(axis=1)
        both = np.concatenate((cpu_only[:, None], np.maximum(gpu_done, cpu_left)), axis=1)
        n_gpu = both.argmin(axis=1)
        return order, n_gpu, both[np.arange(len(both)), n_gpu]

    def _times(self, tokens: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64], float, float]:
        """GPU and CPU time of every expert, time of a transfer, and extra time of the CPU's first expert."""
        cost = self._cost_model
        if cost is None:
            return np.multiply(_GPU_EXPERT, tokens > 0), _CPU_TOKEN * tokens, _MOVE, _CPU_FIRST
        gpu_s, cpu_s = expert_seconds(cost.device_expert_s, tokens), expert_seconds(cost.cpu_expert_s, tokens)
        return gpu_s, cpu_s, cost.transfer_expert_s, 0.0
