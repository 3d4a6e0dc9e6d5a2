"""Policies that place whole layers, for good: llama.cpp's split, and the layer offload of vLLM and Accelerate.

llama-cpp      `-ngl`, `--n-cpu-moe N`: the experts of the first N layers stay on the CPU and are computed there, the
               last layers are on the GPU (llama.cpp, common/arg.cpp "keep the Mixture of Experts (MoE) weights of the
               first N layers in the CPU"; src/llama-model.cpp, i_gpu_start: the last n_gpu_layers). `llama-cpp-sd` is
               the same with a draft model (MoE-SpAc, Table 2, rows llama.cpp and llama.cpp with speculation).
vllm           `--cpu-offload-gb`: parameters go to pinned host memory in the order of the modules until the budget is
               spent, so the last layers are resident, and the GPU reads the others over the link whenever it computes
               them (vLLM, model_executor/offloader/uva.py, UVAOffloader).
accelerate     `device_map="auto"`: modules fill the GPU in their order, the rest stays on the host, and a hook brings
               a module's weights before its forward and drops them after it (Accelerate, utils/modeling.py,
               infer_auto_device_map; hooks.py, AlignDevicesHook).

Slots that do not make a whole layer stay empty. What is brought for one pass does not stay: no plan speaks of it, the
traits do (`layerwise` and `device_only`: every expert of an absent layer crosses the link).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.config import PolicyConfig
from moeedge.scheduler.policy import CacheShape, Hints, Observation, Plan, Resident, Traits
from moeedge.scheduler.shares import Shares

FloatArray = NDArray[np.float32]


class _Layers:
    """Holds as many whole layers as fit, from the last one or from the first one."""

    name: str
    traits: Traits
    needs: frozenset[str] = frozenset()
    _from_last = True

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        score: FloatArray = np.zeros((shape.n_layers, shape.n_experts), dtype=np.float32)
        shares = np.zeros(shape.n_layers, dtype=np.intp)
        for group, capacity in enumerate(shape.capacity.tolist()):
            layers = np.flatnonzero(shape.group == group)
            n_whole = min(capacity // shape.n_experts, layers.size)
            chosen = layers[layers.size - n_whole :] if self._from_last else layers[:n_whole]
            score[chosen] = 1.0
            shares[chosen] = shape.n_experts
        self._score = score
        self._planner = Shares(shape, config.cap, shares)

    def observe(self, observation: Observation) -> None:
        """Nothing to learn."""

    def plan(self, resident: Resident, upcoming: Sequence[int], hints: Hints | None = None) -> Plan:
        """Loads the layers that belong there and are missing: once."""
        keep = self._planner.best(self._score, resident)
        return self._planner.plan(keep, self._score, self._score, resident)

    def reset(self) -> None:
        """Nothing to forget."""


class LlamaCpp(_Layers):
    """llama.cpp without a draft."""

    name = "llama-cpp"
    traits = Traits(layerwise=True, speculation=False)


class LlamaCppSd(_Layers):
    """llama.cpp with a draft."""

    name = "llama-cpp-sd"
    traits = Traits(layerwise=True)


class Vllm(_Layers):
    """vLLM's offload: the first layers are read over the link."""

    name = "vllm"
    traits = Traits(device_only=True, layerwise=True, speculation=False)


class Accelerate(_Layers):
    """Accelerate's offload: the last layers are brought and dropped."""

    name = "accelerate"
    traits = Traits(device_only=True, layerwise=True, speculation=False)
    _from_last = False
