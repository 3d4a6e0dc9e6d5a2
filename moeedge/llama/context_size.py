"""How large a context fits in memory when the user asks for no size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import compress

from moeedge.errors import InputError
from moeedge.hardware.memory import available_memory
from moeedge.llama.model import Model
from moeedge.llama.settings import KV_TYPES, ContextSettings
from moeedge.units import format_bytes

RAM_TIER_N_CTX = 8192  # of `choose_ram_tier_n_ctx`, for all texts together
N_CTX_STEP = 256  # tokens; llama.cpp rounds contexts to this
_KV_SHARE = 0.5  # of the free memory, for all KV caches together


def kv_bytes_per_token(model: Model, settings: ContextSettings | None = None) -> float:
    """Returns the bytes of KV cache per token: an upper bound for layers that share or compress their cache.

    settings: of the context, whose types the values have.
    """
    settings = settings or ContextSettings()
    attention = f"{model.info.architecture}.attention"
    head_dim = model.info.n_embd // max(model.n_heads, 1)
    key = int(model.metadata(f"{attention}.key_length") or head_dim)
    value = int(model.metadata(f"{attention}.value_length") or head_dim)
    if model.metadata(f"{attention}.key_length_mla"):
        value = 0  # latent attention computes the values from the cached keys
    bytes_per_head = key * KV_TYPES[settings.type_k].bytes_per_value + value * KV_TYPES[settings.type_v].bytes_per_value
    return model.info.n_layers * max(model.n_heads_kv, 1) * bytes_per_head


def choose_n_ctx(
    models: Sequence[Model],
    n_ctx: int = 0,
    free_bytes: int | None = None,
    *,
    n_parallel: int = 1,
    settings: Sequence[ContextSettings] = (),
) -> tuple[int, str | None]:
    """Returns the context in tokens for target and draft, and a note for the user if the default was reduced.

    n_ctx: the user's size; raises InputError if its KV caches exceed the free memory. Models with a sliding window or a
    recurrent state need less than the estimate and are not checked. 0: the first model's trained context, reduced if
    the KV caches of all models do not fit. free_bytes: measured by default. n_parallel: texts with so many tokens each.
    settings: of each model's context, by default llama.cpp's.
    """
    bytes_of = [kv_bytes_per_token(model, *settings[i : i + 1]) for i, model in enumerate(models)]
    free = available_memory() if free_bytes is None else free_bytes
    if n_ctx:
        plain = (model.info.n_swa == 0 and model.can_roll_back for model in models)
        needed = math.ceil(n_parallel * n_ctx * sum(compress(bytes_of, plain)))
        if needed > free:
            raise InputError(
                f"A context of {n_ctx:,} tokens{_for_each(n_parallel)} needs {format_bytes(needed)} of KV cache, "
                f"but {format_bytes(free)} of memory are free.",
                f"Use -c {max(N_CTX_STEP, int(n_ctx * free / needed) // N_CTX_STEP * N_CTX_STEP)} or less.",
            )
        return n_ctx, None
    n_trained = models[0].info.n_ctx_train
    per_token = n_parallel * sum(bytes_of)
    n_fitting = max(N_CTX_STEP, int(free * _KV_SHARE / per_token) // N_CTX_STEP * N_CTX_STEP)
    if n_fitting >= n_trained:
        return n_trained, None
    full = format_bytes(round(n_trained * per_token))
    return n_fitting, (
        f"The context{_for_each(n_parallel)} is {n_fitting:,} tokens instead of the {n_trained:,} that the model was "
        f"trained with, because the full KV cache would take {full}. Set it with -c N."
    )


def choose_ram_tier_n_ctx(model: Model, *, n_parallel: int = 1) -> tuple[int, str | None]:
    """The same where experts are loaded into the memory that the KV cache leaves, and the user names no size."""
    n_trained = model.info.n_ctx_train
    n_ctx = min(n_trained, max(N_CTX_STEP, RAM_TIER_N_CTX // n_parallel))
    if n_ctx == n_trained:
        return n_ctx, None
    return n_ctx, f"The context is {n_ctx:,} tokens, so that memory is left for experts. Set it with -c N."


def _for_each(n_parallel: int) -> str:
    return f" for each of {n_parallel} texts" if n_parallel > 1 else ""
