"""Published systems: MoE-Infinity, HybriMoE, Fiddler, offload of entire layers, and llama.cpp's cache of experts.

moe-infinity: the earlier sequence most similar to the current one predicts the next activations.

MoE-Infinity (Xue et al., arXiv 2401.14361), by its repository (EfficientMoE/MoE-Infinity, moe_infinity/memory/):
- tracing: an expert activation matrix [layers, experts] per sequence counts its activations; matrices of past
  sequences form a collection of fixed capacity (expert_tracer.py, finish_entry: a free entry, else the one that was
  matched least).
- prediction: the entry nearest to the current matrix, by the mean over the layers of the cosine of their rows
  (find_most_similar, which skips the layers already passed; here all count); its rows, less the farther the layer is
  ahead (expert_predictor.py, predict: 1 - (x - l) / (L + 1)), are the priorities.
- prefetch: all experts with a priority, best first, from the current layer on (expert_prefetcher.py).
- cache: one for all layers; the expert of lowest priority is evicted (expert_priority_score.py, priority_score, without
  an expert's uses so far). Misses are loaded on demand, and the GPU computes everything. The prefetch priorities also
  order the cache, with the current sequence's own activations added to the entry's (docs/lab/policies.md).

hybrimoe: a cache by averaged routing scores, and a queue that divides each layer between CPU and GPU.

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

fiddler  The most popular experts of an offline profile stay on the GPU, the CPU computes the others. Fiddler (Kamahori
    et al., ICLR 2025, arXiv 2402.07033; repository efeslab/fiddler, src/fiddler/mixtral.py): experts are ranked by
    popularity on calibration data, over all layers, and fill the GPU memory that is left (set_expert_loc); nothing is
    cached or prefetched at run time. Without a profile the first steps serve as one.

Entire layers: slots that do not make up an entire layer stay empty. Experts that a system loads for one pass do not
stay: plans do not contain them, the execution model does (`layerwise` and `device_only`: the used experts of an absent
layer cross the link in every step).

llama-cpp, llama-cpp-sd  The last layers are on the GPU; without and with a draft model. `-ngl`, `--n-cpu-moe N`: the
    experts of the first N layers stay on the CPU and are computed there (llama.cpp, common/arg.cpp;
    src/llama-model.cpp, i_gpu_start). MoE-SpAc, Table 2, rows llama.cpp and llama.cpp with speculation.
vllm  `--cpu-offload-gb`: parameters go to pinned host memory in the order of the modules until a budget is spent, so
    the last layers are resident; the others cross the link whenever they are computed (vLLM,
    model_executor/offloader/uva.py, UVAOffloader: zero-copy views of host memory).
accelerate  `device_map="auto"` (Accelerate, utils/modeling.py, infer_auto_device_map; hooks.py, AlignDevicesHook): the
    first layers are resident, and a hook loads the weights of the others before they compute and drops them after it;
    of experts, which are modules of their own, those in use.
llama-cpp-cache  Stock llama.cpp's cache of experts on the GPU, `--moe-cache-mib N` (ggml-org/llama.cpp, commit 4b060f2,
    src/llama-moe-cache.cpp): an LRU that all layers of equal layout share, that is one for each pool of slots
    (moe_cache_lru). As a layer is computed its hits move to the recent end, then its misses, by their numbers, get the
    slots used longest ago and are uploaded before the op (plan); no prefetch, and the GPU computes all experts. The
    host waits once per layer, for the routing (copy). A batch above 32 tokens, or one that may use more experts than
    there are slots, min(tokens * k, N), leaves the cache as it is (get_slot_map); the larger one takes what is there
    (copy_experts), the CPU computes the other, here counted as loads. Hits of a layer move in the order of the batch's
    ids there, by number here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, IndexArray, IntArray, Residency, Resident
from moeedge.policies.base import (
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    Observation,
    Plan,
    Policy,
    PolicyConfig,
    limit_uploads,
)
from moeedge.policies.baselines import Static
from moeedge.policies.cost_model import CostModel, expert_seconds
from moeedge.policies.planner import PerLayerPolicy, PooledPolicy, layers_after, predicted_counts

_CAPACITY = 64  # sequences in the collection; the repository leaves it to its configuration
_MATCH_EVERY = 4  # steps: the nearest entry of a sequence changes slowly
_EPSILON = np.float32(1e-8)  # added to every prediction, as the repository does


class MoeInfinity(PooledPolicy):
    """Score: the predicted share of its layer's activations, times the layer's nearness."""

    name = "moe-infinity"
    execution_model = ExecutionModel(device_only=True, prefetch_within_step=True, speculation=False)

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        size = self._score.shape
        self._matrix: FloatArray = np.zeros(size, dtype=np.float32)  # of the current sequence
        self._entries: FloatArray = np.zeros((_CAPACITY, *size), dtype=np.float32)  # rows have length 1
        self._shares: FloatArray = np.zeros((_CAPACITY, *size), dtype=np.float32)  # rows add up to 1
        self._last_used: BoolArray = np.zeros(size, dtype=np.bool_)
        self._n_matches = np.zeros(_CAPACITY, dtype=np.int64)
        self._n_entries = 0
        self._n_steps = 0
        self._nearest = -1
        self._priority: FloatArray = np.zeros(size, dtype=np.float32)  # the score before nearness
        # [n_layers + 1, n_layers, 1]: 1 at the layer that a plan is for, decreasing with every layer after it, 0 before
        ahead = np.arange(shape.n_layers) - np.arange(shape.n_layers + 1)[:, None]
        nearness = np.where(ahead >= 0, 1.0 - ahead / (shape.n_layers + 1), 0.0)
        self._nearness: FloatArray = nearness[:, :, None].astype(np.float32)
        self._from_layer = 0  # that the next plan is for

    def observe(self, observation: Observation) -> None:
        """Adds to the sequence's matrix and finds the nearest entry."""
        self._matrix += observation.counts
        np.greater(observation.counts, 0, out=self._last_used)
        if self._n_entries and (observation.prefill or self._n_steps % _MATCH_EVERY == 0):
            rows = _unit_rows(self._matrix)
            # the mean over layers of the rows' cosines: the rows have length 1
            similarity = np.einsum("ijk,jk->i", self._entries[: self._n_entries], rows)
            self._nearest = int(similarity.argmax())
            self._n_matches[self._nearest] += 1
        self._n_steps += not observation.prefill
        self._prioritise()

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the experts with the highest scores; keeping what the last step loaded costs no transfer."""
        np.multiply(self._priority, self._nearness[self._from_layer], out=self._score)
        self._set_utilities(self._fit(resident))
        plan = self._moves(resident)
        staged = self._last_used if self._from_layer == 0 else None
        return limit_uploads(plan, self._score, self._max_uploads, staged)

    def plan_layer(self, layer: int, resident: Resident, prediction: ExpertPrediction | None = None) -> Plan:
        """Plans for the layers after `layer`. Experts of earlier layers leave first, those of `layer` stay."""
        in_use = np.asarray(resident, dtype=np.uint8).copy()
        in_use[layer, in_use[layer] > 0] = Residency.IN_FLIGHT  # an expert in flight is no victim
        self._from_layer = layer + 1
        plan = self.plan(in_use, [], prediction)
        self._from_layer = 0
        return plan

    def reset(self) -> None:
        """Ends the sequence and adds its matrix to the collection."""
        if self._n_steps == 0:
            return
        entry = self._n_entries if self._n_entries < _CAPACITY else int(self._n_matches.argmin())
        self._n_entries = max(self._n_entries, entry + 1)
        self._entries[entry] = _unit_rows(self._matrix)
        self._shares[entry] = _normalised_rows(self._matrix)
        self._n_matches[entry] = 1
        self._matrix[:] = 0.0
        self._n_steps = 0
        self._nearest = -1
        self._prioritise()

    def _prioritise(self) -> None:
        np.copyto(self._priority, _normalised_rows(self._matrix))
        if self._nearest >= 0:
            self._priority += self._shares[self._nearest]
        self._priority += _EPSILON

    def _set_utilities(self, lowest: list[float]) -> None:
        unit = max(max((value for value in lowest if np.isfinite(value)), default=0.0), float(_EPSILON))
        np.minimum(self._score / np.float32(unit), self._cap, out=self._utility)


def _unit_rows(matrix: FloatArray) -> FloatArray:
    length = np.sqrt(np.einsum("ij,ij->i", matrix, matrix))
    return np.asarray(matrix / np.maximum(length, np.float32(1e-30))[:, None])


def _normalised_rows(matrix: FloatArray) -> FloatArray:
    return np.asarray(matrix / np.maximum(matrix.sum(axis=1, keepdims=True), np.float32(1e-30)))


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
        """Averages the routing scores."""
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


_TOKENS_MAX = 32  # of a batch that fills llama-cpp-cache
_NONE = np.zeros((0, 2), dtype=np.int32)


class Fiddler(Static):
    """Placement as in static, without a draft model."""

    name = "fiddler"
    execution_model = ExecutionModel(speculation=False)


class EntireLayers(PerLayerPolicy):
    """Holds as many entire layers as fit, from the last one down or from the first one up."""

    from_last = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        shares = np.zeros(shape.n_layers, dtype=np.intp)
        for layers, capacity in shape.pools():
            n_chosen = min(capacity // shape.n_experts, layers.size)
            shares[layers[layers.size - n_chosen :] if self.from_last else layers[:n_chosen]] = shape.n_experts
        super().__init__(shape, config, shares)
        self._score[shares > 0] = 1.0
        self._utility = self._score


class LlamaCpp(EntireLayers):
    """llama.cpp without a draft model."""

    name = "llama-cpp"
    execution_model = ExecutionModel(layerwise=True, speculation=False)


class LlamaCppSd(EntireLayers):
    """llama.cpp with a draft model."""

    name = "llama-cpp-sd"
    execution_model = ExecutionModel(layerwise=True)


class Vllm(EntireLayers):
    """The GPU reads the first layers over the link."""

    name = "vllm"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)


class Accelerate(EntireLayers):
    """The last layers are loaded for each pass."""

    name = "accelerate"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)
    from_last = False


class LlamaCppCache(Policy):
    """One LRU for all layers of a pool; plans move nothing between the layers."""

    name = "llama-cpp-cache"
    execution_model = ExecutionModel(device_only=True, keeps_loads=True, cached_tokens_max=_TOKENS_MAX)

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config)
        self._last_use = np.zeros(self._score.shape, dtype=np.int64)  # 2 n: hit by the n-th computation, + 1: loaded
        self._now = 0
        self._pool = shape.group[:, None] == np.arange(shape.n_groups)  # [n_layers, n_groups]

    def observe(self, observation: Observation) -> None:
        """Takes in which experts the step used, which predicts those of the next one as any LRU does."""
        np.copyto(self._utility, observation.counts > 0)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans no transfers."""
        return self._plan(_NONE, _NONE)

    def plan_load(self, layer: int, counts: IntArray, resident: Resident) -> Plan | None:
        """Gives the missing experts of those that `layer` uses now the slots used longest ago."""
        pool, experts = self.shape.group[layer], np.flatnonzero(counts)
        if min(int(counts.sum()), counts.size) > self.shape.capacity[pool]:
            return None
        self._now += 2
        held = np.asarray(resident != 0) & self._pool[:, pool, None]
        missing = experts[~held[layer, experts]]
        self._last_use[layer, experts] = self._now
        self._last_use[layer, missing] += 1
        n_free = max(int(self.shape.capacity[pool]) - int(np.count_nonzero(held)), 0)
        held[layer, experts] = False
        victims = np.flatnonzero(held)
        age = self._last_use.reshape(-1)[victims]
        victims = victims[np.argsort(age, kind="stable")[: max(missing.size - n_free, 0)]]
        layers = np.full(missing.size, layer)
        return self._plan(_pairs(layers, missing), _pairs(*np.divmod(victims, self.shape.n_experts)))

    def _plan(self, uploads: NDArray[np.int32], victims: NDArray[np.int32]) -> Plan:
        return Plan(
            tau=self._tau,
            utility=self._utility,
            uploads=uploads,
            priority=np.ones(len(uploads), dtype=np.uint8),
            victims=victims,
            victim_utility=np.zeros(len(victims), dtype=np.float32),
        )


def _pairs(layers: IndexArray, experts: IndexArray) -> NDArray[np.int32]:
    return np.stack((layers, experts), axis=1).astype(np.int32)
