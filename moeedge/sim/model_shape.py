"""What a simulation needs to know of a model: how many experts of how many bytes, and what else a step reads.

Built in are the models of the papers (sim/data/models.json, with sources); the shape of a file is read from its header
by whoever may read files (cli/simulate.py).

Synthetic routing: which experts the tokens of a text pick, for models of which no trace is at hand (seeded).

Every layer gives each expert a score per token, and the k best are picked. The score is a sum of four Gaussian terms:

  popularity  drawn once: some experts are used more than others
  topic       drifts slowly (memory of `topic_tokens` tokens): what the text is about
  phrase      drifts fast (`phrase_tokens`): neighbouring tokens share experts
  token       fresh for every token, of variance 1

The three variances and two memories are fitted to what is published of a model: distinct experts over B consecutive
tokens and the overlap of adjacent tokens (sim/data/models.json says to what and how well).
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
class DraftShape:
    """The draft model: all of `bytes` is read for every token."""

    name: str
    bytes: float  # read per token
    memory_bytes: float  # what it takes of the device
    n_layers: int


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes in bytes, of the weights as stored."""

    name: str
    n_layers: int  # all
    n_expert_layers: int
    n_experts: int
    k: int
    expert_bytes: float
    expert_flops: float  # per token
    dense_layer_bytes: float  # attention, router, norms, shared experts: read once per step and layer
    head_bytes: float  # the output matrix
    draft: DraftShape | None = None
    routing: Routing | None = None  # where no trace is at hand

    def __post_init__(self) -> None:
        if not 1 <= self.k <= self.n_experts or not 1 <= self.n_expert_layers <= self.n_layers:
            raise ValueError(f"{self.name}: {self.k} of {self.n_experts} experts in {self.n_expert_layers} layers")
        if min(self.expert_bytes, self.expert_flops) <= 0:
            raise ValueError(f"{self.name}: an expert has weights")

    @property
    def total_experts(self) -> int:
        """Experts of all layers."""
        return self.n_expert_layers * self.n_experts


def builtin_models() -> dict[str, ModelShape]:
    """The models of sim/data/models.json by name."""
    table = read_data("models.json")["models"]
    return {name: _shape(name, entry) for name, entry in table.items()}


def find_model(name: str) -> ModelShape:
    """One of the built-in models. Raises InputError for an unknown name."""
    models = builtin_models()
    if name not in models:
        raise InputError(f'There is no model "{name}".', f"Choose from {', '.join(models)}, or name a GGUF file.")
    return models[name]


def read_data(name: str) -> dict[str, Any]:
    """A data file of this package."""
    text = (resources.files("moeedge.sim") / "data" / name).read_text(encoding="utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of the user's. Raises InputError for whatever is not one."""
    try:
        loaded = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or 'read error'}.", "Check the path.") from None
    except ValueError:
        raise InputError(f"{path} is not JSON.", "See docs/simulation.md for the format.") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{path} holds no JSON object.", "See docs/simulation.md for the format.")
    return loaded


def only_known(entry: dict[str, Any], kind: type[Any]) -> dict[str, Any]:
    """The entry without its sources ("source", "sources", "about"); unknown keys raise ValueError."""
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


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Variances in units of the token's own, memories in tokens."""

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
        """Texts of the given lengths, ids [T, n_layers, k] each, the best first; popularity is common to all texts."""
        cells = (n_layers, n_experts)
        popular = math.sqrt(self.popularity) * rng.standard_normal(cells, dtype=np.float32)
        return [self._text(popular, k, length, rng) for length in lengths]

    def _text(self, popular: NDArray[np.float32], k: int, n_tokens: int, rng: np.random.Generator) -> NDArray[np.int32]:
        terms = [(self.topic, self.topic_tokens), (self.phrase, self.phrase_tokens)]
        hidden_states = [rng.standard_normal(popular.shape, dtype=np.float32) for _ in terms]
        ids = np.empty((n_tokens, popular.shape[0], k), dtype=np.int32)
        for token in range(n_tokens):
            score = popular + rng.standard_normal(popular.shape, dtype=np.float32)
            for index, (variance, memory) in enumerate(terms):
                kept = math.exp(-1.0 / memory)
                fresh = rng.standard_normal(popular.shape, dtype=np.float32)
                hidden_states[index] = (
                    np.float32(kept) * hidden_states[index] + np.float32(math.sqrt(1 - kept * kept)) * fresh
                )
                score += np.float32(math.sqrt(variance)) * hidden_states[index]
            best = np.argpartition(score, -k, axis=1)[:, -k:]
            order = np.argsort(-np.take_along_axis(score, best, axis=1), axis=1, kind="stable")
            ids[token] = np.take_along_axis(best, order, axis=1)
        return ids


def unique_experts(ids: NDArray[np.int32], n_tokens: int) -> float:
    """Mean distinct experts per layer over windows of `n_tokens` consecutive tokens of ids [T, n_layers, k]."""
    starts = range(0, len(ids) - n_tokens + 1, n_tokens)
    counts = []
    for start in starts:
        window = np.sort(ids[start : start + n_tokens].transpose(1, 0, 2).reshape(ids.shape[1], -1), axis=1)
        counts.append(1 + np.count_nonzero(np.diff(window, axis=1), axis=1).mean())
    return float(np.mean(counts))
