"""A llama.cpp context: decodes tokens at the end of one sequence and can roll them back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Literal

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import native
from moeedge.errors import DeviceFailedError, EngineError
from moeedge.llama import library
from moeedge.llama.budget import ContextBudget
from moeedge.llama.model import Mode, Model
from moeedge.native.abi import Phase
from moeedge.native.decoding import Decoder, DriverThrewError
from moeedge.native.devices import MemoryUse, memory_uses
from moeedge.policies.expert_budget import ExpertBudget

Logits = NDArray[np.float32]  # [n_out, n_vocab]
_WITHOUT_GPU = "Start without the GPU: -dev none."
_COMPUTE_FAILED = (-2, -3)  # results of llama_decode: no memory for the graph, or a backend failed


class Cancelled(Exception):
    """The caller's `cancel` asked to stop."""


class TokenBatch:
    """A llama_batch for `n_max` tokens of sequence 0, over NumPy arrays that are allocated once and filled by slices.

    `c_batch` points into the arrays, which must live as long as it does.
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
        """Sets `tokens` at consecutive positions; llama.cpp computes logits from index `first_output` on."""
        n = len(tokens)
        self._tokens[:n] = tokens
        np.add(self._steps[:n], first_position, out=self._positions[:n])
        self._outputs[:n] = 0
        self._outputs[first_output:n] = 1
        self.c_batch.n_tokens = n


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


class Context:
    """The KV cache and compute buffers of one model, for one sequence.

    `tokens` is the content of the KV cache; it changes only together with llama.cpp's memory. After an exception in
    `decode` (KeyboardInterrupt included) both are as before the call.
    """

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_outputs: int = 0,
        op_offload: bool = True,
        has_budget: bool = False,
        mode: Mode = "moeedge",
    ) -> None:
        """Makes the context.

        n_outputs: tokens of a graph that can have logits, for which llama.cpp reserves memory; 0: all. With fewer,
        `decode` computes a longer batch with all logits in pieces. op_offload: llama.cpp's own, of large batches to
            a GPU, for weights in host memory; it reserves room for them there. has_budget: verifications can keep to
            an expert budget (`set_budget`), for which llama.cpp asks about each node of a graph. Raises EngineError
            where memory is short.
        """
        self.model = model
        self.n_threads = n_threads or library.physical_cores()
        self.op_offload = op_offload
        parameters = lib.llama_context_default_params()
        parameters.n_ctx = n_ctx
        parameters.n_batch = n_batch
        parameters.n_ubatch = min(n_ubatch, n_batch)
        parameters.n_outputs_max = n_outputs
        parameters.op_offload = op_offload
        parameters.n_threads = self.n_threads
        parameters.n_threads_batch = self.n_threads
        parameters.swa_full = False  # as in llama.cpp's programs; `trim` handles the positions that are lost
        parameters.no_perf = True
        self.budget: ContextBudget | None = None  # None: no verification can keep to one
        if has_budget and model.info.n_experts > 0:
            self.budget = ContextBudget(model.info, parameters)
        library.clear_errors()
        # without memory llama.cpp counts a buffer twice that its CPU backend and ours share
        native.keep_activations_near(None if model.header_only else model.gpu)
        self._handle = lib.llama_init_from_model(model.handle, parameters)
        if not self._handle:
            if self.budget is not None:
                self.budget.close()
            raise EngineError(
                f"llama.cpp cannot create a context of {n_ctx or model.info.n_ctx_train:,} tokens: "
                f"{library.first_error()}.",
                "Choose a smaller one with -c N.",
            )
        self._decode_batch = Decoder(lib._lib, self._handle)
        # llama.cpp rounds the context up; the user's limit still holds
        self.n_ctx: int = n_ctx or lib.llama_n_ctx(self._handle)
        self.n_ubatch: int = lib.llama_n_ubatch(self._handle)
        self._n_outputs = n_outputs or lib.llama_n_batch(self._handle)
        self.tokens: list[int] = []
        self._shifting = False
        self._memory = lib.llama_get_memory(self._handle)
        self._batch = TokenBatch(lib.llama_n_batch(self._handle))
        self._view: Logits | None = None
        self._view_key = (0, 0)
        self.mode: Mode = "stock"
        self.sensor: native.Sensor | None = None
        self._instance = native.newest_instance()
        self._capture: native.ActivationCapture | None = None
        self._keeps_hidden_states = False
        try:
            self.sensor = self._attach_sensor()
            self._set_offload_scope(mode)
        except BaseException:
            self.close()  # a context must be freed before its model
            raise

    def _attach_sensor(self) -> native.Sensor | None:
        info = self.model.info
        if info.n_experts == 0:
            return None
        # attached with scope NONE, so that llama.cpp decides on flash attention as without our backend
        return native.Sensor.newest(
            info.n_layers, info.n_experts, info.n_expert_used, self.n_ubatch, native.OffloadScope.NONE
        )

    def set_mode(self, mode: Mode) -> None:
        """Sets what our backend computes from the next decode on: no operations in "stock", nor for a dense model."""
        if self._set_offload_scope(mode):
            self._invalidate_graph()

    def _set_offload_scope(self, mode: Mode) -> bool:
        """Passes the mode to the backend; returns whether it changed."""
        backend = self.sensor or self._capture
        if backend is None or mode == self.mode:
            return False
        scope = native.OffloadScope.MOE if self.model.uses_gpu else native.OffloadScope.ALL
        backend.set_offload_scope(native.OffloadScope.NONE if mode == "stock" else scope)
        self.mode = mode
        return True

    def _invalidate_graph(self) -> None:
        """Makes llama.cpp build the next graph anew instead of reusing one with the old device assignment.

        Clearing the control vector does that; removing a sampler does it only if there is one.
        """
        lib.llama_set_adapter_cvec(self._handle, None, 0, 0, 0, 0)

    def capture_activations(self) -> native.ActivationCapture | None:
        """Captures the layers' inputs for expert predictors; from then on our backend also computes a dense model.

        None if llama.cpp computes a dense model on a GPU.
        """
        if self._capture is None and (self.sensor is not None or not self.model.uses_gpu):
            info = self.model.info
            self._capture = native.ActivationCapture(
                self._instance, n_layers=info.n_layers, n_embd=info.n_embd, n_experts=info.n_experts
            )
            if self.sensor is None:
                self._set_offload_scope("moeedge")
            self._invalidate_graph()
        return self._capture

    def set_budget(self, budget: ExpertBudget | None) -> None:
        """Sets what verifications keep to from now on: at most so many experts per layer, or all (None).

        Raises InputError if the budget does not suit the model, and ValueError for a context without `budget`.
        """
        if self.budget is None:
            raise ValueError("the context was made without has_budget, or its model has no experts")
        self.budget.set(budget)
        if self.sensor is not None:
            self.sensor.skip_unweighted(budget is not None and budget.coverage == "truncation")

    @property
    def n_past(self) -> int:
        """Tokens in the KV cache: the position of the next token."""
        return len(self.tokens)

    def decode(
        self,
        tokens: Sequence[int],
        *,
        phase: Phase,
        logits: Literal["all", "last", "none"] = "last",
        hidden_states: bool = False,
    ) -> Logits:
        """Appends `tokens` and computes their logits.

        Returns float32 [n_out, n_vocab], n_out = len(tokens), 1 or 0: a view of llama.cpp's buffer, valid until the
        next call. hidden_states: also keeps the hidden states (`last_hidden_state`), which requires all logits.
        Raises EngineError if the context is full or llama.cpp fails; DeviceFailedError if that may be a GPU's fault.
        """
        if len(tokens) == 0:
            raise ValueError("no tokens to decode")
        if not self._handle:
            raise EngineError("The context is closed.")
        if hidden_states and logits != "all":
            raise ValueError("hidden states require logits='all': llama.cpp keeps those of tokens with logits")
        if hidden_states != self._keeps_hidden_states:
            lib.llama_set_embeddings(self._handle, hidden_states)
            self._keeps_hidden_states = hidden_states
        if self.sensor is not None:
            self.sensor.set_phase(phase)
        elif self._capture is not None:
            self._capture.set_phase(phase)
        before = len(self.tokens)
        n = len(tokens)
        try:
            n_max = min(self._batch.n_max, self._n_outputs) if logits == "all" else self._batch.n_max
            if n > n_max:
                return self._decode_in_pieces(tokens, n_max, phase, logits, hidden_states)
            n_out = n if logits == "all" else 1 if logits == "last" else 0
            self._batch.fill(tokens, before, first_output=n - n_out)
            budget = None if self.mode == "stock" else self.budget
            with nullcontext() if budget is None else budget.during(phase, n):
                self._run(n, wait=n_out > 0)
            self.tokens.extend(tokens)
            if self._capture is not None:
                self._capture.raise_error()
            return self._logits(n_out)
        except BaseException:
            del self.tokens[before:]
            self.resync()
            raise

    def _run(self, n: int, *, wait: bool) -> None:
        """Decodes the batch of `n` tokens; wait: until its logits are there."""
        library.clear_errors()
        try:
            code = self._decode_batch(self._batch.c_batch, wait=wait)
        except DriverThrewError as error:
            self.abandon()
            raise DeviceFailedError(f"The GPU's driver failed: {error}.", _WITHOUT_GPU) from None
        if code == 1:
            raise EngineError(f"The context of {self.n_ctx:,} tokens is full.", "Choose a larger one with -c N.")
        if code != 0:
            message = f"llama.cpp failed to decode {n} tokens (code {code}): {library.first_error()}."
            if self.model.uses_gpu and code in _COMPUTE_FAILED:
                raise DeviceFailedError(message, _WITHOUT_GPU)
            raise EngineError(message)

    def _decode_in_pieces(
        self,
        tokens: Sequence[int],
        size: int,
        phase: Phase,
        logits: Literal["all", "last", "none"],
        hidden_states: bool,
    ) -> Logits:
        """Decodes more tokens than one llama_batch or its logits have room for, `size` at a time."""
        pieces = [tokens[i : i + size] for i in range(0, len(tokens), size)]
        if logits == "all":
            decoded = (self.decode(piece, phase=phase, logits="all", hidden_states=hidden_states) for piece in pieces)
            return np.concatenate([rows.copy() for rows in decoded])
        for piece in pieces[:-1]:
            self.decode(piece, phase=phase, logits="none")
        return self.decode(pieces[-1], phase=phase, logits=logits)

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        logits: Literal["last", "none"],
        cancel: Callable[[], bool] | None = None,
    ) -> Logits:
        """Decodes a prompt in pieces of n_ubatch (llama.cpp's largest computation), so that Ctrl-C acts between them.

        Raises Cancelled once `cancel` returns True; decoded pieces stay in the KV cache.
        """
        rows = np.empty((0, self.model.info.n_vocab), dtype=np.float32)
        for start in range(0, len(tokens), self.n_ubatch):
            if cancel is not None and cancel():
                raise Cancelled
            piece = tokens[start : start + self.n_ubatch]
            last = start + len(piece) == len(tokens)
            rows = self.decode(piece, phase=Phase.PREFILL, logits=logits if last else "none")
        return rows

    def _logits(self, n_out: int) -> Logits:
        """Returns the last `n_out` rows; the view is reused while the address stays."""
        n_vocab = self.model.info.n_vocab
        if n_out == 0:
            return np.empty((0, n_vocab), dtype=np.float32)
        pointer = lib.llama_get_logits(self._handle)
        key = (ctypes.addressof(pointer.contents), n_out)
        if self._view is None or key != self._view_key:
            self._view = np.ctypeslib.as_array(pointer, (n_out, n_vocab))
            self._view_key = key
        return self._view

    @property
    def has_hidden_states(self) -> bool:
        """Whether llama.cpp returns each token's hidden state: not if it pools them, as embedding models do."""
        return int(lib.llama_pooling_type(self._handle)) == int(lib.LLAMA_POOLING_TYPE_NONE)

    def last_hidden_state(self) -> NDArray[np.float32]:
        """Returns the last token's state after the final norm: a float32 [n_embd] view, valid until the next decode.

        Requires `has_hidden_states` and a decode with hidden_states=True.
        """
        pointer = lib.llama_get_embeddings_ith(self._handle, -1)
        return np.ctypeslib.as_array(pointer, (self.model.info.n_embd,))

    def trim(self, n_keep: int) -> None:
        """Drops the tokens from position `n_keep` on.

        If the memory cannot drop single positions (recurrent models, or a sliding window that has already lost the
        tokens that `n_keep` would attend to), it drops all tokens: check `n_past` afterwards.
        """
        if n_keep >= len(self.tokens):
            return
        self._truncate_memory(n_keep)

    def _truncate_memory(self, n_keep: int) -> None:
        """Drops positions from `n_keep` on from llama.cpp's memory and `tokens`, or all of them if it cannot."""
        if self._handle is None:
            n_keep = 0
        elif n_keep <= 0 or not self._can_keep(n_keep) or not lib.llama_memory_seq_rm(self._memory, 0, n_keep, -1):
            lib.llama_memory_clear(self._memory, False)
            n_keep = 0
        del self.tokens[n_keep:]

    def _can_keep(self, n_keep: int) -> bool:
        n_swa = self.model.info.n_swa
        if n_swa == 0:
            return True
        oldest_needed = max(0, n_keep - n_swa + 1)
        return int(lib.llama_memory_seq_pos_min(self._memory, 0)) <= oldest_needed

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Trims to the longest common prefix with `tokens`; returns how many tokens remain in the cache."""
        self.resync()
        common = 0
        for cached, token in zip(self.tokens, tokens, strict=False):
            if cached != token:
                break
            common += 1
        self.trim(common)
        return len(self.tokens)

    @property
    def can_shift(self) -> bool:
        """Whether positions can be renumbered, as a context shift requires."""
        return bool(lib.llama_memory_can_shift(self._memory))

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drops `n_discard` tokens after the first `n_keep` and moves the rest up."""
        if n_discard <= 0 or n_keep + n_discard > len(self.tokens):
            raise ValueError(f"cannot discard {n_discard} of {len(self.tokens)} tokens after the first {n_keep}")
        self._shifting = True
        lib.llama_memory_seq_rm(self._memory, 0, n_keep, n_keep + n_discard)
        lib.llama_memory_seq_add(self._memory, 0, n_keep + n_discard, len(self.tokens), -n_discard)
        del self.tokens[n_keep : n_keep + n_discard]
        self._shifting = False

    def resync(self) -> None:
        """Makes llama.cpp's memory hold exactly `tokens` again after an interruption between the two."""
        if self._handle is None:
            self.tokens.clear()
            return
        if self._shifting:  # interrupted between renumbering and bookkeeping
            self.clear()
            self._shifting = False
        held = int(lib.llama_memory_seq_pos_max(self._memory, 0)) + 1
        if held < len(self.tokens):
            del self.tokens[held:]
        elif held > len(self.tokens):
            self._truncate_memory(len(self.tokens))

    def memory_uses(self) -> list[MemoryUse]:
        """Returns the memory of this context and its model by kind; for a header-only model what they would take."""
        return memory_uses(lib._lib, self._handle, simulated=self.model.header_only)

    def clear(self) -> None:
        """Empties the KV cache."""
        lib.llama_memory_clear(self._memory, False)
        self.tokens.clear()

    def abandon(self) -> None:
        """Forgets the context without freeing it, since a driver failed within it; its memory is not given back."""
        self._view = None
        self._handle = None

    @property
    def is_closed(self) -> bool:
        """Whether the context was freed or abandoned."""
        return self._handle is None

    def close(self) -> None:
        """Frees the context; closing twice is harmless."""
        if self._handle:
            self._view = None
            self.sensor = None
            if self._capture is not None:
                self._capture.close()
                self._capture = None
            lib.llama_free(self._handle)
            self._handle = None
            if self.budget is not None:
                self.budget.close()  # llama.cpp's context, which would call it, is gone

    def __enter__(self) -> Context:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()
