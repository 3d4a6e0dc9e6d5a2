"""Hidden states that llama.cpp hands out while it decodes: those of a target that draft heads read, and a head's own.

These functions are in llama.cpp's src/llama-ext.h. The library exports them as C++ functions, under mangled names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import POINTER, c_bool, c_float, c_int32, c_uint32, c_void_p
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.llama.library import ggml_function

StateRows = NDArray[np.float32]  # [n_tokens, width]

_FLOATS = POINTER(c_float)

# (context, whether final states are kept, of tokens with logits only)
keep_final = ggml_function("_Z26llama_set_embeddings_nextnP13llama_contextbb", None, c_void_p, c_bool, c_bool)
_final_rows = ggml_function("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, c_void_p)
_keep_input = ggml_function("_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, c_void_p, c_uint32, c_bool)
_input_rows = ggml_function("_Z30llama_get_embeddings_layer_inpP13llama_contextj", _FLOATS, c_void_p, c_uint32)
# (context, which of a model's heads decodes from now on)
choose_head = ggml_function("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, c_void_p, c_int32)
_target_layers = ggml_function("_Z28llama_model_target_layer_idsPK11llama_model", POINTER(c_int32), c_void_p)
_n_target_layers = ggml_function("_Z30llama_model_target_layer_ids_nPK11llama_model", c_uint32, c_void_p)


def tap_states(handle: Any, layers: Sequence[int], *, n_layers: int, n_embd: int) -> Callable[[int], StateRows]:
    """Keeps hidden states of every token that a target (llama_context *) decodes, with or without logits.

    layers: whose inputs are read; `n_layers` stands for the state that the model's own head reads. Returns a function
    of the tokens of the last decode: float32 [n_tokens, len(layers) * n_embd], valid until the next one.
    """
    for layer in layers:
        keep_final(handle, True, False) if layer == n_layers else _keep_input(handle, layer, True)

    def read(n_tokens: int) -> StateRows:
        pointers = (_final_rows(handle) if layer == n_layers else _input_rows(handle, layer) for layer in layers)
        rows = [np.ctypeslib.as_array(pointer, (n_tokens, n_embd)) for pointer in pointers]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)

    return read


def own_states(handle: Any, n_rows: int, n_embd: int) -> StateRows:
    """The states that the last decode or encode of a draft head left: a view, valid until the next."""
    return np.ctypeslib.as_array(_final_rows(handle), (n_rows, n_embd))


def read_target_layers(model: Any) -> tuple[int, ...]:
    """The target's layers whose inputs an EAGLE-3 or DFlash draft (llama_model *) reads."""
    return tuple(_target_layers(model)[: _n_target_layers(model)])
