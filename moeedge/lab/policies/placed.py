"""Placements of published systems: experts or entire layers, placed once.

fiddler  The most popular experts of an offline profile stay on the GPU, the CPU computes the others. Fiddler (Kamahori
         et al., ICLR 2025, arXiv 2402.07033), by its abstract and its repository (efeslab/fiddler,
         src/fiddler/mixtral.py); the paper's text was not at hand. Experts are ranked by popularity on calibration
         data, over all layers, and fill the GPU memory that is left (set_expert_loc); nothing is cached or prefetched
         at run time. Without a profile the first steps serve as one. Left out: where a missing expert has so many
         tokens that the CPU would take longer than one transfer (10 tokens by the repository's constants, a prompt
         rather than a verification), Fiddler moves its weights for that one use.

Entire layers: slots that do not make up an entire layer stay empty. Experts that a system loads for one pass do not
stay: plans do not contain them, the execution model does (`layerwise` and `device_only`: the used experts of an absent
layer cross the link in every step).

llama-cpp, llama-cpp-sd  The last layers are on the GPU; without and with a draft model. `-ngl`, `--n-cpu-moe N`: the
            experts of the first N layers stay on the CPU and are computed there, the last layers are on the GPU
            (llama.cpp, common/arg.cpp, "keep the Mixture of Experts (MoE) weights of the first N layers in the CPU";
            src/llama-model.cpp, i_gpu_start: the last n_gpu_layers). MoE-SpAc, Table 2, rows llama.cpp and llama.cpp
            with speculation.
vllm        Parameters go to pinned host memory until a budget is spent, and the GPU reads them over the link.
            `--cpu-offload-gb`: in the order of the modules, so the last layers are resident; the others cross the link
            whenever they are computed (vLLM, model_executor/offloader/uva.py, UVAOffloader: zero-copy views of host
            memory).
accelerate  Modules fill the GPU in their order; the others are loaded for their forward pass and dropped.
            `device_map="auto"` (Accelerate, utils/modeling.py, infer_auto_device_map; hooks.py, AlignDevicesHook): the
            first layers are resident, and a hook loads the weights of the others before they compute and drops them
            after it; of experts, which are modules of their own, those in use.
"""

from __future__ import annotations

import numpy as np

from moeedge.policies.base import CacheShape, ExecutionModel, PolicyConfig
from moeedge.policies.per_layer import PerLayerPolicy
from moeedge.policies.static import Static


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
