"""A llama.cpp context: decodes tokens at the end of its sequences and can roll them back."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import native
from moeedge.errors import DeviceFailedError, EngineError, require
from moeedge.llama import library
from moeedge.llama.hidden_states import StateRows, tap_states
from moeedge.llama.model import Mode, Model
from moeedge.llama.routers import ContextBudget, ContextRouting
from moeedge.llama.sequence import BatchPart, Cancelled, ContextSequence, Logits, TokenBatch, WantedLogits
from moeedge.llama.settings import KV_TYPES, YARN_FACTORS, ContextSettings
from moeedge.native.abi import Phase, view
from moeedge.native.backends import MemoryUse, memory_uses
from moeedge.native.compute import Decoder, DriverThrewError
from moeedge.native.library import errors_for_aborts, keep_activations_near, newest_instance
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.run import Closing, Run
from moeedge.trace.steps import RecordedRouting

_UNREAD = "could not be loaded"  # an expert, from its file (native/src/expert-loader.cpp)
_WITHOUT_GPU = "Start without the GPU: -dev none."
_QUICK_TOKENS = 32  # a batch of at most so many is not asked to stop, unless it may wait for a disk
_STOPPED = 2  # result of llama_decode: its abort callback said so
_COMPUTE_FAILED = (-2, -3)  # results of llama_decode: no memory for the graph, or a backend failed

_FLASH_ATTENTION = {"auto": "AUTO", "off": "DISABLED", "on": "ENABLED"}  # LLAMA_FLASH_ATTN_TYPE_...
_SECTION_ROPES = (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)  # with four numbers for a position

# (the parts of a batch that was decoded, the hidden states of its tokens: valid until the next decode)
ReadStates = Callable[[Sequence[BatchPart], StateRows], None]

# llama_cpp's own returns a pointer object, whose address costs two more calls in each step
_get_logits = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(("llama_get_logits", lib._lib))


class Context(Closing):
    """The KV cache and compute buffers of a model, for `sequences` of tokens; `decode` and `trim` are of the first."""

    state_width = 0  # of the hidden states that come with each token; 0: none do, as the model is no draft head
    states_alone = False  # and come without tokens

    def __init__(
        self,
        model: Model,
        *,
        n_ctx: int = 0,
        n_threads: int = 0,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        n_outputs: int = 0,
        n_parallel: int = 1,
        op_offload: bool = True,
        has_budget: bool = False,
        routing: RecordedRouting | None = None,
        n_snapshots: int = 0,
        n_checkpoints: int = 0,
        mode: Mode = "moeedge",
        settings: ContextSettings | None = None,
    ) -> None:
        """Makes the context.

        n_ctx: tokens of each sequence; 0: the length that the model was trained with. n_parallel: sequences. They
            share one KV cache (llama.cpp's kv_unified), so that one graph computes a batch of all of them.
        n_outputs: tokens of a graph that can have logits, for which llama.cpp reserves memory; 0: all. `decode`
            computes more in pieces.
        op_offload: llama.cpp's own, of large batches to a GPU, for weights in host memory, with room for them there.
        has_budget: verifications can keep to an expert budget (`set_budget`), for which llama.cpp asks about each node.
        routing: of the experts, instead of the model's own (`ContextRouting`).
        n_snapshots: tokens of a batch that a recurrent memory can take back (`Model.keeps_snapshots`).
        n_checkpoints: of a sequence's prompts, for a memory that cannot go back (recurrent, or with sliding windows).
        Raises EngineError where memory is short.
        """
        self.model, self.settings = model, settings or ContextSettings()
        self.n_threads = n_threads or library.physical_cores()
        self.op_offload, self.n_parallel = op_offload, n_parallel
        parameters = _parameters(self.settings, self.n_threads)
        parameters.n_ctx = n_ctx if n_parallel == 1 else n_parallel * (n_ctx or model.info.n_ctx_train)
        parameters.n_seq_max, parameters.kv_unified = n_parallel, n_parallel > 1
        parameters.n_batch, parameters.n_ubatch = n_batch, min(n_ubatch, n_batch)
        parameters.n_outputs_max, parameters.op_offload, parameters.n_rs_seq = n_outputs, op_offload, n_snapshots
        self._complete(parameters)
        adapters = model.load_adapters(self.settings.adapters)  # before the context, which makes room for them
        # None: no verification can keep to one
        self.budget = ContextBudget(model.info, parameters) if has_budget and model.info.n_experts > 0 else None
        self.routing = None if routing is None else ContextRouting(model.info, routing, parameters)
        hooks = [hook for hook in (self.budget, self.routing) if hook is not None]
        require(len(hooks) < 2, "an expert budget and forced routing cannot be used together")
        library.clear_errors()
        # without memory llama.cpp counts a buffer twice that its CPU backend and ours share
        keep_activations_near(None if model.header_only else model.gpu)
        # llama_context *; None once it is closed
        with errors_for_aborts():
            self.handle = lib.llama_init_from_model(model.handle, parameters)
        if not self.handle:
            for hook in hooks:
                hook.close()
            of_each = f" for each of {n_parallel} texts" if n_parallel > 1 else ""
            others = "" if self.settings == ContextSettings() else ", or leave out -ctk, -ctv or -fa"
            raise EngineError(
                f"llama.cpp cannot create a context of {n_ctx or model.info.n_ctx_train:,} tokens{of_each}: "
                f"{library.first_error()}.",
                f"Choose a smaller one with -c N{others}.",
            )
        if adapters:
            scales = (ctypes.c_float * len(adapters))(*(adapter.scale for adapter in self.settings.adapters))
            pointers = (lib.llama_adapter_lora_p_ctypes * len(adapters))(*adapters)
            lib.llama_set_adapters_lora(self.handle, pointers, len(adapters), scales)
        self._decoder = Decoder(lib._lib, self.handle)
        # llama.cpp rounds the context up; the user's limit still holds
        self.n_ctx: int = n_ctx or lib.llama_n_ctx(self.handle) // n_parallel
        self.n_ubatch: int = lib.llama_n_ubatch(self.handle)
        self.n_snapshots = int(lib.llama_n_rs_seq(self.handle))
        self.n_checkpoints = n_checkpoints
        # the most drafts of a batch that can be taken back; None: no limit
        self.n_drafts_max = self.n_snapshots if model.keeps_snapshots else None
        n_max: int = lib.llama_n_batch(self.handle)
        self._n_outputs = n_outputs or n_max
        self.memory = lib.llama_get_memory(self.handle)
        self.sequences = tuple(ContextSequence(self, index) for index in range(n_parallel))
        n_positions = 4 if lib.llama_model_rope_type(model.handle) in _SECTION_ROPES else 1
        self._batch = TokenBatch(n_max, n_parallel, self.state_width, n_positions if self.states_alone else 0)
        self._view: Logits | None = None
        self._view_key = (0, 0)
        self.mode: Mode = "stock"
        self.sensor: native.Sensor | None = None
        self._instance = newest_instance()
        self._capture: native.ActivationCapture | None = None
        self._keeps_hidden_states = False
        self._read_states: Callable[[Sequence[BatchPart], int], None] | None = None
        try:
            self.sensor = self._attach_sensor()
            self._set_offload_scope(mode)
        except BaseException:
            self.close()  # a context must be freed before its model
            raise

    def _complete(self, parameters: Any) -> None:
        """Sets what a context of another kind needs; called before it is made."""

    def _attach_sensor(self) -> native.Sensor | None:
        info = self.model.info
        if info.n_experts == 0:
            return None
        return native.Sensor(info.n_layers, info.n_experts, info.n_expert_used, self.n_ubatch)

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
        """Makes llama.cpp build the next graph anew, without reusing the old device assignment."""
        lib.llama_set_adapter_cvec(self.handle, None, 0, 0, 0, 0)

    def capture_activations(self) -> native.ActivationCapture | None:
        """Captures inputs of layers for predictors, of a dense model too; None if llama.cpp computes that on a GPU."""
        if self._capture is None and (self.sensor is not None or not self.model.uses_gpu):
            info = self.model.info
            self._capture = native.ActivationCapture(
                self._instance, n_layers=info.n_layers, n_embd=info.n_embd, n_experts=info.n_experts
            )
            if self.sensor is None:
                self._set_offload_scope("moeedge")
            self._invalidate_graph()
        return self._capture

    def tap_states(self, layers: Sequence[int], read: ReadStates) -> None:
        """Hands the hidden states of all tokens that are decoded from now on to `read`. layers: as of `tap_states`."""
        info = self.model.info
        states = tap_states(self.handle, layers, n_layers=info.n_layers, n_embd=info.n_embd)
        self._read_states = lambda parts, n_tokens: read(parts, states(n_tokens))

    def set_budget(self, budget: ExpertBudget | None) -> None:
        """Sets the most experts of a verification per layer; None: all. Raises InputError for an unsuitable one."""
        if self.budget is None:
            raise ValueError("the context was made without has_budget, or its model has no experts")
        self.budget.set(budget)
        if self.sensor is not None:
            self.sensor.skip_unweighted(budget is not None and budget.coverage == "truncation")

    @property
    def n_past(self) -> int:
        """Tokens of the first sequence in the KV cache: the position of its next token."""
        return len(self.sequences[0].tokens)

    def decode(
        self, tokens: Sequence[int], *, phase: Phase, logits: WantedLogits = "last", run: Run | None = None
    ) -> Logits:
        """Appends `tokens` to the first sequence; returns logits float32 [n_out, n_vocab], n_out = len(tokens), 1 or 0.

        They are a view of llama.cpp's buffer, valid until the next call. run: asked every 50 ms, not at the start,
        whether to stop in the middle of the CPU's computation; of small batches where experts are loaded from a file.
        Raises EngineError if the context is full or llama.cpp fails; DeviceFailedError if that may be a GPU's fault;
        Cancelled if the run is cancelled.
        """
        return self.sequences[0].decode(tokens, phase=phase, logits=logits, run=run)

    def decode_parts(self, parts: Sequence[BatchPart], *, phase: Phase, run: Run | None = None) -> list[Logits]:
        """As `decode`, of several sequences in one batch (`fitting`), one part each. Returns the rows of each part."""
        if not self.handle:
            raise EngineError("The context is closed.")
        n = n_out = 0
        before: list[int] = []
        for part in parts:
            if len(part.tokens) == 0:
                raise ValueError("no tokens to decode")
            n += len(part.tokens)
            n_out += part.n_out
            before.append(len(part.sequence.tokens))
        hidden_states = parts[0].logits == "states"
        if hidden_states != self._keeps_hidden_states:
            lib.llama_set_embeddings(self.handle, hidden_states)
            self._keeps_hidden_states = hidden_states
        if self.sensor is not None:
            self.sensor.set_phase(phase)
        elif self._capture is not None:
            self._capture.set_phase(phase)
        # with experts from a file also a small batch may wait for the disk for long
        asks = n > _QUICK_TOKENS or self.model.dense is not None
        self._decoder.cancel = run.cancelled if run is not None and asks else None
        try:
            if n <= self._batch.n_max and n_out <= self._n_outputs:
                return self._decode_batch(parts, n, n_out, phase)
            if len(parts) > 1:
                raise ValueError(f"{n} tokens of {len(parts)} sequences do not fit one batch")
            return [self._decode_in_pieces(parts[0], phase, run)]
        except BaseException:
            for part, n_before in zip(parts, before, strict=True):
                del part.sequence.tokens[n_before:]
                part.sequence.resync(failed=True)
            raise
        finally:
            self._decoder.cancel = None

    def _decode_batch(self, parts: Sequence[BatchPart], n: int, n_out: int, phase: Phase) -> list[Logits]:
        """Decodes `n` tokens, of which `n_out` get logits, in one call of llama_decode."""
        if self.n_parallel > 1:  # llama.cpp would let a text take the room of the others
            for part in parts:
                if len(part.sequence.tokens) + len(part.tokens) > self.n_ctx:
                    raise self._full()
        self._batch.fill(parts)
        if self.routing is not None:
            self.routing.prepare(parts)
        budget = None if self.mode == "stock" else self.budget
        wait = n_out > 0 or self._read_states is not None
        if budget is None:
            self._run(n, wait=wait)
        else:
            with budget.during(phase, n):
                self._run(n, wait=wait)
        for part in parts:
            part.sequence.append(part.tokens)
        if self._capture is not None:
            self._capture.raise_error()
        if self._read_states is not None:
            self._read_states(parts, n)
        rows = self._logits(n_out)
        if len(parts) == 1:
            return [rows]
        return np.split(rows, np.cumsum([part.n_out for part in parts[:-1]]))

    def fitting(self, parts: Sequence[BatchPart]) -> Iterator[slice]:
        """Yields slices of `parts` that one graph computes; a part that is too large on its own has its own slice."""
        first = n = n_out = 0
        for i, part in enumerate(parts):
            n += len(part.tokens)
            n_out += part.n_out
            if i > first and (n > min(self._batch.n_max, self.n_ubatch) or n_out > self._n_outputs):
                yield slice(first, i)
                first, n, n_out = i, len(part.tokens), part.n_out
        yield slice(first, len(parts))

    def _run(self, n: int, *, wait: bool) -> None:
        """Decodes the batch of `n` tokens; wait: until its logits are there."""
        library.clear_errors()
        try:
            code = self._decoder(self._batch.c_batch, wait=wait)
        except DriverThrewError as error:
            self.abandon()
            if not self.model.uses_gpu and "ASSERT" in str(error):
                text = f"llama.cpp failed to decode {n} tokens: {error}."
                raise EngineError(text, "The model file may be damaged. Download or copy it again.") from None
            if not self.model.uses_gpu and str(error).startswith("Out of memory"):
                raise MemoryError from None
            raise DeviceFailedError(f"The GPU's driver failed: {str(error).rstrip('.')}.", _WITHOUT_GPU) from None
        except BaseException:  # raised by `run.cancelled`
            self._drop_counts()
            raise
        if code == 0:
            return
        if code == 1:
            raise self._full()
        self._drop_counts()
        if code == _STOPPED:
            raise Cancelled
        reason = library.first_error()
        if _UNREAD in reason:
            raise EngineError(f"{reason}.", "Check the disk, and start again. A new version belongs in a new file.")
        message = f"llama.cpp failed to decode {n} tokens (code {code}): {reason}."
        if self.model.uses_gpu and code in _COMPUTE_FAILED:
            raise DeviceFailedError(message, _WITHOUT_GPU)
        raise EngineError(message)

    def _drop_counts(self) -> None:
        """Forgets what a decode that has ended early activated: it was counted in some layers only."""
        if self.sensor is not None:
            self.sensor.read_counts()

    def _full(self) -> EngineError:
        return EngineError(f"The context of {self.n_ctx:,} tokens is full.", "Choose a larger one with -c N.")

    def _decode_in_pieces(self, part: BatchPart, phase: Phase, run: Run | None) -> Logits:
        """Decodes more tokens than one llama_batch or its logits have room for, so many at a time."""
        sequence, tokens, logits, states = part
        if states is not None:
            raise ValueError(f"{len(tokens)} tokens of a draft head do not fit one batch")
        of_all = logits in ("all", "states")
        size = min(self._batch.n_max, self._n_outputs) if of_all else self._batch.n_max
        rows: list[Logits] = []
        for start in range(0, len(tokens), size):
            piece, wanted = tokens[start : start + size], logits if of_all or start + size >= len(tokens) else "none"
            rows.append(sequence.decode(piece, phase=phase, logits=wanted, run=run).copy())
        return np.concatenate(rows)

    def _logits(self, n_out: int) -> Logits:
        """Returns the last `n_out` rows; the view is reused while the address stays."""
        n_vocab = self.model.info.n_vocab
        if n_out == 0:
            return np.empty((0, n_vocab), dtype=np.float32)
        address = _get_logits(self.handle)
        if self._view is None or (address, n_out) != self._view_key:
            self._view = view(address, (n_out, n_vocab), np.float32)
            self._view_key = (address, n_out)
        return self._view

    @property
    def has_hidden_states(self) -> bool:
        """Whether llama.cpp returns each token's hidden state: not if it pools them, as embedding models do."""
        return int(lib.llama_pooling_type(self.handle)) == int(lib.LLAMA_POOLING_TYPE_NONE)

    def last_hidden_state(self) -> NDArray[np.float32]:
        """The last token's state after the final norm, a float32 [n_embd] view, after a decode with logits="states"."""
        pointer = lib.llama_get_embeddings_ith(self.handle, -1)
        return np.ctypeslib.as_array(pointer, (self.model.info.n_embd,))

    def trim(self, n_keep: int) -> None:
        self.sequences[0].trim(n_keep)

    @property
    def can_shift(self) -> bool:
        return bool(lib.llama_memory_can_shift(self.memory))

    def memory_uses(self) -> list[MemoryUse]:
        """Returns the memory of this context and its model by kind; for a header-only model what they would take."""
        return memory_uses(lib._lib, self.handle, simulated=self.model.header_only)

    def clear(self) -> None:
        lib.llama_memory_clear(self.memory, False)
        for sequence in self.sequences:
            sequence.forget()

    def abandon(self) -> None:
        """Forgets the context without freeing it, since a driver failed within it; its memory is not given back."""
        self._view = None
        self.handle = None

    @property
    def is_closed(self) -> bool:
        return self.handle is None

    def close(self) -> None:
        """Frees the context; closing twice is harmless."""
        if self.handle:
            self._view = None
            self.sensor = None
            self._read_states = None
            if self._capture is not None:
                self._capture.close()
                self._capture = None
            lib.llama_free(self.handle)
            self.handle = None
            for hook in (self.budget, self.routing):
                if hook is not None:
                    hook.close()  # llama.cpp's context, which would call it, is gone


def _parameters(settings: ContextSettings, n_threads: int) -> Any:
    """llama_context_params with these settings; what is at llama.cpp's own defaults stays as it is."""
    parameters: Any = lib.llama_context_default_params()
    parameters.n_threads = n_threads
    parameters.n_threads_batch = settings.n_threads_batch or n_threads
    parameters.swa_full = False  # as in llama.cpp's programs; `trim` handles the positions that are lost
    parameters.no_perf = True
    parameters.type_k = KV_TYPES[settings.type_k].ggml_type
    parameters.type_v = KV_TYPES[settings.type_v].ggml_type
    parameters.flash_attn_type = getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{_FLASH_ATTENTION[settings.flash_attn]}")
    rope = settings.rope
    if rope.scaling is not None:
        parameters.rope_scaling_type = getattr(lib, f"LLAMA_ROPE_SCALING_TYPE_{rope.scaling.upper()}")
    parameters.rope_freq_base, parameters.rope_freq_scale = rope.freq_base, rope.freq_scale
    parameters.yarn_orig_ctx = rope.yarn_orig_ctx
    for name in YARN_FACTORS:
        if getattr(rope, name) >= 0:
            setattr(parameters, name, getattr(rope, name))
    return parameters
