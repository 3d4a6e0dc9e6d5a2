"""The sequences of a llama.cpp context: what the KV cache holds of each text, and the batches that extend them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge.llama.hidden_states import StateRows
from moeedge.native.abi import Phase
from moeedge.run import Run

Logits = NDArray[np.float32]  # [n_out, n_vocab]
# "states": of all tokens, whose hidden states are kept too (`Context.last_hidden_state`)
WantedLogits = Literal["all", "states", "last", "none"]


class Cancelled(Exception):
    """The caller's run asked to stop."""


# tokens at the end of a prompt that the next one may have otherwise: what begins the answer, with a tag of reasoning
_UNSETTLED = 8
_CHECKPOINTS_BYTES = 256 << 20  # most of them together
_PARTIAL = lib.LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY


class Checkpoint(NamedTuple):
    """What a memory that cannot go back held after so many tokens: recurrent states, or a window of attention."""

    n_tokens: int
    prefix: int  # hash of the tokens
    state: NDArray[np.uint8]  # llama.cpp's


class BatchPart(NamedTuple):
    """Tokens of one sequence, which of them get logits, and the hidden states that a draft head takes."""

    sequence: ContextSequence
    tokens: Sequence[int]
    logits: WantedLogits
    states: StateRows | None = None

    @property
    def n_out(self) -> int:
        return {"last": 1, "none": 0}.get(self.logits, len(self.tokens))


class TokenBatch:
    """A llama_batch for `n_max` tokens, over arrays of ctypes, which few tokens fill faster than an array of NumPy.

    `c_batch` points into the arrays, which must live as long as it does. state_width: of the hidden states that come
    with the tokens of a draft head; 0: none do. n_positions: numbers for the position of a state without a token; a
    batch has states or tokens then, not both. 0: none comes alone.
    """

    def __init__(self, n_max: int, n_sequences: int, state_width: int = 0, n_positions: int = 0) -> None:
        self.n_max = n_max
        self._n_positions = n_positions
        self._states = np.zeros((n_max, state_width), dtype=np.float32)
        self._tokens = (ctypes.c_int32 * n_max)()
        self._positions = (ctypes.c_int32 * (max(n_positions, 1) * n_max))()
        self._sequences = np.arange(n_sequences, dtype=np.int32)
        # addresses of their ids
        self._addresses = [self._sequences[i:].ctypes.data for i in range(n_sequences)]
        self._n_sequences = np.ones(n_max, dtype=np.int32)
        self._sequence_pointers = np.full(n_max, self._addresses[0], dtype=np.uintp)
        self._outputs = (ctypes.c_int8 * n_max)()
        self.c_batch = lib.llama_batch(token=self._tokens, pos=self._positions, logits=self._outputs)
        self.c_batch.n_seq_id = _pointer(self._n_sequences, ctypes.c_int32)
        self.c_batch.seq_id = _pointer(self._sequence_pointers, ctypes.POINTER(lib.llama_seq_id))
        if state_width:
            self.c_batch.embd = _pointer(self._states, ctypes.c_float)

    def fill(self, parts: Sequence[BatchPart]) -> None:
        """Sets the parts one after the other, each at the end of its sequence."""
        start = 0
        for part in parts:
            n, first = len(part.tokens), len(part.sequence.tokens)
            stop = start + n
            self._tokens[start:stop] = list(part.tokens)
            self._positions[start:stop] = list(range(first, first + n))
            if len(self._addresses) > 1:
                self._sequence_pointers[start:stop] = self._addresses[part.sequence.index]
            self._outputs[start:stop] = [i >= n - part.n_out for i in range(n)]
            if part.states is not None:
                self._states[start:stop] = part.states
            start = stop
        self.c_batch.n_tokens = start
        if self._n_positions:
            n, has_states = start, parts[0].states is not None
            self.c_batch.token = None if has_states else self._tokens
            self.c_batch.embd = _pointer(self._states, ctypes.c_float) if has_states else None
            if has_states and self._n_positions == 4:  # time, height, width, and one that text has not
                self._positions[n : 4 * n] = [*self._positions[:n], *self._positions[:n], *bytes(n)]


def n_common(tokens: Sequence[int], others: Sequence[int]) -> int:
    """The number of tokens before the first difference."""
    pairs = enumerate(zip(tokens, others, strict=False))
    return next((i for i, (token, other) in pairs if token != other), min(len(tokens), len(others)))


def _pointer(array: np.ndarray[Any, Any], kind: Any) -> Any:
    return ctypes.cast(array.ctypes.data, ctypes.POINTER(kind))


class ContextSequence:
    """One of a context's sequences: a text with its own positions, which attends to itself alone.

    `tokens` is what the KV cache holds of it; it changes only together with llama.cpp's memory. After an exception in
    a decode (KeyboardInterrupt included) both are as before the call.
    """

    def __init__(self, context: Any, index: int) -> None:
        self.context = context  # `Context`
        self.index = index  # llama.cpp's llama_seq_id
        self.tokens: list[int] = []
        self._memory = context.memory
        self._changing = False
        self._n_reversible = 0  # of the last tokens: those that a recurrent memory can take back
        self._checkpoints: list[Checkpoint] = []  # in the order of their tokens

    @property
    def n_past(self) -> int:
        """Tokens in the KV cache: the position of the next token."""
        return len(self.tokens)

    def append(self, tokens: Sequence[int]) -> None:
        """The memory holds `tokens` too, which were decoded in one batch."""
        self.tokens.extend(tokens)
        self._n_reversible = min(len(tokens) - 1, self.context.n_snapshots)

    def decode(
        self,
        tokens: Sequence[int],
        *,
        phase: Phase,
        logits: WantedLogits = "last",
        states: StateRows | None = None,
        run: Run | None = None,
    ) -> Logits:
        """Appends `tokens` and computes their logits; as `Context.decode`. states: as of `BatchPart`."""
        part = BatchPart(self, tokens, logits, states)
        decoded: list[Logits] = self.context.decode_parts([part], phase=phase, run=run)
        return decoded[0]

    def prefill(
        self,
        tokens: Sequence[int],
        *,
        logits: Literal["last", "none"],
        states: StateRows | None = None,
        run: Run | None = None,
    ) -> Logits:
        """Decodes a prompt in pieces of n_ubatch. Raises Cancelled between them; what is decoded stays.

        With checkpoints (`Context.n_checkpoints`) there is one before the prompt's last tokens.
        """
        size, n = self.context.n_ubatch, len(tokens)
        settled = max(0, n - _UNSETTLED) if self._needs_checkpoints else 0
        rows = np.empty((0, self.context.model.info.n_vocab), dtype=np.float32)
        starts = [*range(0, settled, size), *range(settled, n, size)]
        for start, stop in pairwise([*starts, n]):
            if run is not None and run.cancelled():
                raise Cancelled
            if start == settled:
                self._keep_checkpoint()
            wanted: WantedLogits = logits if stop == n else "none"
            of_piece = None if states is None else states[start:stop]
            rows = self.decode(tokens[start:stop], phase=Phase.PREFILL, logits=wanted, states=of_piece, run=run)
        return rows

    @property
    def _needs_checkpoints(self) -> bool:
        model = self.context.model
        return self.context.n_checkpoints > 0 and (not model.can_roll_back or model.info.n_swa > 0)

    def _keep_checkpoint(self) -> None:
        """Keeps what goes back to the tokens held now, the oldest making room; nothing where it would be too large."""
        kept = self._checkpoints
        if not self._needs_checkpoints or not self.tokens or (kept and kept[-1].n_tokens == self.n_past):
            return
        n_bytes = lib.llama_state_seq_get_size_ext(self.context.handle, self.index, _PARTIAL)
        if n_bytes > _CHECKPOINTS_BYTES:
            return
        state = np.empty(n_bytes, dtype=np.uint8)
        address = _pointer(state, ctypes.c_uint8)
        if lib.llama_state_seq_get_data_ext(self.context.handle, address, n_bytes, self.index, _PARTIAL) == n_bytes:
            kept.append(Checkpoint(self.n_past, hash(tuple(self.tokens)), state))
        while len(kept) > self.context.n_checkpoints or sum(each.state.size for each in kept) > _CHECKPOINTS_BYTES:
            del kept[0]

    def _restore(self, n_keep: int) -> int:
        """Goes back to the last checkpoint of at most `n_keep` tokens; its number of tokens, 0 where there is none."""
        found = next((each for each in reversed(self._checkpoints) if each.n_tokens <= n_keep), None)
        if found is None:
            return 0
        n_tokens, prefix, state = found
        if prefix != hash(tuple(self.tokens[:n_tokens])):
            return 0
        self._n_reversible = 0
        self._changing = True
        address = _pointer(state, ctypes.c_uint8)
        n_read = lib.llama_state_seq_set_data_ext(self.context.handle, address, state.size, self.index, _PARTIAL)
        is_back = n_read == state.size and lib.llama_memory_seq_rm(self._memory, self.index, n_tokens, -1)
        held = int(lib.llama_memory_seq_pos_max(self._memory, self.index)) + 1
        self._changing = False
        return n_tokens if is_back and held == n_tokens else 0

    def trim(self, n_keep: int) -> None:
        """Drops the tokens from `n_keep` on; all where the memory cannot drop single ones: check `n_past`."""
        if n_keep < len(self.tokens):
            self._truncate_memory(n_keep)

    def _truncate_memory(self, n_keep: int) -> None:
        """Drops positions from `n_keep` on from llama.cpp's memory and `tokens`, or all of them if it cannot."""
        if self.context.is_closed:
            n_keep = 0
        elif not self._can_keep(n_keep) or not lib.llama_memory_seq_rm(self._memory, self.index, n_keep, -1):
            n_keep = self._restore(n_keep)
            if n_keep == 0:
                self.clear()
        self._n_reversible = 0  # llama.cpp goes back once
        del self.tokens[n_keep:]
        self._checkpoints = [each for each in self._checkpoints if each.n_tokens <= n_keep]

    def _can_keep(self, n_keep: int) -> bool:
        if n_keep <= 0:
            return False
        if self.context.n_snapshots:
            held = int(lib.llama_memory_seq_pos_max(self._memory, self.index)) + 1
            return held - n_keep <= self._n_reversible
        n_swa: int = self.context.model.info.n_swa
        oldest_needed = max(0, n_keep - n_swa + 1)
        return n_swa == 0 or int(lib.llama_memory_seq_pos_min(self._memory, self.index)) <= oldest_needed

    def keep_prefix(self, tokens: Sequence[int]) -> int:
        """Trims to the longest common prefix with `tokens`; returns how many tokens remain in the cache."""
        self.resync()
        self.trim(n_common(self.tokens, tokens))
        return len(self.tokens)

    def shift(self, n_keep: int, n_discard: int) -> None:
        """Drops `n_discard` tokens after the first `n_keep` and moves the rest up."""
        if n_discard <= 0 or n_keep + n_discard > len(self.tokens):
            raise ValueError(f"cannot discard {n_discard} of {len(self.tokens)} tokens after the first {n_keep}")
        self._changing = True
        self._checkpoints.clear()  # their positions move
        lib.llama_memory_seq_rm(self._memory, self.index, n_keep, n_keep + n_discard)
        lib.llama_memory_seq_add(self._memory, self.index, n_keep + n_discard, len(self.tokens), -n_discard)
        del self.tokens[n_keep : n_keep + n_discard]
        self._changing = False

    def resync(self, *, failed: bool = False) -> None:
        """Makes llama.cpp's memory hold exactly `tokens` after an interruption. failed: of a decode."""
        if self.context.is_closed:
            self.tokens.clear()
            return
        # a shift or a restored checkpoint was interrupted before the bookkeeping
        if self._changing or (failed and not self.context.model.can_roll_back):
            n_back = 0 if self._changing else self._restore(len(self.tokens))
            if n_back == 0:
                self.clear()
            del self.tokens[n_back:]
            self._changing = False
        held = int(lib.llama_memory_seq_pos_max(self._memory, self.index)) + 1
        if held != len(self.tokens):
            self._n_reversible = 0  # of tokens that are not known
        if held < len(self.tokens):
            del self.tokens[held:]
        elif held > len(self.tokens):
            self._truncate_memory(len(self.tokens))

    def clear(self) -> None:
        if self.context.n_parallel == 1:
            lib.llama_memory_clear(self._memory, False)
        else:
            lib.llama_memory_seq_rm(self._memory, self.index, -1, -1)
        self.forget()

    def forget(self) -> None:
        """llama.cpp's memory was emptied."""
        self.tokens.clear()
        self._checkpoints.clear()
        self._n_reversible = 0
