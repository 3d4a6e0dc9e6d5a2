"""What a simulation needs to know of a model: how many experts of how many bytes, and what else a step reads.

Built in are the models of the papers (sim/data/models.json, with sources); the shape of a file is read from its header
by whoever may read files (cli/simulate.py).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from importlib import resources
from pathlib import Path
from typing import Any

from moeedge.errors import InputError
from moeedge.sim.routing import Routing


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
