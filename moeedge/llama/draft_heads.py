"""Draft heads: small drafts that continue from the target's hidden states, and the checks that one suits a target.

MTP     blocks that some models ship after their last layer (DeepSeek-V3, "DeepSeek-V3 Technical Report", section 2.2).
EAGLE-3 a one-layer draft in a file of its own (Li et al., "EAGLE-3: Scaling up inference acceleration of large language
        models via training-time test", 2025), which reads the inputs of three of the target's layers.

llama.cpp ends the process where a graph lacks what a head asks for, so that only architectures are admitted here whose
graphs in this release have it, and that tests decode.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from moeedge.errors import InputError
from moeedge.llama.hidden_states import read_target_layers
from moeedge.llama.model import Model

EAGLE = "eagle3"  # architecture of the draft's file
_MTP_ARCHITECTURES = frozenset({"deepseek2", "glm4moe", "qwen35moe"})
_EAGLE_TARGETS = frozenset({"gpt-oss", "llama", "qwen3", "qwen3moe"})
_LATENT = ("q_lora_rank", "key_length_mla")  # of models whose head llama.cpp computes
_OTHER_DRAFT = "Choose another source of drafts: -md ngram, FILE or none."


@dataclass(frozen=True)
class HeadKind:
    """A draft head, and what it reads of its target.

    An entry of its KV cache is made of a token and the target's state of the position before it. The first `n_skipped`
    tokens of a text have no entry.
    """

    name: Literal["mtp", "eagle3"]
    layers: tuple[int, ...]  # as of `StateTap`
    n_skipped: int
    encodes: bool = False  # the head projects the target's states to its own width first


def missing_head(model: Model) -> str | None:
    """Why a model cannot draft for itself; None where it can. The model may be loaded without weights."""
    info = model.info
    if info.n_head_layers == 0:
        return "its file has no head that predicts further tokens (MTP)"
    if info.architecture not in _MTP_ARCHITECTURES:
        return f"MTP heads of {info.architecture} models are not supported"
    if info.n_head_layers > 1:
        return f"it has {info.n_head_layers} MTP heads, and only one is supported"
    if info.architecture == "deepseek2" and not all(model.metadata(f"deepseek2.attention.{key}") for key in _LATENT):
        return "its attention is not of the kind that llama.cpp's MTP graph computes"
    return None


def own_head(model: Model) -> HeadKind:
    """The head in the model's own file, which must be loaded (`Model.load`). Raises InputError where there is none."""
    reason = missing_head(model)
    if reason is not None:
        raise InputError(f"{model.path.name} cannot draft for itself: {reason}.", _OTHER_DRAFT)
    if not model.has_head:
        raise ValueError(f"{model.path.name} was loaded without its head")
    return HeadKind("mtp", (model.info.n_layers,), n_skipped=0)


def eagle_head(target: Model, draft: Model) -> HeadKind:
    """The head that an EAGLE-3 file is. Raises InputError where it was made for another target."""
    info, name = target.info, draft.path.name
    if info.architecture not in _EAGLE_TARGETS:
        raise InputError(f"EAGLE-3 drafts for {info.architecture} models are not supported.", _OTHER_DRAFT)
    layers = read_target_layers(draft.handle)
    width = int(draft.metadata(f"{EAGLE}.target_hidden_size") or 0)
    if width != info.n_embd or not all(0 <= layer < info.n_layers for layer in layers):
        raise InputError(
            f"{name} is a draft for another target: it reads states of width {width:,} of the layers "
            f"{', '.join(map(str, layers))}; {target.path.name} has {info.n_layers} layers of width {info.n_embd:,}.",
            "Name the target that it was trained for, or another draft.",
        )
    if draft.info.n_vocab != info.n_vocab:  # it may lack embeddings and output, and use the target's
        raise InputError(
            f"{name} is a draft for another target: its vocabulary has {draft.info.n_vocab:,} tokens, that of "
            f"{target.path.name} {info.n_vocab:,}.",
            "Name the target that it was trained for, or another draft.",
        )
    return HeadKind("eagle3", layers, n_skipped=1, encodes=True)
