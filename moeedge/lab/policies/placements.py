"""Placements that are fixed, and a cache without prediction: Fiddler, offload of entire layers, llama.cpp's cache.

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
    (copy_experts). Departures: docs/lab/policies.md.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moeedge.experts import IntArray, Resident
from moeedge.policies.base import CacheShape, ExecutionModel, Observation, Plan, PolicyConfig
from moeedge.policies.baselines import NoCache, Static
from moeedge.policies.planner import PerLayerPolicy

_TOKENS_MAX = 32  # of a batch that fills llama-cpp-cache


class Fiddler(Static):
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
    name = "llama-cpp"
    execution_model = ExecutionModel(layerwise=True, speculation=False)


class LlamaCppSd(EntireLayers):
    name = "llama-cpp-sd"
    execution_model = ExecutionModel(layerwise=True)


class Vllm(EntireLayers):
    name = "vllm"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)


class Accelerate(EntireLayers):
    name = "accelerate"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)
    from_last = False


class LlamaCppCache(NoCache):
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
        plan = self._make_plan(layer * counts.size + missing, np.ones(missing.size, dtype=np.uint8), victims)
        return replace(plan, victim_utility=np.zeros(victims.size, dtype=np.float32))  # they are in the order of use
