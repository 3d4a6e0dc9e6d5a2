"""What a model is, for a plan: all of it from its header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moeedge.engine import gguf_file
from moeedge.engine.expert_tensors import expert_bytes, expert_tensors
from moeedge.engine.model import Model
from moeedge.native.expert_tensor import ExpertTensor
from moeedge.planning.header import Loadable


@dataclass(frozen=True)
class ModelFacts:
    """A model's shape and sizes in bytes."""

    file: str  # or what pull takes for it
    is_here: bool  # on this machine, perhaps in part
    description: str
    architecture: str
    n_layers: int
    n_expert_layers: int
    n_experts: int  # per layer; 0: dense
    n_experts_used: int
    n_ctx_train: int
    n_vocab: int
    n_weights: int
    file_bytes: int
    missing_bytes: int  # what the file lacks: only its header counts
    experts_bytes: int  # all of them
    expert_bytes: int  # one, on average
    dense_bytes: int  # everything else
    active_bytes: int  # that one token reads
    memory: str  # what its memory of the text is, in words; empty: a plain KV cache

    @property
    def bits_per_weight(self) -> float:
        return 8 * (self.experts_bytes + self.dense_bytes) / max(1, self.n_weights)


def read_facts(model: Model, file: Loadable, names: Mapping[Path, str]) -> tuple[ModelFacts, list[ExpertTensor]]:
    """The facts, and the expert tensors that the cache would hold; names: of files that are elsewhere."""
    info = model.info
    tensors = [tensor for part in gguf_file.parts(file.path) for tensor in gguf_file.read_tensors(part)]
    experts, _ = expert_tensors(file.path, n_layers=info.n_layers)
    total = sum(tensor.size_bytes for tensor in tensors)
    routed = expert_bytes(experts)
    has_output = any(tensor.name == "output.weight" for tensor in tensors)
    # of an embedding matrix that is not the output matrix too, one row is read
    rows = sum(t.size_bytes for t in tensors if t.name == "token_embd.weight" and has_output)
    share = info.n_experts_used / info.n_experts if info.n_experts else 0.0
    facts = ModelFacts(
        file=names.get(file.original, str(file.original)),
        is_here=file.original not in names,
        description=info.description,
        architecture=info.architecture,
        n_layers=info.n_layers,
        n_expert_layers=info.n_expert_layers,
        n_experts=info.n_experts,
        n_experts_used=info.n_experts_used,
        n_ctx_train=info.n_ctx_train,
        n_vocab=info.n_vocab,
        n_weights=sum(math.prod(tensor.shape) for tensor in tensors),
        file_bytes=info.size_bytes,
        missing_bytes=file.missing_bytes,
        experts_bytes=routed,
        expert_bytes=routed // max(1, info.n_expert_layers * info.n_experts),
        dense_bytes=total - routed,
        active_bytes=total - routed - rows + round(routed * share),
        memory=_memory(model),
    )
    return facts, experts


def _memory(model: Model) -> str:
    kinds = []
    if model.metadata(f"{model.info.architecture}.attention.key_length_mla"):
        kinds.append("latent attention: one compressed vector per token and layer")
    if model.info.n_swa:
        kinds.append(f"sliding window: some layers keep {model.info.n_swa:,} tokens only")
    if not model.can_roll_back:
        kinds.append("recurrent: some layers keep a state of fixed size, so that drafts cannot be used")
    return "; ".join(kinds)
