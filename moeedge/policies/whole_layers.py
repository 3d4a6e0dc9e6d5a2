"""Whole layers, placed for good: what llama.cpp's split and the offload of vLLM and Accelerate share.

Slots that do not make a whole layer stay empty. What a system brings for one pass does not stay: no plan speaks of it,
the traits do (`layerwise` and `device_only`: of an absent layer, what is used crosses the link, in every step).

Policies llama-cpp and llama-cpp-sd: the last layers are on the GPU, without and with a draft model.

`-ngl`, `--n-cpu-moe N`: the experts of the first N layers stay on the CPU and are computed there, the last layers are
on the GPU (llama.cpp, common/arg.cpp, "keep the Mixture of Experts (MoE) weights of the first N layers in the CPU";
src/llama-model.cpp, i_gpu_start: the last n_gpu_layers). MoE-SpAc, Table 2, rows llama.cpp and llama.cpp with
speculation.

Policy vllm: parameters go to pinned host memory until a budget is spent, and the GPU reads them over the link.

`--cpu-offload-gb`: in the order of the modules, so the last layers are resident; the others cross the link whenever
they are computed (vLLM, model_executor/offloader/uva.py, UVAOffloader: zero-copy views of host memory).

Policy accelerate: modules fill the GPU in their order; the others are brought for their forward and dropped.

`device_map="auto"` (Accelerate, utils/modeling.py, infer_auto_device_map; hooks.py, AlignDevicesHook): the first layers
are resident, and a hook moves the weights of the others before they compute, and away after it: of experts, which are
modules of their own, those in use.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, ExecutionModel, ExpertPrediction, Observation, Plan, Resident
from moeedge.policies.config import PolicyConfig
from moeedge.policies.per_layer import PerLayerPlanner

FloatArray = NDArray[np.float32]


class Layers:
    """Holds as many whole layers as fit, from the last one or from the first one."""

    name: str
    execution_model: ExecutionModel
    required_inputs: frozenset[str] = frozenset()
    from_last = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        shares = np.zeros(shape.n_layers, dtype=np.intp)
        for group, capacity in enumerate(shape.capacity.tolist()):
            layers = np.flatnonzero(shape.group == group)
            n_whole = min(capacity // shape.n_experts, layers.size)
            chosen = layers[layers.size - n_whole :] if self.from_last else layers[:n_whole]
            score[chosen] = 1.0
            shares[chosen] = shape.n_experts
        self._score = score
        self._planner = PerLayerPlanner(shape, config.cap, shares)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: ExpertPrediction | None = None) -> Plan:
        """Loads the layers that belong there and are missing: once."""
        keep = self._planner.best(self._score, resident)
        return self._planner.plan(keep, self._score, self._score, resident)

    def reset(self) -> None:
        """Nothing to forget."""


class LlamaCpp(Layers):
    """llama.cpp without a draft."""

    name = "llama-cpp"
    execution_model = ExecutionModel(layerwise=True, speculation=False)


class LlamaCppSd(Layers):
    """llama.cpp with a draft."""

    name = "llama-cpp-sd"
    execution_model = ExecutionModel(layerwise=True)


class Vllm(Layers):
    """The first layers are read over the link."""

    name = "vllm"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)


class Accelerate(Layers):
    """The last layers are brought for each pass."""

    name = "accelerate"
    execution_model = ExecutionModel(device_only=True, layerwise=True, speculation=False)
    from_last = False
