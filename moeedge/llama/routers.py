"""A model's own low-bit quantization, made with llama.cpp's quantizer and kept in the cache folder.

As a draft of the model itself it has the same layers, the same hidden size and nearly the same hidden states, which
SP-MoE's predictor lives on (the paper's pair DeepSeek-Lite and DeepSeek-Lite-AWQ is of that kind).

The routers of a model, read from its file: where a hidden state would be sent, without running the model.

SP-MoE (section 3.2) puts what the draft's layers read through the target's routers; Mixtral-Offloading, AdapMoE and
Fate put what this layer's router reads through the next layer's. In both cases the value went through another norm than
the router is used to. A norm is a common factor per token, which changes no order, and a weight per channel, which
does: with both norms' weights known the channels are brought to the scale of the router's own.

The order of experts is what matters: the router's bias and the one that some models add to its probabilities
(DeepSeek-V3) are applied, limits to groups of experts are not.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import paths
from moeedge.errors import EngineError, InputError, ModelFileError
from moeedge.llama import gguf_file, library
from moeedge.llama.model import Model
from moeedge.paths import whole

# by name: enum llama_ftype of llama.h; widths that a type's blocks do not divide get the nearest one that they do
TYPES = {"q2_k": 10, "q3_k": 12, "q4_0": 2, "q4_k": 15, "iq4_nl": 25, "q5_0": 8, "q8_0": 7}


def quantized(model: Path, type_name: str = "q4_0") -> Path:
    """The file, made unless it is there. Raises ModelFileError for a bad model, InputError for an unknown type."""
    gguf_file.summarize(model)
    if type_name not in TYPES:
        raise InputError(f'There is no type "{type_name}" for a draft.', f"Known: {', '.join(TYPES)}.")
    status = model.stat()
    identity = f"{model.resolve()}|{status.st_size}|{status.st_mtime_ns}|{type_name}"
    name = f"{model.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}-{type_name}.gguf"
    try:
        file = paths.cache_dir() / "drafts" / name
        if not file.exists():
            file.parent.mkdir(parents=True, exist_ok=True)
            with whole(file) as beside:
                _quantize(model, beside, TYPES[type_name])
    except OSError as error:
        raise InputError(
            f"The draft cannot be kept in the cache folder: {error.strerror}.",
            "Set MOEEDGE_CACHE to a folder that can be written, or name a draft with -md FILE.",
        ) from None
    return file


def _quantize(model: Path, out: Path, file_type: int) -> None:
    library.start()
    library.forget_errors()
    parameters = lib.llama_model_quantize_default_params()
    parameters.ftype = file_type
    parameters.nthread = library.physical_cores()
    parameters.allow_requantize = True  # a model that is quantized already loses little more
    if lib.llama_model_quantize(os.fsencode(model), os.fsencode(out), ctypes.byref(parameters)) != 0:
        reason = library.first_error() or "it gave no reason"
        raise EngineError(f"llama.cpp cannot quantize {model}: {reason}.")


FloatArray = NDArray[np.float32]

_TENSOR = re.compile(r"^blk\.(\d+)\.(.+)$")
_WEIGHT, _BIAS, _SELECTION = "ffn_gate_inp.weight", "ffn_gate_inp.bias", "exp_probs_b.bias"
_NORMS = ("ffn_norm.weight", "post_attention_norm.weight")  # in front of the router; the first that there is
_WANTED = frozenset((_WEIGHT, _BIAS, _SELECTION, *_NORMS))
_F32, _F16, _BF16 = 0, 1, 30  # enum ggml_type
_SIGMOID = "2"  # enum llama_expert_gating_func_type
_SIGMOID_BY_ITSELF = frozenset({"llama4"})  # architectures whose files do not say so
_TINY = 1e-12  # a norm's weight below which a channel says nothing


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Routers:
    """All of a model; a layer without a router has zeros."""

    weight: FloatArray  # [n_layers, n_experts, n_embd]
    bias: FloatArray | None  # [n_layers, n_experts], added to the logits
    selection_bias: FloatArray | None  # the same shape, added to the probabilities for the choice alone
    norm: FloatArray | None  # [n_layers, n_embd], the weights of the norm in front of the router
    sigmoid: bool = False  # probabilities are sigmoids, not softmax

    @classmethod
    def read(cls, model: Model) -> Routers:
        """Raises ModelFileError where the file keeps them in a type that is not read here (quantized)."""
        info = model.info
        found = read_layer_tensors(model.path, _WANTED)
        weight = _stacked(found, _WEIGHT, (info.n_layers, info.n_experts, info.n_embd))
        if weight is None:
            raise ModelFileError(f"{model.path} has no routers.")
        per_expert = (info.n_layers, info.n_experts)
        selection_bias = _stacked(found, _SELECTION, per_expert)
        # where the file does not tell, a bias for the choice alone means DeepSeek-V3's kind of router
        untold = selection_bias is not None or info.architecture in _SIGMOID_BY_ITSELF
        told = model.metadata(f"{info.architecture}.expert_gating_func")
        return cls(
            weight=weight,
            bias=_stacked(found, _BIAS, per_expert),
            selection_bias=selection_bias,
            norm=norm_weights(found, info.n_layers, info.n_embd),
            sigmoid=untold if told is None else told == _SIGMOID,
        )

    @property
    def shape(self) -> tuple[int, int, int]:
        """n_layers, n_experts, n_embd."""
        n_layers, n_experts, n_embd = self.weight.shape
        return n_layers, n_experts, n_embd

    def ratio(self, layers: NDArray[np.intp], read_norm: FloatArray | None) -> FloatArray | None:
        """What brings values read behind norms of weights `read_norm` to the scale of `layers` [n]; both [n, n_embd].

        None where either norm is not known.
        """
        if self.norm is None or read_norm is None:
            return None
        known = np.abs(read_norm) > _TINY
        return np.where(known, self.norm[layers] / np.where(known, read_norm, 1.0), 0.0).astype(np.float32)

    def probabilities(self, logits: FloatArray) -> FloatArray:
        """Of experts, from logits [..., n_experts]."""
        if self.sigmoid:
            return np.asarray(1.0 / (1.0 + np.exp(-logits)), dtype=np.float32)
        raised = np.exp(logits - logits.max(axis=-1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=-1, keepdims=True), dtype=np.float32)

    def scores(self, layers: slice, inputs: FloatArray) -> FloatArray:
        """Probabilities [n, n_tokens, n_experts] of `layers` from what their routers read, [n, n_tokens, n_embd]."""
        logits = np.matmul(inputs, self.weight[layers].transpose(0, 2, 1))
        if self.bias is not None:
            logits += self.bias[layers][:, None, :]
        return self.probabilities(logits)

    def best(self, layers: slice, scores: FloatArray, k: int) -> NDArray[np.int32]:
        """The k experts [n, n_tokens, k] that would be chosen, the likeliest first, from `scores`."""
        chosen_by = scores
        if self.selection_bias is not None:
            chosen_by = scores + self.selection_bias[layers][:, None, :]
        top = np.argpartition(-chosen_by, k - 1, axis=-1)[..., :k]
        order = np.argsort(-np.take_along_axis(chosen_by, top, axis=-1), axis=-1, kind="stable")
        return np.take_along_axis(top, order, axis=-1).astype(np.int32)


def read_norms(model: Model) -> FloatArray | None:
    """Weights float32 [n_layers, n_embd] of the norms in front of the routers or FFNs; None where a layer has none."""
    return norm_weights(read_layer_tensors(model.path, frozenset(_NORMS)), model.info.n_layers, model.info.n_embd)


def norm_weights(found: dict[tuple[int, str], FloatArray], n_layers: int, n_embd: int) -> FloatArray | None:
    """The same from tensors by layer and role."""
    for role in _NORMS:
        if all((layer, role) in found for layer in range(n_layers)):
            return _stacked(found, role, (n_layers, n_embd))
    return None


def read_layer_tensors(path: Path, roles: frozenset[str]) -> dict[tuple[int, str], FloatArray]:
    """Tensors of those roles ("ffn_norm.weight") as float32, by layer and role, the innermost dimension last."""
    found = {}
    for part in gguf_file.parts(path):
        for tensor in gguf_file.read_tensors(part):
            match = _TENSOR.match(tensor.name)
            if match is not None and match[2] in roles:
                found[int(match[1]), match[2]] = _read(part, tensor)
    return found


def _read(path: Path, tensor: gguf_file.GgufTensor) -> FloatArray:
    types: dict[int, np.dtype[Any]] = {_F32: np.dtype("<f4"), _F16: np.dtype("<f2"), _BF16: np.dtype("<u2")}
    if tensor.type not in types:
        raise ModelFileError(
            f"{path} keeps {tensor.name} quantized, which is not read here.", "Use a file whose routers are F32."
        )
    shape = tuple(size for size in reversed(tensor.shape))
    raw = np.fromfile(path, dtype=types[tensor.type], count=int(np.prod(shape)), offset=tensor.offset)
    if tensor.type == _BF16:
        raw = (raw.astype(np.uint32) << 16).view(np.float32)
    return np.asarray(raw, dtype=np.float32).reshape(shape)


def _stacked(found: dict[tuple[int, str], FloatArray], role: str, shape: tuple[int, ...]) -> FloatArray | None:
    """[n_layers, ...] of one role, zeros where a layer lacks it; None where all do."""
    layers = [layer for layer, name in found if name == role and layer < shape[0]]
    if not layers:
        return None
    stacked = np.zeros(shape, dtype=np.float32)
    for layer in layers:
        stacked[layer] = found[layer, role].reshape(shape[1:])
    return stacked
