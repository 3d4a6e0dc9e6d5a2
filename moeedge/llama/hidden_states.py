"""Hidden states that llama.cpp hands out while it decodes: those of a target that draft heads read, and a head's own.

These functions are in llama.cpp's src/llama-ext.h. The library exports them as C++ functions, under mangled names.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.llama import library

StateRows = NDArray[np.float32]  # [n_tokens, width]

_CONTEXT, _MODEL = ctypes.c_void_p, ctypes.c_void_p
_FLOATS = ctypes.POINTER(ctypes.c_float)

# (context, whether final states are kept, of tokens with logits only)
keep_final = library.ggml_function(
    "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, _CONTEXT, ctypes.c_bool, ctypes.c_bool
)
_final_rows = library.ggml_function("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, _CONTEXT)
_keep_input = library.ggml_function(
    "_Z30llama_set_embeddings_layer_inpP13llama_contextjb", None, _CONTEXT, ctypes.c_uint32, ctypes.c_bool
)
_input_rows = library.ggml_function(
    "_Z30llama_get_embeddings_layer_inpP13llama_contextj", _FLOATS, _CONTEXT, ctypes.c_uint32
)
# (context, which of a model's heads decodes from now on)
choose_head = library.ggml_function("_Z28llama_set_nextn_layer_offsetP13llama_contexti", None, _CONTEXT, ctypes.c_int32)
_target_layers = library.ggml_function(
    "_Z28llama_model_target_layer_idsPK11llama_model", ctypes.POINTER(ctypes.c_int32), _MODEL
)
_n_target_layers = library.ggml_function("_Z30llama_model_target_layer_ids_nPK11llama_model", ctypes.c_uint32, _MODEL)


class StateTap:
    """Hidden states of every token that a target decodes, with or without logits.

    handle: its llama_context *. layers: whose inputs are read, side by side; `n_layers` stands for the state that the
    model's own head reads. n_embd: width of one.
    """

    def __init__(self, handle: Any, layers: Sequence[int], *, n_layers: int, n_embd: int) -> None:
        self._handle, self._layers, self._n_layers, self._n_embd = handle, tuple(layers), n_layers, n_embd
        for layer in self._layers:
            if layer == n_layers:
                keep_final(handle, True, False)
            else:
                _keep_input(handle, layer, True)

    def read(self, n_tokens: int) -> StateRows:
        """The states of the last decode, float32 [n_tokens, len(layers) * n_embd]: valid until the next one."""
        rows = [self._rows(layer, n_tokens) for layer in self._layers]
        return rows[0] if len(rows) == 1 else np.concatenate(rows, axis=1)

    def _rows(self, layer: int, n_tokens: int) -> StateRows:
        pointer = _final_rows(self._handle) if layer == self._n_layers else _input_rows(self._handle, layer)
        return np.ctypeslib.as_array(pointer, (n_tokens, self._n_embd))


def own_states(handle: Any, n_rows: int, n_embd: int) -> StateRows:
    """The states that the last decode or encode of a draft head left: a view, valid until the next."""
    return np.ctypeslib.as_array(_final_rows(handle), (n_rows, n_embd))


def read_target_layers(model: Any) -> tuple[int, ...]:
    """The target's layers whose inputs an EAGLE-3 or DFlash draft (llama_model *) reads."""
    return tuple(_target_layers(model)[: _n_target_layers(model)])
