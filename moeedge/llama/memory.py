"""How large a context the machine can hold, for users who did not ask for a size."""

from __future__ import annotations

from collections.abc import Sequence

import psutil

from moeedge.errors import InputError
from moeedge.llama.model import Model
from moeedge.units import format_bytes

_BYTES_PER_VALUE = 2  # the KV cache is float16 unless told otherwise
_SHARE = 0.5  # of the free memory, for all KV caches together
_GRAIN = 256  # tokens; llama.cpp rounds contexts to this


def kv_bytes_per_token(model: Model) -> int:
    """Bytes of KV cache per token of context: an upper bound where layers share or compress their cache."""
    architecture, n_layers = model.info.architecture, model.info.n_layers
    n_head = model.n_heads
    head = model.info.n_embd // max(n_head, 1)
    key = int(model.metadata(f"{architecture}.attention.key_length") or head)
    value = int(model.metadata(f"{architecture}.attention.value_length") or head)
    if model.metadata(f"{architecture}.attention.key_length_mla"):
        value = 0  # latent attention: values are computed from what is kept for the keys
    return n_layers * max(model.n_heads_kv, 1) * (key + value) * _BYTES_PER_VALUE


def choose_n_ctx(models: Sequence[Model], n_ctx: int, free_bytes: int | None = None) -> tuple[int, str | None]:
    """The context that was asked for, if it is not larger than the memory, or (0) the default one with its sentence."""
    if n_ctx:
        check_n_ctx(models, n_ctx, free_bytes)
        return n_ctx, None
    return default_n_ctx(models, free_bytes)


def check_n_ctx(models: Sequence[Model], n_ctx: int, free_bytes: int | None = None) -> None:
    """Raises InputError where KV caches of `n_ctx` tokens exceed the free memory, which llama.cpp would fill.

    Models that keep only a window or a state need less than is known here; they are let through.
    """
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    plain = [model for model in models if model.info.n_swa == 0 and model.can_roll_back]
    needed = n_ctx * sum(kv_bytes_per_token(model) for model in plain)
    if needed > free:
        raise InputError(
            f"A context of {n_ctx:,} tokens needs {format_bytes(needed)} of KV cache, "
            f"but {format_bytes(free)} of memory are free.",
            f"Use -c {max(_GRAIN, n_ctx * free // needed // _GRAIN * _GRAIN)} or less.",
        )


def default_n_ctx(models: Sequence[Model], free_bytes: int | None = None) -> tuple[int, str | None]:
    """The context that the first model was trained for, or less where the KV caches of all would not fit.

    Returns the size in tokens and, where it was cut, a sentence that says so.
    """
    trained = models[0].info.n_ctx_train
    free = psutil.virtual_memory().available if free_bytes is None else free_bytes
    per_token = sum(kv_bytes_per_token(model) for model in models)
    fitting = max(_GRAIN, int(free * _SHARE) // per_token // _GRAIN * _GRAIN)
    if fitting >= trained:
        return trained, None
    return fitting, (
        f"The context is {fitting:,} tokens instead of the {trained:,} that the model was trained with, "
        f"since the whole KV cache would take {format_bytes(trained * per_token)}; -c N sets it."
    )
