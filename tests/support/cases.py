"""The Mixture-of-Experts models that the exactness tests run on: each architecture, each variant of its experts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

MOE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3moe": ("qwen3moe", {}),
    "qwen3moe-f32": ("qwen3moe", {"expert_type": "F32"}),  # plain buffers, no repacked kernels
    "qwen3moe-mixed": ("qwen3moe", {"odd_down_type": "Q8_0"}),  # layers whose experts have unlike sizes
    "qwen2moe": ("qwen2moe", {}),  # shared expert with a gate
    "mixtral": ("llama", {}),
    "olmoe": ("olmoe", {}),  # weights not normalised
    "deepseek2": ("deepseek2", {}),  # leading dense layer, shared expert, latent attention
    "deepseek2-merged": ("deepseek2", {"merged": True}),  # gate and up experts in one tensor
    "deepseek3": ("deepseek2", {"sigmoid": True}),  # sigmoid router with bias, expert groups and scale
    "gpt-oss": ("gpt-oss", {}),  # biases everywhere, attention sinks, sliding window, MXFP4
    "gpt-oss-q8": ("gpt-oss", {"expert_type": "Q8_0"}),
    "llama4": ("llama4", {}),  # every other layer dense, one expert per token, weights before the experts
    "grovemoe": ("grovemoe", {}),  # two blocks per layer: the second's experts belong to groups of the first's
    "granitemoe": ("granitemoe", {}),  # factors on embeddings, residual stream, attention and logits
    "gemma4": ("gemma4", {}),  # GELU experts next to a dense part, router with a scale, norms after each part, windows
    "granitehybrid": ("granitehybrid", {}),  # Mamba layers, shared expert
    "nemotron": ("nemotron_h_moe", {}),  # experts of two matrices with a squared ReLU, in layers of their own
    "nemotron-puzzle": ("nemotron_h_moe", {"per_layer": True}),  # each layer with its own experts per token and widths
}

# rows of 256 values: of one type each, and mixes of several
K_QUANTS = ("Q4_K_M", "Q5_K_M", "Q3_K_M", "Q4_K", "Q5_K", "Q6_K", "Q3_K", "Q2_K", "IQ4_XS")
K_DIMS: dict[str, Any] = {"embd": 256, "heads": 16, "heads_kv": 4, "expert_ff": 256, "layers": 2}
MOE_CASES |= {quant: ("qwen3moe", {"quant": quant, **K_DIMS}) for quant in K_QUANTS}

# experts of rare kinds, for the tests of experts on a device alone
RARE_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "expert-scales": ("qwen3moe", {"expert_scales": True}),  # a factor per expert, as NVFP4 files have
    "IQ1_M": ("qwen3moe", {"expert_type": "IQ1_M", "embd": 256, "expert_ff": 256, "layers": 2}),
}

# of the quantizer's types, the tests of all cases run one by default
SLOW_CASES = (*K_QUANTS[1:], "IQ1_M")

# their memory is a state: tokens cannot be taken back one by one, and one batch holds one text
RECURRENT_CASES = ("granitehybrid", "nemotron", "nemotron-puzzle")
ATTENTION_CASES = {name: case for name, case in MOE_CASES.items() if name not in RECURRENT_CASES}


def case_model(tiny: Callable[..., Path], name: str, **changes: Any) -> Path:
    """The model of a case; tiny: the fixture. changes: of the case's dimensions."""
    arch, dimensions = (MOE_CASES | RARE_CASES)[name]
    return tiny(arch, **(dimensions | changes))
