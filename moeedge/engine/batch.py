"""A llama_batch over NumPy arrays: filled by slice assignment, allocated once per context."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np


class TokenBatch:
    """Room for `n_max` tokens of sequence 0.

    `c_batch` points into the arrays below, which therefore live as long as it does.
    """

    def __init__(self, n_max: int) -> None:
        self.n_max = n_max
        self._tokens = np.zeros(n_max, dtype=np.int32)
        self._positions = np.zeros(n_max, dtype=np.int32)
        self._sequence = np.zeros(1, dtype=np.int32)
        self._n_sequences = np.ones(n_max, dtype=np.int32)
        self._sequence_pointers = np.full(n_max, self._sequence.ctypes.data, dtype=np.uintp)
        self._outputs = np.zeros(n_max, dtype=np.int8)
        self._steps = np.arange(n_max, dtype=np.int32)
        self.c_batch = lib.llama_batch()
        self.c_batch.token = _pointer(self._tokens, lib.llama_token)
        self.c_batch.pos = _pointer(self._positions, lib.llama_pos)
        self.c_batch.n_seq_id = _pointer(self._n_sequences, ctypes.c_int32)
        self.c_batch.seq_id = _pointer(self._sequence_pointers, ctypes.POINTER(lib.llama_seq_id))
        self.c_batch.logits = _pointer(self._outputs, ctypes.c_int8)

    def fill(self, tokens: Sequence[int], first_position: int, *, first_output: int) -> None:
        """`tokens` at consecutive positions; logits are wanted from index `first_output` on."""
        n = len(tokens)
        self._tokens[:n] = tokens
        np.add(self._steps[:n], first_position, out=self._positions[:n])
        self._outputs[:n] = 0
        self._outputs[first_output:n] = 1
        self.c_batch.n_tokens = n


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))
