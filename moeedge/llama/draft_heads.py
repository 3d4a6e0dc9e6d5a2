"""The checks that a draft suits a target, and draft heads, which continue from the target's hidden states.

MTP     blocks that some models ship after their last layer ("DeepSeek-V3 Technical Report", section 2.2).
EAGLE-3 a one-layer draft in a file of its own (Li et al., "EAGLE-3: Scaling up inference acceleration of large language
        models via training-time test", 2025), which reads the inputs of three of the target's layers.
DFlash  a draft in a file of its own that predicts a block of tokens at once (block diffusion), from the inputs of some
        of the target's layers. DSpark files add a head in which each token follows from the one before it.

llama.cpp ends the process where a graph lacks what a head asks for: only architectures that tests decode are admitted.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, repeat
from typing import Any, Literal

import llama_cpp.llama_cpp as lib
import numpy as np
from numpy.typing import NDArray

from moeedge import native
from moeedge.errors import EngineError, InputError, VocabularyMismatchError
from moeedge.llama import gguf_file, library
from moeedge.llama.context import Context
from moeedge.llama.hidden_states import StateRows, choose_head, keep_final, own_states, read_target_layers
from moeedge.llama.model import Model

EAGLE, DFLASH = "eagle3", "dflash"  # architectures of drafts' files
_CHAINED = frozenset({"hy_v3", "mimo2", "step35"})  # may have several heads, of which each predicts one token further
_MTP_ARCHITECTURES = frozenset({"cohere2moe", "deepseek2", "glm4moe", "qwen35moe", *_CHAINED})
_STATES_TARGETS = frozenset({"gpt-oss", "llama", "qwen3", "qwen3moe"})  # that hand out their layers' inputs
_MIMO_PARTS = ("attn_qkv", "ffn_gate")  # of MiMo's heads that llama.cpp computes
_LATENT = ("q_lora_rank", "key_length_mla")  # of models whose head llama.cpp computes
_BLOCK_TOKENS = 16  # of a DFlash draft whose file does not say
_OTHER_DRAFT = "Choose another source of drafts: -md ngram, FILE or none."


@dataclass(frozen=True)
class BlockLayout:
    """How a DFlash draft predicts several tokens at once: from the last token, followed by masks."""

    mask: int  # token
    n_tokens: int  # of a block that it was trained on
    first: int  # of the block's rows, that predicts a draft: 1, or 0 where the last token's own row does
    causal: bool  # attention within the block


@dataclass(frozen=True)
class HeadKind:
    """A draft head, and the states that it reads of its target.

    An entry of its KV cache is made of a token and the target's state of the position before it; of a DFlash draft, of
    the target's state alone. The first `n_skipped` tokens of a text have no entry.
    """

    name: Literal["mtp", "eagle3", "dflash"]
    layers: tuple[int, ...]  # as of `tap_states`
    n_skipped: int
    state_at: int  # entry e needs the target's state of position e + state_at
    encodes: bool = False  # the head projects the target's states to its own width first
    block: BlockLayout | None = None  # of a DFlash draft
    n_heads: int = 1  # more than one: each draft of a step is another head's, with entries of its own

    @property
    def n_drafts_max(self) -> int | None:
        """Drafts of a step at most; None: no limit."""
        if self.block is not None:
            return self.block.n_tokens - self.block.first
        return self.n_heads if self.n_heads > 1 else None


def missing_head(model: Model) -> str | None:
    """Why a model cannot draft for itself; None where it can. The model may be loaded without weights."""
    info = model.info
    if info.n_head_layers == 0:
        return "its file has no head that predicts further tokens (MTP)"
    if info.architecture not in _MTP_ARCHITECTURES:
        return f"MTP heads of {info.architecture} models are not supported"
    if info.n_head_layers > 1 and info.architecture not in _CHAINED:
        return f"it has {info.n_head_layers} MTP heads, and only one is supported"
    if info.architecture == "deepseek2" and not all(model.metadata(f"deepseek2.attention.{key}") for key in _LATENT):
        return "its attention is not of the kind that llama.cpp's MTP graph computes"
    if info.architecture == "mimo2":
        blocks = range(info.n_layers, info.n_layers + info.n_head_layers)
        if not {f"blk.{block}.{part}.weight" for block in blocks for part in _MIMO_PARTS} <= _tensor_names(model):
            return "its heads are not of the kind that llama.cpp's MTP graph computes"
    return None


def own_head(model: Model) -> HeadKind:
    """The head in the model's own file, which must be loaded (`Model.load`). Raises InputError where there is none."""
    reason = missing_head(model)
    if reason is not None:
        raise InputError(f"{model.path.name} cannot draft for itself: {reason}.", _OTHER_DRAFT)
    if not model.has_head:
        raise ValueError(f"{model.path.name} was loaded without its head")
    info = model.info
    return HeadKind("mtp", (info.n_layers,), n_skipped=0, state_at=-1, n_heads=info.n_head_layers)


def _tensor_names(model: Model) -> set[str]:
    return {tensor.name for tensor in gguf_file.read_all_tensors(model.path)}


def head_file(target: Model, draft: Model) -> HeadKind | None:
    """The head that a draft's file is; None for one without. Raises InputError for an unsupported kind or target."""
    if draft.info.architecture == EAGLE:
        layers = _checked_layers(target, draft, int(draft.metadata(f"{EAGLE}.target_hidden_size") or 0), "EAGLE-3")
        return HeadKind("eagle3", layers, n_skipped=1, state_at=0, encodes=True)
    if draft.info.architecture == DFLASH:
        layers = _checked_layers(target, draft, draft.info.n_embd, "DFlash")
        return HeadKind("dflash", layers, n_skipped=0, state_at=0, block=_block_layout(draft))
    return None


def _checked_layers(target: Model, draft: Model, width: int, kind: str) -> tuple[int, ...]:
    """The target's layers whose inputs of `width` the draft reads. Raises InputError where it has others."""
    info = target.info
    if info.architecture not in _STATES_TARGETS:
        raise InputError(f"{kind} drafts for {info.architecture} models are not supported.", _OTHER_DRAFT)
    layers = read_target_layers(draft.handle)
    if width != info.n_embd or not layers or not all(0 <= layer < info.n_layers for layer in layers):
        difference = (
            f"it reads states of width {width:,} of the layers {', '.join(map(str, layers))}; {target.path.name} has "
            f"{info.n_layers} layers of width {info.n_embd:,}."
        )
    elif draft.info.n_vocab != info.n_vocab:  # it may lack embeddings and output, and use the target's
        sizes = draft.info.n_vocab, info.n_vocab
        difference = f"its vocabulary has {sizes[0]:,} tokens, that of {target.path.name} {sizes[1]:,}."
    else:
        return layers
    hint = "Name the target that it was trained for, or another draft."
    raise InputError(f"{draft.path.name} is a draft for another target: {difference}", hint)


def _block_layout(draft: Model) -> BlockLayout:
    """How a DFlash draft's blocks look. Raises InputError for kinds that are not supported, and without a mask."""
    name = draft.path.name

    def value(key: str) -> str:
        return draft.metadata(f"{DFLASH}.{key}") or ""

    if value("hyper_connection.count") not in ("", "0"):
        raise InputError(f"{name} is a DSpark draft of DeepSeek-V4's layers, which is not supported.", _OTHER_DRAFT)
    mask = int(lib.llama_vocab_mask(draft.vocab))
    if mask < 0:
        raise InputError(f"{name} names no mask token, which a DFlash draft needs.", _OTHER_DRAFT)
    names = _tensor_names(draft)
    if "selector_hidden.weight" in names:
        raise InputError(f"{name} is a DFlash 2 draft with a selector, which is not supported.", _OTHER_DRAFT)
    samples_last = "markov_w1.weight" in names and value("sample_from_anchor") != "false"  # of DSpark
    n_tokens = int(value("block_size") or _BLOCK_TOKENS)
    if n_tokens < 2:
        raise InputError(f"{name} has blocks of {n_tokens} tokens; drafting needs two or more.", _OTHER_DRAFT)
    return BlockLayout(mask, n_tokens, first=0 if samples_last else 1, causal=value("attention.causal") == "true")


# the rules of llama.cpp's speculative programs (common/speculative.cpp)
_MAX_SIZE_DIFFERENCE = 128  # tokens; padding differs between models of a family
_FIRST_COMPARED_TOKEN = 5  # special tokens at the start may be spelled differently
_SHOWN_DIFFERENCES = 3
_HINT = "Choose a draft of the same model family, -md ngram, or -md none."


def check_compatible(target: Model, draft: Model) -> int:
    """Returns the number of token ids that both models have; raises VocabularyMismatchError naming the differences."""
    names = f"The draft {draft.path.name} does not share the vocabulary of {target.path.name}"
    kinds = lib.llama_vocab_type(target.vocab), lib.llama_vocab_type(draft.vocab)
    if kinds[0] != kinds[1]:
        raise VocabularyMismatchError(f"{names}: the tokenizers are of types {kinds[1]} and {kinds[0]}.", _HINT)
    _check_special(names, "bos", target, draft)
    _check_special(names, "eos", target, draft)

    sizes = target.info.n_vocab, draft.info.n_vocab
    n_common = min(sizes)
    differences: list[str] = []
    if abs(sizes[0] - sizes[1]) > _MAX_SIZE_DIFFERENCE:
        differences.append(f"it has {sizes[1]:,} tokens instead of {sizes[0]:,}")
    tokens = range(_FIRST_COMPARED_TOKEN, n_common)
    of_target, of_draft = (map(lib.llama_vocab_get_text, repeat(model.vocab), tokens) for model in (target, draft))
    differing = (token for token, *texts in zip(tokens, of_target, of_draft, strict=True) if texts[0] != texts[1])
    for token in islice(differing, _SHOWN_DIFFERENCES):
        text, expected = draft.token_text(token), target.token_text(token)
        differences.append(f"token {token} is {text!r} in the draft and {expected!r} in the model")
    if differences:
        raise VocabularyMismatchError(f"{names}: {'; '.join(differences)}.", _HINT)
    return n_common


def _check_special(names: str, kind: str, target: Model, draft: Model) -> None:
    """Compares the token "bos" or "eos", which matters only if the tokenizer adds it."""
    adds, token_of = getattr(lib, f"llama_vocab_get_add_{kind}"), getattr(lib, f"llama_vocab_{kind}")
    tokens = [token_of(model.vocab) if adds(model.vocab) else None for model in (draft, target)]
    if tokens[0] != tokens[1]:
        of_draft, of_target = (
            "not added" if token is None else f"token {token} ({model.token_text(token)!r})"
            for model, token in zip((draft, target), tokens, strict=True)
        )
        message = f"{names}: {kind.upper()} is {of_draft} in the draft and {of_target} in the model."
        raise VocabularyMismatchError(message, _HINT)


# llama.cpp reserves logits for each token that is encoded, and for each of a graph of such a model
_N_ENCODED = 64


class HeadContext(Context):
    """The KV cache and compute buffers of a draft head.

    Decodes without logits, or with those of all tokens: llama.cpp's graphs do not agree on which states others leave.
    Our backend computes nothing of it, and its experts are not counted: the sensor's counts are the target's.
    """

    def __init__(
        self, model: Model, kind: HeadKind, target: Context, *, n_ubatch: int = 512, n_outputs: int = 0, **options: Any
    ) -> None:
        """Makes the context, for as many sequences of as many tokens as the target's.

        model: the target's, for its own head, or the draft's. n_outputs: most tokens with logits. options: n_threads,
        op_offload and settings of a `Context`. Raises EngineError where memory is short.
        """
        self.kind = kind
        self.states_alone = kind.block is not None
        self.state_width = len(kind.layers) * model.info.n_embd if self.states_alone else model.info.n_embd
        self._target_handle = target.handle
        n_ubatch = min(n_ubatch, _N_ENCODED) if kind.encodes else n_ubatch
        options |= {"n_ctx": target.n_ctx, "n_parallel": target.n_parallel, "n_batch": n_ubatch, "n_ubatch": n_ubatch}
        n_outputs = 0 if kind.encodes else min(n_outputs, n_ubatch)
        super().__init__(model, n_outputs=n_outputs, mode="stock", **options)
        if kind.block is None:
            keep_final(self.handle, True, True)  # `last_state`
        else:
            lib.llama_set_causal_attn(self.handle, kind.block.causal)
        self._ones = np.ones(self.n_ubatch, dtype=np.int8)

    def _complete(self, parameters: Any) -> None:
        if self.kind.name == "mtp":
            parameters.ctx_type = lib.LLAMA_CONTEXT_TYPE_MTP
        else:
            parameters.ctx_other = self._target_handle  # whose embeddings and output it uses where it has none

    def _attach_sensor(self) -> native.Sensor | None:
        return None

    def last_state(self, n_rows: int) -> NDArray[np.float32]:
        """The last token's own state after a decode of `n_rows` tokens with all logits: a float32 [1, n_embd] copy."""
        return np.array(own_states(self.handle, n_rows, self.model.info.n_embd)[-1:])

    @contextmanager
    def head(self, index: int) -> Iterator[None]:
        """Within, that one of the model's heads decodes instead of the first, with keys and values of its own."""
        choose_head(self.handle, index)
        try:
            yield
        finally:
            if self.handle:  # abandoned where a driver failed in between
                choose_head(self.handle, 0)

    def input_states(self, states: StateRows) -> StateRows:
        """The states that the head decodes: the target's, projected to the head's width by an EAGLE-3 draft."""
        if not self.kind.encodes or len(states) == 0:
            return states
        projected = []
        batch: Any = lib.llama_batch()  # without positions: the projection uses none
        batch.logits = self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_int8))
        for start in range(0, len(states), self.n_ubatch):
            rows = np.ascontiguousarray(states[start : start + self.n_ubatch], dtype=np.float32)
            batch.n_tokens = n = len(rows)
            batch.embd = rows.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
            library.clear_errors()
            code = lib.llama_encode(self.handle, batch)
            if code != 0:
                raise EngineError(f"llama.cpp failed to project {n} states (code {code}): {library.first_error()}.")
            projected.append(np.array(own_states(self.handle, n, self.model.info.n_embd)))
        return np.concatenate(projected)
