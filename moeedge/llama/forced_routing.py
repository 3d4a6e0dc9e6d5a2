"""Forced routing of one context: llama.cpp's eval callback replaces the experts that the routers select.

It works alike in stock llama.cpp's graph and in ours, so that both compute the same experts at the same positions; the
weights are those of the model's own gate for these experts.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.errors import BackendError
from moeedge.llama.model import ModelInfo
from moeedge.llama.sequence import BatchPart
from moeedge.native.abi import RoutingBatchStruct, RoutingMode
from moeedge.native.library import load
from moeedge.trace.routing import RecordedRouting


class ContextRouting:
    """The hook of a context. Made before its llama.cpp context, whose parameters it changes, and closed after it.

    mode: what happens to the next batches. offset: row of the recorded routing that the first position of a text gets.
    text: the tokens of the text by position, int32, where they are known: rejected drafts get an unrelated text's.
    """

    def __init__(self, info: ModelInfo, recorded: RecordedRouting, parameters: Any) -> None:
        self._info, self.recorded = info, recorded
        self.mode, self.offset = RoutingMode.FORCED, 0
        self.text: NDArray[np.int32] | None = None
        self._library = load()
        n_used = np.asarray(info.used_per_layer, dtype=np.int32)
        self._handle = self._library.moeedge_routing_create(
            len(n_used), info.n_experts, n_used.ctypes.data, parameters.n_ubatch
        )
        if not self._handle:
            raise BackendError("moeedge's forced routing cannot be made: out of memory.")
        self._ids, self._n_tokens = recorded.ids[:0], 0  # of the batch in hand
        parameters.cb_eval = ctypes.cast(self._library.moeedge_routing_on_node, lib.ggml_backend_sched_eval_callback)
        parameters.cb_eval_user_data = self._handle

    def prepare(self, parts: Sequence[BatchPart]) -> None:
        """Sets the experts of the batch with these parts, at the ends of their sequences."""
        if self.mode == RoutingMode.FORCED:
            positions = np.concatenate([part.sequence.n_past + np.arange(len(part.tokens)) for part in parts])
            unrelated = np.zeros(len(positions), dtype=np.bool_)
            if self.text is not None:
                unrelated = np.concatenate([self._is_unrelated(part) for part in parts])
            self._ids = self.recorded.rows(positions + self.offset, unrelated)
        self._n_tokens = sum(len(part.tokens) for part in parts)
        raw = RoutingBatchStruct(int(self.mode), self._n_tokens, self._ids.ctypes.data)
        self._check(self._library.moeedge_routing_set(self._handle, ctypes.byref(raw)))

    def _is_unrelated(self, part: BatchPart) -> NDArray[np.bool_]:
        """Whether each token is no part of the text: a draft that differs from it, and all after that."""
        assert self.text is not None
        n_past = part.sequence.n_past
        expected = np.resize(self.text[n_past:], len(part.tokens)) if n_past < len(self.text) else -1
        return np.asarray(np.logical_or.accumulate(np.asarray(part.tokens, dtype=np.int32) != expected))

    def set_capture(self, on: bool) -> None:
        """Whether `used` has the experts of later batches."""
        self._check(self._library.moeedge_routing_set_capture(self._handle, int(on)))

    def used(self, layer: int) -> NDArray[np.int32]:
        """The experts [T, k] that llama.cpp's graph used in the newest batch; for tests. Requires `set_capture`."""
        k = self._info.used_per_layer[layer]
        out = np.empty(self._n_tokens * k or 1, dtype=np.int32)
        n = self._library.moeedge_routing_captured(self._handle, layer, out.ctypes.data, out.size)
        return out[: max(n, 0)].reshape(-1, max(k, 1))

    def close(self) -> None:
        """Frees the hook; closing twice is harmless."""
        if self._handle:
            self._library.moeedge_routing_destroy(self._handle)
            self._handle = None

    def _check(self, status: int) -> None:
        if status < 0:
            raise BackendError(f"moeedge's forced routing failed: {self._library.moeedge_last_error().decode()}")
