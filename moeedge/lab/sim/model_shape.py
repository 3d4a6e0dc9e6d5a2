"""Sizes of a model, synthetic routing for models of which no trace is at hand, and constants from data files.

The models of the papers are built in (sim/data/models.json, with sources), each in several quantizations, the catalog's
default first.

Synthetic routing is seeded. Every layer gives each expert a score per token and picks the k best. The score is a sum of
four Gaussian terms: popularity (drawn once), topic (drifts slowly), phrase (drifts fast: neighbouring tokens share
experts), and one drawn anew for every token, of variance 1.

A data file writes a constant with several sources as {"low": ..., "chosen": ..., "high": ...}. A simulation takes one
side of all of them: the chosen values, those that make every program fastest, or those that make it slowest. Rates
(names that end in `_per_s` or `_flops`) are fast where they are high, all other constants where they are low.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections import Counter
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge import schemas
from moeedge.errors import InputError, require
from moeedge.llama import gguf_file
from moeedge.llama.gguf_file import expert_tensors
from moeedge.llama.library import ggml_function
from moeedge.paths import read_text

Side = Literal["fast", "chosen", "slow"]
SIDES: tuple[Side, ...] = ("fast", "chosen", "slow")
_RANGE = {"low", "chosen", "high"}
_RATES = ("_per_s", "_flops")
_EXPERT_WEIGHTS = ("ffn_gate_exps.weight", "ffn_up_exps.weight", "ffn_down_exps.weight", "ffn_gate_up_exps.weight")


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Synthetic routing: variances in units of the token's own, memories in tokens."""

    popularity: float
    topic: float
    topic_tokens: float
    phrase: float
    phrase_tokens: float

    def draw(self, n_layers: int, n_experts: int, k: int, n_tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
        """Expert ids int32 [n_tokens, n_layers, k] of a text, the best expert first."""
        popular = math.sqrt(self.popularity) * rng.standard_normal((n_layers, n_experts), dtype=np.float32)
        processes = [  # deviation of a term, the share of its state that a token keeps, and the state
            (math.sqrt(variance), math.exp(-1.0 / memory), rng.standard_normal(popular.shape, dtype=np.float32))
            for variance, memory in ((self.topic, self.topic_tokens), (self.phrase, self.phrase_tokens))
        ]
        ids = np.empty((n_tokens, popular.shape[0], k), dtype=np.int32)
        for token in range(n_tokens):
            score = popular + rng.standard_normal(popular.shape, dtype=np.float32)
            for deviation, kept, state in processes:
                drawn = rng.standard_normal(popular.shape, dtype=np.float32)
                state[:] = np.float32(kept) * state + np.float32(math.sqrt(1 - kept * kept)) * drawn
                score += np.float32(deviation) * state
            ids[token] = np.argsort(-score, axis=1, kind="stable")[:, :k]
        return ids


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft model."""

    name: str
    bytes: float  # all are read for every token
    n_layers: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model; bytes are those of the weights as stored."""

    name: str  # NAME for the default quantization, else NAME:QUANT
    n_layers: int  # with and without experts
    n_expert_layers: int
    n_experts: int
    k: int
    expert_bytes: float
    expert_flops: float  # per token
    dense_layer_bytes: float  # attention, router, norms, shared experts: read once per step and layer
    head_bytes: float  # the output matrix
    quant: str = ""  # empty: not known
    n_layouts: int = 1  # layers whose experts are stored in the same types share one
    draft: DraftShape | None = None
    routing: Routing | None = None  # None: simulations need a trace

    def __post_init__(self) -> None:
        is_possible = 1 <= self.k <= self.n_experts and 1 <= self.n_expert_layers <= self.n_layers
        about = f"{self.name}: {self.k} of {self.n_experts} experts in {self.n_expert_layers} layers"
        require(is_possible, about)
        require(min(self.expert_bytes, self.expert_flops) > 0, f"{self.name}: an expert has weights")


def builtin_models() -> dict[str, ModelShape]:
    """The models of sim/data/models.json by name."""
    data = read_data("models.json")
    drafts, shapes = data["drafts"], {}
    for name, entry in data["models"].items():
        for i, (quant, sizes) in enumerate(entry.pop("quants").items()):
            full_name = f"{name}:{quant}" if i else name
            values = only_known(entry | sizes, ModelShape)
            if "draft" in values:
                draft = values["draft"]
                values["draft"] = DraftShape(name=draft, **only_known(drafts[draft], DraftShape))
            if "routing" in values:
                values["routing"] = Routing(**only_known(values["routing"], Routing))
            shapes[full_name] = ModelShape(name=full_name, quant=quant, **values)
    return shapes


def find_model(text: str) -> ModelShape:
    """One of the built-in models, by NAME or NAME:QUANT. Raises InputError for an unknown one."""
    models = builtin_models()
    name, _, quant = text.lower().partition(":")
    found = [shape for shape in models.values() if shape.name.partition(":")[0] == name]
    if not found:
        raise InputError(f"Unknown model '{text}'.", f"Choose from {', '.join(models)}, or give a GGUF file.")
    shape = next((shape for shape in found if quant in ("", shape.quant.lower())), None)
    if shape is None:
        known = ", ".join(shape.quant for shape in found)
        raise InputError(f"There are no sizes of {name} in '{quant}'.", f"Choose from {known}, or give a GGUF file.")
    return shape


def shape_of_file(path: Path, k: int) -> ModelShape:
    """The sizes of a GGUF file's tensors, those of experts as means of the layers; `k` as in its trace.

    A step reads all tensors but the experts and the input embedding once. Raises ModelFileError for a file that is not
    GGUF, InputError for a model without experts.
    """
    of_experts, files = expert_tensors(path)
    weights = [tensor for tensor in of_experts if tensor.role in _EXPERT_WEIGHTS]
    if not weights:
        raise InputError(f"{path} has no experts.", "Give a Mixture-of-Experts model.")
    layers = sorted({tensor.layer for tensor in of_experts})
    tensors = [tensor for file in files for tensor in gguf_file.read_tensors(file)]
    dense = [tensor for tensor in tensors if tensor.name.startswith("blk.") and "_exps." not in tensor.name]
    n_layers = 1 + max(int(tensor.name.split(".")[1]) for tensor in dense)
    sizes = {tensor.name: tensor.size_bytes for tensor in tensors}
    head_bytes = sizes.get("output.weight", sizes.get("token_embd.weight", 0))  # some models tie the two
    types = Counter(tensor.type for tensor in weights)  # the most frequent first: "Q4_K+Q6_K"
    type_name = ggml_function("ggml_type_name", ctypes.c_char_p, ctypes.c_int)
    return ModelShape(
        name=path.stem,
        n_layers=n_layers,
        n_expert_layers=len(layers),
        n_experts=of_experts[0].n_experts,
        k=k,
        expert_bytes=sum(tensor.stride for tensor in of_experts) / len(layers),
        expert_flops=sum(2 * tensor.ne0 * tensor.ne1 for tensor in weights) / len(layers),
        dense_layer_bytes=sum(tensor.size_bytes for tensor in dense) / n_layers,
        head_bytes=float(head_bytes),
        quant="+".join(type_name(each).decode().upper() for each, _ in types.most_common()),
    )


def read_data(name: str) -> dict[str, Any]:
    """The contents of a data file in moeedge/lab/sim/data."""
    loaded: dict[str, Any] = json.loads((resources.files("moeedge.lab.sim") / "data" / name).read_text("utf-8"))
    return loaded


def entry_of(table: dict[str, Any], name: str) -> dict[str, Any]:
    """An entry of a data file, with what it does not say itself from the entry that it is "like"."""
    entry = dict(table[name])
    if "like" in entry:
        base = entry_of(table, entry.pop("like"))
        sources = {**base.get("sources", {}), **entry.get("sources", {})}
        entry = base | entry | ({"sources": sources} if sources else {})
    return entry


def pick(entry: dict[str, Any], side: Side) -> dict[str, Any]:
    """A copy of a data file's object with one value of each range. Raises ValueError for a range out of order."""
    picked = dict(entry)
    for name, value in entry.items():
        if isinstance(value, dict) and set(value) == _RANGE:
            is_ordered = value["low"] <= value["chosen"] <= value["high"]
            require(is_ordered, f"{name}: the chosen value is not between low and high")
            outer = "high" if (side == "fast") == name.endswith(_RATES) else "low"
            picked[name] = value["chosen" if side == "chosen" else outer]
    return picked


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a user's file. Raises InputError for anything else."""
    try:
        loaded = schemas.read_json(read_text(path, "Check the path."))
    except ValueError:
        raise InputError(f"{path} is not JSON.", "See docs/lab/simulation.md for the format.") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is not a JSON object.", "See docs/lab/simulation.md for the format.")
    return loaded


def only_known(entry: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The fields of dataclass `kind` in a JSON object, without its sources. Raises ValueError for unknown keys."""
    kept = {key: value for key, value in entry.items() if key not in ("source", "sources", "about")}
    unknown = sorted(set(kept) - {item.name for item in fields(kind)})
    if unknown:
        raise ValueError(f'unknown key "{unknown[0]}"')
    return kept
