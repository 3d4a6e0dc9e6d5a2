"""The routers of a model, read from its file: predicts where a hidden state is routed without running the model.

SP-MoE (section 3.2) feeds the inputs of the draft's layers to the target's routers; Mixtral-Offloading, AdapMoE and
Fate feed the input of this layer's router to the next layer's. Such an input went through another norm than the
router's, whose weights per channel change the order of experts: `Routers.ratio` rescales them. The router's bias and
that of the probabilities (DeepSeek-V3) are applied, limits to groups of experts are not.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file
from moeedge.llama.model import Model

FloatArray = NDArray[np.float32]

_TENSOR = re.compile(r"^blk\.(\d+)\.(.+)$")
_WEIGHT, _BIAS, _SELECTION = "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias"
_NORMS = ("ffn_norm.weight", "post_attention_norm.weight")  # before the router; the first one present is used
_ROLES = frozenset((_WEIGHT, _BIAS, _SELECTION, *_NORMS))
_BF16 = 30  # enum ggml_type
_TYPES = {0: "<f4", 1: "<f2", _BF16: "<u2"}
_SIGMOID = "2"  # enum llama_expert_gating_func_type
_IMPLICIT_SIGMOID = frozenset({"llama4"})  # architectures with sigmoid routers whose files do not say so
_MIN_NORM_WEIGHT = 1e-12  # a channel with a smaller weight carries no information


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Routers:
    """All routers of a model; a layer without a router has zeros."""

    weight: FloatArray  # [n_layers, n_experts, n_embd]
    bias: FloatArray | None  # [n_layers, n_experts], added to the logits
    selection_bias: FloatArray | None  # the same shape, added to the probabilities only to choose experts
    norm: FloatArray | None  # [n_layers, n_embd], weights of the norm before the router
    sigmoid: bool = False  # probabilities by sigmoid instead of softmax

    @classmethod
    def read(cls, model: Model) -> Routers:
        """Reads the routers of `model`. Raises ModelFileError if it has none or they are quantized."""
        info = model.info
        tensors = _read_layer_tensors(model.path, _ROLES)
        weight = _stacked(tensors, _WEIGHT, (info.n_layers, info.n_experts, info.n_embd))
        if weight is None:
            raise ModelFileError(f"{model.path} has no routers.")
        per_expert = (info.n_layers, info.n_experts)
        selection_bias = _stacked(tensors, _SELECTION, per_expert)
        # without a key in the file, a bias for the choice means a router of DeepSeek-V3's kind
        default = selection_bias is not None or info.architecture in _IMPLICIT_SIGMOID
        gating = model.metadata(f"{info.architecture}.expert_gating_func")
        return cls(
            weight=weight,
            bias=_stacked(tensors, _BIAS, per_expert),
            selection_bias=selection_bias,
            norm=_norm_weights(tensors, info.n_layers, info.n_embd),
            sigmoid=default if gating is None else gating == _SIGMOID,
        )

    def ratio(self, layers: NDArray[np.intp], read_norm: FloatArray | None) -> FloatArray | None:
        """Factors [n, n_embd] from a norm `read_norm` [n, n_embd] to that of `layers`; None if either is unknown."""
        if self.norm is None or read_norm is None:
            return None
        has_values = np.abs(read_norm) > _MIN_NORM_WEIGHT
        return np.where(has_values, self.norm[layers] / np.where(has_values, read_norm, 1.0), 0.0).astype(np.float32)

    def probabilities(self, logits: FloatArray) -> FloatArray:
        """Returns the probabilities of experts from logits, both [..., n_experts]."""
        if self.sigmoid:
            return np.asarray(1.0 / (1.0 + np.exp(-logits)), dtype=np.float32)
        raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=-1, keepdims=True), dtype=np.float32)

    def scores(self, layers: slice, inputs: FloatArray) -> FloatArray:
        """Returns the probabilities [n, n_tokens, n_experts] of `layers` for router inputs [n, n_tokens, n_embd]."""
        logits = np.matmul(inputs, self.weight[layers].transpose(0, 2, 1))
        if self.bias is not None:
            logits += self.bias[layers][:, None, :]
        return self.probabilities(logits)

    def best(self, layers: slice, scores: FloatArray, k: int) -> NDArray[np.int32]:
        """Returns the k experts [n, n_tokens, k] that `scores` choose, the most likely first."""
        chosen_by = scores
        if self.selection_bias is not None:
            chosen_by = scores + self.selection_bias[layers][:, None, :]
        top = np.argpartition(-chosen_by, k - 1, axis=-1)[..., :k]
        order = np.argsort(-np.take_along_axis(chosen_by, top, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(top, order, axis=-1).astype(np.int32)


def read_norms(model: Model) -> FloatArray | None:
    """Returns the norms before the routers or FFNs, float32 [n_layers, n_embd]; None if a layer has none."""
    return _norm_weights(_read_layer_tensors(model.path, frozenset(_NORMS)), model.info.n_layers, model.info.n_embd)


def _norm_weights(tensors: dict[tuple[int, str], FloatArray], n_layers: int, n_embd: int) -> FloatArray | None:
    for role in _NORMS:
        if all((layer, role) in tensors for layer in range(n_layers)):
            return _stacked(tensors, role, (n_layers, n_embd))
    return None


def _read_layer_tensors(path: Path, roles: frozenset[str]) -> dict[tuple[int, str], FloatArray]:
    """Returns the tensors of `roles` ("ffn_norm.weight") as float32 by layer and role, the innermost dimension last."""
    tensors = {}
    for tensor in gguf_file.read_all_tensors(path):
        match = _TENSOR.match(tensor.name)
        if match is not None and match[2] in roles:
            tensors[int(match[1]), match[2]] = _read(tensor)
    return tensors


def _read(tensor: gguf_file.GgufTensor) -> FloatArray:
    if tensor.type not in _TYPES:
        raise ModelFileError(
            f"{tensor.name} of {tensor.file} is quantized; only F32, F16 and BF16 can be read.",
            "Use a file whose routers are F32.",
        )
    raw = np.fromfile(tensor.file, _TYPES[tensor.type], count=math.prod(tensor.shape), offset=tensor.offset)
    if tensor.type == _BF16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, dtype=np.float32).reshape(tensor.shape[::-1])


def _stacked(tensors: dict[tuple[int, str], FloatArray], role: str, shape: tuple[int, ...]) -> FloatArray | None:
    """Stacks the tensors of one role to `shape` [n_layers, ...], zeros for a layer without it; None if all lack it."""
    layers = [layer for layer, name in tensors if name == role and layer < shape[0]]
    if not layers:
        return None
    stacked = np.zeros(shape, dtype=np.float32)
    for layer in layers:
        stacked[layer] = tensors[layer, role].reshape(shape[1:])
    return stacked
