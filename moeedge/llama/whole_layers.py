"""Whole layers on a GPU: the last layers with their experts there, the experts of the others in host memory.

This is what llama.cpp's --n-cpu-moe does. The last layers are taken, as there.
"""

from __future__ import annotations

from dataclasses import dataclass

from moeedge.llama.gguf_file import expert_bytes
from moeedge.native.cache import ExpertTensor


@dataclass(frozen=True)
class WholeLayers:
    """A choice of layers whose experts are on the GPU."""

    n_whole: int  # layers with experts, the last ones of the model
    n_cpu_moe: int  # the value of --n-cpu-moe: experts of so many first layers stay in host memory
    expert_bytes: int  # of the layers on the GPU


def whole_layers(tensors: list[ExpertTensor], n_layers: int, n_whole: int) -> WholeLayers:
    """Returns the choice of the last `n_whole` layers with experts; all of them where the model has fewer.

    tensors: from `gguf_file.expert_tensors`. n_layers: of the model, dense ones included.
    """
    layers = sorted({tensor.layer for tensor in tensors})
    n_whole = max(0, min(n_whole, len(layers)))
    first = layers[len(layers) - n_whole] if n_whole else n_layers
    return WholeLayers(n_whole, first, expert_bytes([tensor for tensor in tensors if tensor.layer >= first]))


def most_whole_layers(tensors: list[ExpertTensor], n_layers: int, n_bytes: int) -> WholeLayers:
    """Returns the choice of as many of the last layers as have experts of `n_bytes` at most, together."""
    n_whole, chosen = 0, whole_layers(tensors, n_layers, 0)
    while True:
        n_whole += 1
        larger = whole_layers(tensors, n_layers, n_whole)
        if larger.expert_bytes > n_bytes or larger.n_whole < n_whole:
            return chosen
        chosen = larger
