"""The reference: plain low-level llama_cpp calls, written without the engine that the tests judge."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np


@ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
def _swallow_log(level: int, text: bytes, user_data: int) -> None:
    """llama.cpp logs hundreds of lines per model; module level, because a collected callback crashes."""


def silence() -> None:
    """Discards llama.cpp's log; for processes without our engine, which keeps the log itself."""
    llama_cpp.llama_log_set(_swallow_log, None)


# as --cpu-moe, without .scale: llama.cpp hands a host factor (NVFP4 files) to the device as if it were in its memory
EXPERT_TENSORS = rb"\.ffn_(up|down|gate|gate_up)_(ch|)exps\.(weight|bias)"


class BufferOverride(ctypes.Structure):
    """struct llama_model_tensor_buft_override of llama.h."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


def _ggml(name: str, *arguments: bytes) -> int:
    """Calls a function of ggml that returns a pointer."""
    function = getattr(llama_cpp.llama_cpp._lib, name)
    function.restype = ctypes.c_void_p
    found = function(*arguments)
    assert found, f"{name}{arguments} found nothing"
    return int(found)


NO_AMX = "MOEEDGE_TEST_NO_AMX"  # set where llama.cpp's AMX kernels fail as they are compiled (amx-check.cpp)


class _SignalStack(ctypes.Structure):
    """stack_t."""

    _fields_ = (("address", ctypes.c_void_p), ("flags", ctypes.c_int), ("n_bytes", ctypes.c_size_t))


@cache
def keep_from_broken_amx() -> None:
    """Does what our library does, in a process that does not load it: a reference must not end with a signal."""
    if NO_AMX not in os.environ:
        return
    cpu = _ggml("ggml_backend_dev_by_name", b"CPU")
    registry = llama_cpp.llama_cpp._lib.ggml_backend_dev_backend_reg
    find = llama_cpp.llama_cpp._lib.ggml_backend_reg_get_proc_address
    registry.restype = find.restype = ctypes.c_void_p
    name = b"ggml_backend_dev_get_extra_bufts"
    address = find(ctypes.c_void_p(registry(ctypes.c_void_p(cpu))), name)
    memory = ctypes.create_string_buffer(8192)  # too small for AMX's registers, so that Linux refuses them
    small, before = _SignalStack(ctypes.addressof(memory), 0, len(memory)), _SignalStack()
    libc = ctypes.CDLL(None)
    assert libc.sigaltstack(ctypes.byref(small), ctypes.byref(before)) == 0
    ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(address)(cpu)
    assert libc.sigaltstack(ctypes.byref(before), None) == 0


class StockContext:
    """One model and one context of stock llama.cpp; tokens are appended to one sequence."""

    def __init__(
        self,
        path: Path,
        *,
        n_ctx: int = 256,
        n_threads: int = 1,
        n_batch: int = 256,
        n_ubatch: int = 256,
        callback: Any = None,
        repack: bool = True,
        gpu: str = "",
        n_gpu_layers: int = 0,
        experts_on_cpu: bool = False,
        types: tuple[int, int] = (llama_cpp.GGML_TYPE_F16, llama_cpp.GGML_TYPE_F16),
        lora: Path | None = None,
        lora_scale: float = 1.0,
        **settings: Any,
    ) -> None:
        """types: enum ggml_type of K and V. settings: fields of llama_context_params."""
        llama_cpp.llama_backend_init()
        keep_from_broken_amx()
        model_params = llama_cpp.llama_model_default_params()
        model_params.n_gpu_layers = n_gpu_layers
        model_params.use_extra_bufts = repack
        # by default neither GPUs nor workers: a reference computes on the CPU
        devices = (ctypes.c_void_p * 2)(_ggml("ggml_backend_dev_by_name", gpu.encode()) if gpu else None)
        model_params.devices = ctypes.cast(devices, ctypes.c_void_p)
        overrides = (BufferOverride * 2)()
        if experts_on_cpu:  # --cpu-moe
            overrides[0] = BufferOverride(EXPERT_TENSORS, _ggml("ggml_backend_cpu_buffer_type"))
            model_params.tensor_buft_overrides = ctypes.cast(overrides, ctypes.c_void_p)
        self.model = llama_cpp.llama_model_load_from_file(str(path).encode(), model_params)
        assert self.model, f"llama.cpp cannot load {path.name}"
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch = n_ctx, n_batch, n_ubatch
        params.n_threads = params.n_threads_batch = n_threads
        params.swa_full = False  # as llama.cpp's own programs set it
        params.no_perf = True
        params.type_k, params.type_v = types
        for name, value in settings.items():
            setattr(params, name, value)
        adapter = None
        if lora is not None:
            adapter = llama_cpp.llama_adapter_lora_init(self.model, str(lora).encode())
            assert adapter, f"llama.cpp cannot load {lora.name}"
        self._callback = llama_cpp.ggml_backend_sched_eval_callback(callback) if callback else None
        if self._callback:
            params.cb_eval = self._callback
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        assert self.context, f"llama.cpp cannot make a context for {path.name}"
        if adapter is not None:
            kind = llama_cpp.llama_adapter_lora_p_ctypes
            handles = (kind * 1)(ctypes.cast(adapter, kind))
            llama_cpp.llama_set_adapters_lora(self.context, handles, 1, (ctypes.c_float * 1)(lora_scale))
        self.vocab = llama_cpp.llama_model_get_vocab(self.model)
        self.n_vocab = llama_cpp.llama_vocab_n_tokens(self.vocab)
        self.n_batch = n_batch
        self.n_past = 0
        self.path, self.n_ctx, self.repack = path, n_ctx, repack
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def decode(self, tokens: Sequence[int], *, every: bool = True) -> np.ndarray:
        """Appends the tokens; the logits of all of them, or of the last alone: a copy, float32 [n_out, n_vocab]."""
        (rows,) = self.decode_parts([(0, self.n_past, tokens)], every=every)
        self.n_past += len(tokens)
        return rows

    def decode_parts(self, parts: Sequence[tuple[int, int, Sequence[int]]], *, every: bool = True) -> list[np.ndarray]:
        """Tokens of several sequences in one batch, each part with its sequence and first position; as `decode`."""
        n_tokens = sum(len(tokens) for _, _, tokens in parts)
        assert n_tokens <= self.n_batch
        batch = llama_cpp.llama_batch_init(n_tokens, 0, 1)
        i = 0
        for sequence, first, tokens in parts:
            for place, token in enumerate(tokens):
                batch.token[i], batch.pos[i] = token, first + place
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
                batch.logits[i] = every or place == len(tokens) - 1
                i += 1
        batch.n_tokens = n_tokens
        code = llama_cpp.llama_decode(self.context, batch)
        llama_cpp.llama_batch_free(batch)
        assert code == 0, f"llama_decode returned {code}"
        n_outs = [len(tokens) if every else 1 for _, _, tokens in parts]
        rows = np.ctypeslib.as_array(llama_cpp.llama_get_logits(self.context), (sum(n_outs), self.n_vocab)).copy()
        return np.split(rows, np.cumsum(n_outs[:-1]))

    def trim(self, n_keep: int, sequence: int = 0) -> None:
        """Drops everything of a sequence from position `n_keep` on."""
        memory = llama_cpp.llama_get_memory(self.context)
        assert llama_cpp.llama_memory_seq_rm(memory, sequence, n_keep, -1)
        if sequence == 0:
            self.n_past = n_keep

    def greedy(self, prompt: Sequence[int], n_predict: int) -> tuple[list[int], np.ndarray]:
        """Plain greedy decoding: the tokens, an end token included, and the logits that each was taken from."""
        self.trim(0)
        rows = [self.decode(prompt, every=False)[0]]
        tokens = [int(rows[0].argmax())]
        while len(tokens) < n_predict and not llama_cpp.llama_vocab_is_eog(self.vocab, tokens[-1]):
            rows.append(self.decode([tokens[-1]])[0])
            tokens.append(int(rows[-1].argmax()))
        return tokens, np.stack(rows)

    def answer(self, prompt: Sequence[int], n_predict: int) -> list[int]:
        """The tokens of `greedy`, which are computed once."""
        key = (n_predict, *prompt)
        if key not in self._answers:
            self._answers[key] = self.greedy(prompt, n_predict)[0]
        return self._answers[key]

    def tokenize(self, text: str) -> list[int]:
        """The text's token ids, special tokens parsed."""
        raw = text.encode()
        out = (llama_cpp.llama_token * (len(raw) + 8))()
        n_tokens = llama_cpp.llama_tokenize(self.vocab, raw, len(raw), out, len(out), False, True)
        assert n_tokens >= 0
        return list(out[:n_tokens])

    def close(self) -> None:
        llama_cpp.llama_free(self.context)
        llama_cpp.llama_model_free(self.model)

    def __enter__(self) -> StockContext:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()


class RouterTap:
    """llama.cpp's own evaluation callback, keeping what the routers chose: the sensor's reference.

    After a decode `ids[layer]` is int32 [n_tokens, n_used] and `weights[layer]` float32 [n_tokens, n_used]: the weights
    that multiply the experts' outputs, that is the last of the tensors that llama.cpp calls ffn_moe_weights*. Of two
    blocks in a layer (GroveMoE), those of the first.
    """

    # in the order of the graph; each replaces the one before
    WEIGHT_NAMES = ("ffn_moe_weights", "ffn_moe_weights_softmax", "ffn_moe_weights_norm", "ffn_moe_weights_scaled")

    def __init__(self) -> None:
        self.ids: dict[int, np.ndarray] = {}
        self.weights: dict[int, np.ndarray] = {}
        self._layer = -1  # of the last tensor; a lower one begins a graph
        self._begun: set[int] = set()  # layers of the graph whose weights are known
        self._done: set[int] = set()  # layers of the graph whose second block has begun

    def clear(self) -> None:
        """Forgets the last decode."""
        self.ids.clear()
        self.weights.clear()
        self._layer = -1
        self._begun.clear()
        self._done.clear()

    def __call__(self, tensor: int, ask: bool, user_data: int | None) -> bool:
        """ggml_backend_sched_eval_callback: asked first whether the tensor is wanted, then called with its data."""
        view = GgmlTensor.from_address(tensor)
        name, _, layer = view.name.decode().rpartition("-")
        if not layer.isdecimal() or (name != "ffn_moe_topk" and name not in self.WEIGHT_NAMES):
            return not ask  # views of these tensors are called "... (reshaped)"
        if ask:
            return True
        if int(layer) < self._layer:
            self._begun.clear()
            self._done.clear()
        self._layer = int(layer)
        if self._layer in self._done or (name == "ffn_moe_topk" and self._layer in self._begun):
            self._done.add(self._layer)
        elif name == "ffn_moe_topk":
            # a view on the full argsort: rows are further apart than long
            self.ids[int(layer)] = read_tensor(view, np.int32)
        else:
            values = read_tensor(view, np.float32)
            self.weights[int(layer)] = values.reshape(-1, self.ids[int(layer)].shape[1])
            self._begun.add(self._layer)
        return True


class GgmlTensor(ctypes.Structure):
    """struct ggml_tensor of ggml.h, up to the name."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
        ("view_src", ctypes.c_void_p),
        ("view_offs", ctypes.c_size_t),
        ("data", ctypes.c_void_p),
        ("name", ctypes.c_char * 64),
    )


def read_tensor(tensor: GgmlTensor, dtype: type[np.generic]) -> np.ndarray:
    """A copy of a host tensor of up to three dimensions, [ne2, ne1, ne0] with ones dropped from the left."""
    ne, nb = list(tensor.ne), list(tensor.nb)
    size = sum((n - 1) * stride for n, stride in zip(ne, nb, strict=True)) + nb[0]
    raw = np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(tensor.data))
    strided = np.ndarray(tuple(ne[2::-1]), dtype, raw, strides=tuple(nb[2::-1]))
    return (strided[0] if ne[2] == 1 else strided).copy()


def tap_context(path: Path, **options: Any) -> tuple[StockContext, RouterTap]:
    tap = RouterTap()
    callback: Callable[[int, bool, int | None], bool] = tap
    return StockContext(path, callback=callback, **options), tap


# what a transcript decodes: tokens appended, then how many of them are taken back
TRANSCRIPT = ((40, 0), (1, 0), (1, 0), (9, 4), (1, 0), (9, 0), (17, 9), (1, 0))


def transcript_tokens(seed: int = 1) -> list[int]:
    n_tokens = sum(appended for appended, _ in TRANSCRIPT)
    return np.random.default_rng(seed).integers(0, 256, n_tokens).tolist()


def transcript(context: StockContext, *, seed: int = 1) -> np.ndarray:
    """Prefill over two graphs, single tokens, verifications with rollbacks: all their logits, [n_rows, n_vocab]."""
    tokens = transcript_tokens(seed)
    rows = []
    for appended, dropped in TRANSCRIPT:
        rows.append(context.decode(tokens[:appended]))
        del tokens[:appended]
        if dropped:
            context.trim(context.n_past - dropped)
    return np.concatenate(rows)


class _Stats(ctypes.Structure):
    """struct moeedge_sensor_stats of include/moeedge.h."""

    _fields_ = (
        ("graphs", ctypes.c_int64),
        ("blocks", ctypes.c_int64),
        ("sense_s", ctypes.c_double),
        ("compute_s", ctypes.c_double),
    )


def main(arguments: list[str]) -> None:
    """python -m tests.support.stock OUT.npz THREADS MODEL...: transcripts by a program that never imports moeedge.

    With GGML_BACKEND_PATH it loads our library by that alone, and `graphs` has the number of graphs or parts of graphs
    that our backend computed of each model.
    """
    silence()
    out, n_threads, *paths = arguments
    rows: dict[str, Any] = {}
    ours = None
    library = os.environ.get("GGML_BACKEND_PATH", "")
    if "moeedge" in Path(library).name:
        llama_cpp.llama_cpp._lib.ggml_backend_load_all()
        _ggml("ggml_backend_dev_by_name", b"MOEEDGE")
        ours = ctypes.CDLL(library)
        ours.moeedge_newest_instance.restype = ctypes.c_int64
        rows["graphs"] = []
    for path in paths:
        with StockContext(Path(path), n_threads=int(n_threads), n_ubatch=32) as context:
            rows[Path(path).stem] = transcript(context)
            if ours is not None:
                stats, instance = _Stats(), ctypes.c_int64(ours.moeedge_newest_instance())
                assert ours.moeedge_instance_get_stats(instance, ctypes.byref(stats)) == 0
                rows["graphs"].append(stats.graphs)
    assert ours is None or ours.moeedge_live_instances() == 0, "every context freed its instance"
    assert not any(name.partition(".")[0] == "moeedge" for name in sys.modules), "the reference must be stock"
    np.savez(out, **rows)


if __name__ == "__main__":
    main(sys.argv[1:])
