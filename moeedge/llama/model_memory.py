"""Memory of a model and its context, from a header or from the catalog's facts, for loading, plans and lists."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import llama_cpp.llama_cpp as lib

from moeedge.errors import InputError
from moeedge.hardware.host import available_memory, fits
from moeedge.llama.model import Model
from moeedge.llama.settings import KV_TYPES, ContextSettings
from moeedge.units import format_bytes

DEFAULT_N_CTX = 8192  # of a model that is entirely on a GPU, and of all texts where experts are loaded on demand
N_CTX_STEP = 256  # tokens; llama.cpp rounds contexts to this
_KV_SHARE = 0.5  # of the free memory, for all KV caches together


@dataclass(frozen=True)
class ModelMemory:
    weights_bytes: int
    n_ctx_train: int | None  # tokens; None: unknown
    kv_bytes_per_token: float  # an upper bound for layers that share or compress their cache
    experts_bytes: int = 0  # of all experts; 0: a dense model, or not asked for
    n_expert_layers: int = 0
    n_experts: int = 0  # per layer
    window_bytes: int = 0  # keys and values of layers with a sliding window
    compute_bytes: int = 0  # an allowance; 0: llama.cpp tells, where there is a header
    needs_all_kv: bool = True  # no layer has a sliding window or a recurrent state, which take less

    @classmethod
    def of(cls, model: Model, settings: ContextSettings | None = None) -> ModelMemory:
        """By the model's header. settings: of the context, whose types the values have."""
        settings, info = settings or ContextSettings(), model.info
        attention = f"{info.architecture}.attention"
        n_heads, n_heads_kv = lib.llama_model_n_head(model.handle), lib.llama_model_n_head_kv(model.handle)
        head_dim = info.n_embd // max(n_heads, 1)
        key = int(model.metadata(f"{attention}.key_length") or head_dim)
        value = int(model.metadata(f"{attention}.value_length") or head_dim)
        if model.metadata(f"{attention}.key_length_mla"):
            value = 0  # latent attention computes the values from the cached keys
        of_key, of_value = (KV_TYPES[kind].bytes_per_value for kind in (settings.type_k, settings.type_v))
        return cls(
            info.size_bytes,
            info.n_ctx_train,
            info.n_layers * max(n_heads_kv, 1) * (key * of_key + value * of_value),
            needs_all_kv=info.n_swa == 0 and model.can_roll_back,
        )

    @property
    def dense_bytes(self) -> int:
        return self.weights_bytes - self.experts_bytes

    def default_n_ctx(self, n_ctx: int = 0) -> int:
        """Tokens of a context on a GPU that has the entire model; n_ctx: the user's, 0 for none."""
        return n_ctx or min(DEFAULT_N_CTX, self.n_ctx_train or DEFAULT_N_CTX)

    def kv_bytes(self, n_ctx: int, n_parallel: int = 1) -> int:
        """Keys and values of `n_parallel` texts."""
        return math.ceil(n_parallel * (n_ctx * self.kv_bytes_per_token + self.window_bytes))

    def context_bytes(self, n_ctx: int = 0, n_parallel: int = 1) -> int:
        """Keys, values and buffers of a context of `default_n_ctx`."""
        return self.kv_bytes(self.default_n_ctx(n_ctx), n_parallel) + self.compute_bytes


def fit_whole(
    models: Sequence[ModelMemory], free_bytes: int, total_bytes: int, *, n_ctx: int = 0, n_parallel: int = 1
) -> bool:
    """Whether target, draft and their contexts fit one memory next to its reserve."""
    n_bytes = sum(model.weights_bytes + model.context_bytes(n_ctx, n_parallel) for model in models)
    return fits(n_bytes, free_bytes, total_bytes)


def choose_n_ctx(
    models: Sequence[ModelMemory],
    n_ctx: int = 0,
    free_bytes: int | None = None,
    *,
    n_parallel: int = 1,
    loads_experts: bool = False,
) -> tuple[int, str | None]:
    """Returns the context in tokens for target and draft, and a note for the user if the default was reduced.

    n_ctx: the user's size; raises InputError if its KV caches exceed the free memory. Models with a sliding window or a
    recurrent state need less than the estimate and are not checked. 0: the first model's trained context, reduced if
    the KV caches of all models do not fit. free_bytes: measured by default. n_parallel: texts with so many tokens each.
    loads_experts: experts are loaded on demand into the memory that the KV cache leaves.
    """
    free = available_memory() if free_bytes is None else free_bytes
    of_each = f" for each of {n_parallel} texts" if n_parallel > 1 else ""
    if n_ctx:
        per_token = sum(model.kv_bytes_per_token for model in models if model.needs_all_kv)
        needed = math.ceil(n_parallel * n_ctx * per_token)
        if needed > free:
            raise InputError(
                f"A context of {n_ctx:,} tokens{of_each} needs {format_bytes(needed)} of KV cache, "
                f"but {format_bytes(free)} of memory are free.",
                f"Use -c {max(N_CTX_STEP, int(n_ctx * free / needed) // N_CTX_STEP * N_CTX_STEP)} or less.",
            )
        return n_ctx, None
    n_trained = models[0].n_ctx_train or DEFAULT_N_CTX
    per_token = n_parallel * sum(model.kv_bytes_per_token for model in models)
    n_fitting = int(free * _KV_SHARE / per_token) // N_CTX_STEP * N_CTX_STEP
    n_fitting = max(N_CTX_STEP, DEFAULT_N_CTX // n_parallel if loads_experts else n_fitting)
    if n_fitting >= n_trained:
        return n_trained, None
    if loads_experts:
        return n_fitting, f"The context is {n_fitting:,} tokens, so that memory is left for experts. Set it with -c N."
    full = format_bytes(round(n_trained * per_token))
    return n_fitting, (
        f"The context{of_each} is {n_fitting:,} tokens instead of the {n_trained:,} that the model was "
        f"trained with, because the full KV cache would take {full}. Set it with -c N."
    )
