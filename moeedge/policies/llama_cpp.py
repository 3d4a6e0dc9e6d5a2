"""Policies llama-cpp and llama-cpp-sd: the last layers are on the GPU, without and with a draft model.

`-ngl`, `--n-cpu-moe N`: the experts of the first N layers stay on the CPU and are computed there, the last layers are
on the GPU (llama.cpp, common/arg.cpp, "keep the Mixture of Experts (MoE) weights of the first N layers in the CPU";
src/llama-model.cpp, i_gpu_start: the last n_gpu_layers). MoE-SpAc, Table 2, rows llama.cpp and llama.cpp with
speculation.
"""

from __future__ import annotations

from moeedge.policies.layers import Layers
from moeedge.scheduler.policy import Traits


class LlamaCpp(Layers):
    """llama.cpp without a draft."""

    name = "llama-cpp"
    traits = Traits(layerwise=True, speculation=False)


class LlamaCppSd(Layers):
    """llama.cpp with a draft."""

    name = "llama-cpp-sd"
    traits = Traits(layerwise=True)
