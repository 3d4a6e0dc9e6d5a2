"""Sizes of a model, and synthetic routing for models of which no trace is at hand.

The models of the papers are built in (sim/data/models.json, with sources), each in several quantizations, the catalog's
default first; sim/calibrated.py reads the sizes of a file.

Synthetic routing is seeded. Every layer gives each expert a score per token and picks the k best. The score is a sum of
four Gaussian terms:

  popularity  drawn once: some experts are used more than others
  topic       drifts slowly (memory of `topic_tokens` tokens): the subject of the text
  phrase      drifts fast (`phrase_tokens`): neighbouring tokens share experts
  token       drawn anew for every token, of variance 1

The three variances and two memories are fitted to published figures of a model: distinct experts over B consecutive
tokens and the overlap of adjacent tokens (sim/data/models.json names the figures and the fit).
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Synthetic routing: variances in units of the token's own, memories in tokens."""

    popularity: float
    topic: float
    topic_tokens: float
    phrase: float
    phrase_tokens: float

    def __post_init__(self) -> None:
        if min(self.popularity, self.topic, self.phrase) < 0:
            raise ValueError("variances must be >= 0")
        if min(self.topic_tokens, self.phrase_tokens) <= 0:
            raise ValueError("memories must be > 0 tokens")

    def draw(
        self, n_layers: int, n_experts: int, k: int, lengths: list[int], rng: np.random.Generator
    ) -> list[NDArray[np.int32]]:
        """Expert ids int32 [n_tokens, n_layers, k] of texts of these lengths, the best expert first.

        All texts share one popularity.
        """
        popular = math.sqrt(self.popularity) * rng.standard_normal((n_layers, n_experts), dtype=np.float32)
        return [self._text(popular, k, length, rng) for length in lengths]

    def _text(self, popular: NDArray[np.float32], k: int, n_tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
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
            best = np.argpartition(score, -k, axis=1)[:, -k:]
            order = np.argsort(-np.take_along_axis(score, best, axis=1), axis=1, kind="stable")
            ids[token] = np.take_along_axis(best, order, axis=1)
        return ids


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """The draft model."""

    name: str
    bytes: float  # all are read for every token
    memory_bytes: float  # on the device
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
        if not 1 <= self.k <= self.n_experts or not 1 <= self.n_expert_layers <= self.n_layers:
            raise ValueError(f"{self.name}: {self.k} of {self.n_experts} experts in {self.n_expert_layers} layers")
        if min(self.expert_bytes, self.expert_flops) <= 0:
            raise ValueError(f"{self.name}: an expert has weights")


def builtin_models() -> dict[str, ModelShape]:
    """The models of sim/data/models.json by name."""
    shapes = {}
    for name, entry in read_data("models.json")["models"].items():
        for i, (quant, sizes) in enumerate(entry.pop("quants").items()):
            full_name = f"{name}:{quant}" if i else name
            shapes[full_name] = _shape(full_name, entry | sizes | {"quant": quant})
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


def read_data(name: str) -> dict[str, Any]:
    """The contents of a data file in moeedge/lab/sim/data."""
    text = (resources.files("moeedge.lab.sim") / "data" / name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a user's file. Raises InputError for anything else."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or 'read error'}.", "Check the path.") from None
    except ValueError:
        raise InputError(f"{path} is not JSON.", "See docs/lab/simulation.md for the format.") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} is not a JSON object.", "See docs/lab/simulation.md for the format.")
    return loaded


def only_known(entry: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The fields of dataclass `kind` in a JSON object, without its sources. Raises ValueError for unknown keys."""
    known = {item.name for item in fields(kind)}
    kept = {key: value for key, value in entry.items() if key not in ("source", "sources", "about")}
    unknown = sorted(set(kept) - known)
    if unknown:
        raise ValueError(f'unknown key "{unknown[0]}"')
    return kept


def _shape(name: str, entry: dict[str, Any]) -> ModelShape:
    values = only_known(entry, ModelShape)
    if values.get("draft"):
        values["draft"] = DraftShape(**only_known(values["draft"], DraftShape))
    if values.get("routing"):
        values["routing"] = Routing(**only_known(values["routing"], Routing))
    return ModelShape(name=name, **values)
