"""The shape of a model, as llama.cpp and the file tell it, and numbers with which no model computes."""

from __future__ import annotations

import ctypes
import re
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp.llama_cpp as lib

from moeedge.errors import ModelFileError
from moeedge.llama import gguf_file

DAMAGED = "It is damaged. Download or copy it again."
_WITHOUT_PRODUCT = range(24, 29)  # integers and doubles, by enum ggml_type


@dataclass(frozen=True)
class ModelInfo:
    """The shape of a model, from the file's metadata."""

    architecture: str  # llama.cpp's name: qwen3moe, olmoe, gpt-oss, ...
    n_layers: int
    expert_layers: tuple[int, ...]  # layers with experts, ascending
    n_experts: int  # per layer; 0: dense
    n_expert_used: int  # per token (top-k), the most of any layer
    n_vocab: int
    n_ctx_train: int  # tokens
    n_embd: int
    n_swa: int  # tokens of the sliding attention window; 0: none
    size_bytes: int  # of the files
    n_params: int
    description: str  # architecture and quantization, e.g. "qwen3moe Q4_K - Medium"
    n_head_layers: int = 0  # blocks of the file that predict further tokens (MTP)
    n_expert_used_by_layer: tuple[int, ...] = ()  # where the file has a number for each layer; empty: all are alike

    @property
    def n_expert_layers(self) -> int:
        return len(self.expert_layers)

    @property
    def used_per_layer(self) -> tuple[int, ...]:
        """Experts per token of each layer, 0 for one without experts."""
        return self.n_expert_used_by_layer or tuple(
            self.n_expert_used if layer in self.expert_layers else 0 for layer in range(self.n_layers)
        )


def read_info(handle: Any, summary: gguf_file.GgufSummary, path: Path) -> ModelInfo:
    """The shape of a llama_model that is loaded from the file."""
    architecture = read_metadata(handle, "general.architecture") or "unknown"
    n_layers = lib.llama_model_n_layer(handle)
    expert_layers = tuple(layer for layer in summary.expert_layers if layer < n_layers)
    n_experts = int(read_metadata(handle, f"{architecture}.expert_count") or 0)
    number = read_metadata(handle, f"{architecture}.expert_used_count")  # None of a list, too
    used = [int(number)] if number else gguf_file.read_experts_used(path)[1] if n_experts else []
    by_layer = tuple(n if layer in expert_layers else 0 for layer, n in enumerate(used[:n_layers]))
    return ModelInfo(
        architecture=architecture,
        n_layers=n_layers,
        expert_layers=expert_layers,  # those after n_layers predict further tokens (MTP) and do not run here
        n_experts=n_experts,
        n_expert_used=max(used, default=0),
        n_vocab=lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(handle)),
        n_ctx_train=lib.llama_model_n_ctx_train(handle),
        n_embd=lib.llama_model_n_embd(handle),
        n_swa=lib.llama_model_n_swa(handle),
        size_bytes=summary.size_bytes,
        n_params=lib.llama_model_n_params(handle),
        description=_describe(handle),
        n_head_layers=len(summary.head_layers),
        n_expert_used_by_layer=by_layer if len(used) > 1 and len({*by_layer} - {0}) > 1 else (),
    )


def _describe(handle: Any) -> str:
    """llama.cpp's description without its size, which it guesses from the number of layers (48: "30B.A3B")."""
    text = ctypes.create_string_buffer(256)
    lib.llama_model_desc(handle, text, len(text))
    return re.sub(r"^(\S+) \S+(?: \([^)]*\))* ", r"\1 ", text.value.decode("utf-8", "replace"))


def read_metadata(handle: Any, key: str) -> str | None:
    """A value of the file's metadata as text; None without the key."""
    buffer = ctypes.create_string_buffer(256)
    count = lib.llama_model_meta_val_str(handle, key.encode(), buffer, len(buffer))
    return buffer.value.decode("utf-8", "replace") if count >= 0 else None


def check_numbers(handle: Any, architecture: str, path: Path) -> None:
    """Raises ModelFileError for those that ggml asserts against, or never ends with, in a thread of OpenMP."""

    def read(name: str, default: str) -> float:
        with suppress(ValueError):  # a text, of a key that the model does not use
            return float(read_metadata(handle, f"{architecture}.{name}") or default)
        return float(default)

    for name in ("layer_norm_rms_epsilon", "layer_norm_epsilon", "group_norm_epsilon"):
        if not (epsilon := read(f"attention.{name}", "0")) >= 0:
            raise ModelFileError(f"{path} has {epsilon} as its {name}.", DAMAGED)
    if not lib.llama_model_has_encoder(handle):
        return  # another process has decoded with it (probe_child.py)
    n_rotated, n_most = read("rope.dimension_count", "2"), read("attention.key_length", "inf")
    if n_rotated % 2 or not 0 < n_rotated <= n_most:
        raise ModelFileError(f"{path} has {n_rotated:.0f} as its rope.dimension_count.", DAMAGED)
    if any(tensor.type in _WITHOUT_PRODUCT and tensor.shape[1] > 1 for tensor in gguf_file.read_all_tensors(path)):
        raise ModelFileError(f"{path} has a matrix of a type that nothing is multiplied by.", DAMAGED)
