"""A GGUF model run through llama.cpp's low-level API: decode, roll back, greedy speculation, routing of every layer."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

import llama_cpp
import numpy as np

N_CTX = 1024


@llama_cpp.llama_log_callback
def _quiet(level: int, text: bytes, user_data: ctypes.c_void_p) -> None:
    """llama.cpp's own messages are dropped; errors still arrive as return codes."""


class _TensorHead(ctypes.Structure):
    """The first fields of struct ggml_tensor, as in the pinned llama.cpp."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
    ]


def _ggml() -> ctypes.CDLL:
    library = ctypes.CDLL(str(next((Path(llama_cpp.__file__).parent / "lib").glob("libggml-base.*"))))
    library.ggml_get_name.restype = ctypes.c_char_p
    library.ggml_get_name.argtypes = [ctypes.c_void_p]
    library.ggml_backend_tensor_get.restype = None
    library.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return library


class RoutingTap:
    """Reads the chosen experts of every layer out of llama.cpp's graph while it is computed."""

    NAME = re.compile(rb"ffn_moe_topk-(\d+)$")

    def __init__(self) -> None:
        self.ids: dict[int, np.ndarray] = {}  # layer -> (n_tokens, k) of the last decode
        self._ggml = _ggml()
        self.callback = llama_cpp.ggml_backend_sched_eval_callback(self._seen)  # kept: llama.cpp holds no reference

    def _seen(self, tensor: int, ask: bool, user_data: Any) -> bool:
        match = self.NAME.match(self._ggml.ggml_get_name(tensor) or b"")
        if ask:
            return match is not None
        if match:
            head = _TensorHead.from_address(tensor)
            k, n_token = head.ne[0], head.ne[1]
            raw = (ctypes.c_char * k * 4)()
            table = np.empty((n_token, k), dtype=np.int32)
            for t in range(n_token):  # a view into the sorted table: rows are nb[1] bytes apart
                self._ggml.ggml_backend_tensor_get(tensor, raw, t * head.nb[1], k * 4)
                table[t] = np.frombuffer(raw, dtype=np.int32, count=k)
            self.ids[int(match[1])] = table
        return True


class Runner:
    """One model with one context and one sequence."""

    def __init__(self, path: Path, n_ctx: int = N_CTX, n_threads: int = 2, tap: RoutingTap | None = None) -> None:
        llama_cpp.llama_log_set(_quiet, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        model = llama_cpp.llama_model_load_from_file(str(path).encode(), llama_cpp.llama_model_default_params())
        if not model:
            raise OSError(f"llama.cpp cannot load {path}")
        self.model = model
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = n_ctx
        params.n_threads = params.n_threads_batch = n_threads
        self._tap = tap
        if tap is not None:
            params.cb_eval = tap.callback
        context = llama_cpp.llama_init_from_model(model, params)
        if not context:
            raise OSError(f"llama.cpp cannot make a context for {path}")
        self.context = context
        self.vocab = llama_cpp.llama_model_get_vocab(model)
        self.n_vocab: int = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.n_past = 0

    def __enter__(self) -> Runner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    @property
    def n_expert(self) -> int:
        """Experts of a layer; 0 for a dense model."""
        return int(self.meta(f"{self.meta('general.architecture')}.expert_count") or 0)

    def meta(self, key: str) -> str:
        """A metadata value as text; empty without the key."""
        room = ctypes.create_string_buffer(128)
        n = llama_cpp.llama_model_meta_val_str(self.model, key.encode(), room, len(room))
        return room.value.decode() if n >= 0 else ""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text with its special tokens."""
        data = text.encode()
        room = (llama_cpp.llama_token * (len(data) + 8))()
        n = llama_cpp.llama_tokenize(self.vocab, data, len(data), room, len(room), False, True)
        if n < 0:
            raise ValueError("text does not fit its token buffer")
        return list(room[:n])

    def decode_text(self, ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        pieces = []
        room = ctypes.create_string_buffer(256)
        for token in ids:
            n = llama_cpp.llama_token_to_piece(self.vocab, token, room, len(room), 0, False)
            pieces.append(room.raw[: max(n, 0)])
        return b"".join(pieces).decode(errors="replace")

    def is_end(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self.vocab, token))

    def eval(self, ids: Sequence[int]) -> np.ndarray:
        """Append tokens; logits (n, n_vocab) of all of them."""
        batch = llama_cpp.llama_batch_init(len(ids), 0, 1)
        batch.n_tokens = len(ids)
        for i, token in enumerate(ids):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, self.n_past + i, 1
            batch.seq_id[i][0], batch.logits[i] = 0, 1
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        self.n_past += len(ids)
        rows = llama_cpp.llama_get_logits(self.context)
        return np.ctypeslib.as_array(rows, shape=(len(ids), self.n_vocab)).copy()

    def cut(self, n_past: int) -> None:
        """Forget everything from position `n_past` on."""
        llama_cpp.llama_memory_seq_rm(llama_cpp.llama_get_memory(self.context), 0, n_past, -1)
        self.n_past = min(self.n_past, n_past)


@dataclass
class Speculation:
    """Statistics of greedy speculative answers."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        return self.accepted / max(1, self.drafted)


def speculate(
    target: Runner, draft: Runner, prompt: Sequence[int], gamma: int, n_max: int, record: Speculation
) -> list[int]:
    """Greedy answer to `prompt`, chain drafts of length `gamma`: draft, verify, keep the common prefix, roll back."""
    for model in (target, draft):
        model.cut(0)
    out: list[int] = []
    token = int(target.eval(prompt)[-1].argmax())
    unseen = [*prompt, token]  # what the draft has not read yet
    while not target.is_end(token) and len(out) < n_max:
        out.append(token)
        proposal: list[int] = []
        feed = unseen
        while len(proposal) < gamma:
            proposal.append(int(draft.eval(feed)[-1].argmax()))
            if draft.is_end(proposal[-1]):
                break
            feed = proposal[-1:]
        best = target.eval([token, *proposal]).argmax(axis=-1)
        n_same = 0
        while n_same < len(proposal) and best[n_same] == proposal[n_same]:
            n_same += 1
        record.steps, record.drafted, record.accepted = (
            record.steps + 1,
            record.drafted + len(proposal),
            record.accepted + n_same,
        )
        kept = target.n_past - len(proposal) + n_same
        target.cut(kept)
        # the draft has not read its own last proposal; anything past the accepted ones goes
        draft.cut(min(draft.n_past, kept))
        token = int(best[n_same])
        accepted = proposal[:n_same]
        if accepted and target.is_end(accepted[-1]):
            out.extend(accepted[:-1])
            break
        out.extend(accepted)
        unseen = [*accepted[len(accepted) - (kept - draft.n_past) :], token] if kept > draft.n_past else [token]
    record.tokens += len(out)
    record.answers.append(out)
    return out
