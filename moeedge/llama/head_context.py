"""The llama.cpp context of a draft head: each token comes with a hidden state of the position before it."""

from __future__ import annotations

import ctypes
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import native
from moeedge.errors import EngineError
from moeedge.llama import library
from moeedge.llama.context import Context
from moeedge.llama.draft_heads import HeadKind
from moeedge.llama.hidden_states import StateRows, choose_head, keep_all_states, keep_own_states, own_states
from moeedge.llama.model import Model
from moeedge.llama.settings import ContextSettings

# llama.cpp reserves logits for each token that is encoded, and for each of a graph of such a model
_N_ENCODED = 64


class HeadContext(Context):
    """The KV cache and compute buffers of a draft head.

    Decodes without logits, or with those of all tokens: llama.cpp's graphs do not agree on which states others leave.
    Our backend computes nothing of it, and its experts are not counted: the sensor's counts are the target's.
    """

    def __init__(
        self,
        model: Model,
        kind: HeadKind,
        target: Context,
        *,
        n_threads: int = 0,
        n_ubatch: int = 512,
        n_outputs: int = 0,
        op_offload: bool = True,
        settings: ContextSettings | None = None,
    ) -> None:
        """Makes the context, for as many sequences of as many tokens as the target's.

        model: of the target for a head in its own file, else the draft's. n_outputs: most tokens with logits.
        Raises EngineError where memory is short.
        """
        self.kind = kind
        self.states_alone = kind.block is not None
        self.state_width = len(kind.layers) * model.info.n_embd if self.states_alone else model.info.n_embd
        self._target_handle = target.handle
        n_ubatch = min(n_ubatch, _N_ENCODED) if kind.encodes else n_ubatch
        super().__init__(
            model,
            n_ctx=target.n_ctx,
            n_threads=n_threads,
            n_batch=n_ubatch,
            n_ubatch=n_ubatch,
            n_outputs=0 if kind.encodes else min(n_outputs, n_ubatch),
            n_parallel=target.n_parallel,
            op_offload=op_offload,
            mode="stock",
            settings=settings,
        )
        if kind.block is None:
            keep_own_states(self._handle)
        else:
            lib.llama_set_causal_attn(self._handle, kind.block.causal)
            if kind.block.n_candidates:
                keep_all_states(self._handle)
        self._ones = np.ones(self.n_ubatch, dtype=np.int8)

    def _complete(self, parameters: Any) -> None:
        if self.kind.name == "mtp":
            parameters.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        else:
            parameters.ctx_other = self._target_handle  # whose embeddings and output it uses where it has none

    def _attach_sensor(self) -> native.Sensor | None:
        return None

    def __enter__(self) -> HeadContext:
        return self

    def last_state(self, n_rows: int) -> NDArray[np.float32]:
        """The last token's own state after a decode of `n_rows` tokens with all logits: a float32 [1, n_embd] copy."""
        rows = own_states(self._handle, n_rows, self.model.info.n_embd)
        return np.array(rows[-1:])

    def choose_head(self, index: int) -> None:
        """Which of the model's heads decodes from now on; each has keys and values of its own in the same cells."""
        if self._handle:  # abandoned where a driver failed in between
            choose_head(self._handle, index)

    def selections(self, n_rows: int) -> StateRows:
        """What the selector of a DFlash draft left for a block of `n_rows` tokens: float32 [n_rows, n_embd], a view.

        A row has the candidates' ids, then for each candidate of the row before (in row 1: for the first) the
        scores of its candidates.
        """
        return own_states(self._handle, n_rows, self.model.info.n_embd)

    def input_states(self, states: StateRows) -> StateRows:
        """What the head decodes: the target's `states`, projected to the head's width by an EAGLE-3 draft."""
        if not self.kind.encodes or len(states) == 0:
            return states
        size = self.n_ubatch
        return np.concatenate([self._encode(states[start : start + size]) for start in range(0, len(states), size)])

    def _encode(self, states: StateRows) -> StateRows:
        rows = np.ascontiguousarray(states, dtype=np.float32)
        batch: Any = lib.llama_batch()  # without positions: the projection uses none
        batch.n_tokens = len(rows)
        batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        batch.logits = self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        library.clear_errors()
        code = lib.llama_encode(self._handle, batch)
        if code != 0:
            raise EngineError(f"llama.cpp failed to project {len(rows)} states (code {code}): {library.first_error()}.")
        return np.array(own_states(self._handle, len(rows), self.model.info.n_embd))
