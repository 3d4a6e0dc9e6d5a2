"""Rankings of a model's experts for expert budgets, made from a routing trace and kept in a JSON file.

A ranking holds, per layer, the static order (MoE-Spec, Eq. 4), the routing probability that verifications lose under
each budget, and the layer's sensitivity (engine/layer_sensitivity.py). From the last two, budgets per layer are fitted:
MoE-Spec leaves open which layers tolerate tighter budgets (section 6).

A trace has the weights of each token's k experts, not the probabilities of all N. The share of the natural picks'
weight outside the shortlist is the loss; where a trace has no weights, all picks count alike.
"""

from __future__ import annotations

import heapq
import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.paths import replace_file
from moeedge.policies.expert_budget import static_order
from moeedge.trace.format import MAX_EXPERTS, Trace
from moeedge.trace.schedule import Schedule, schedules

SCHEMA = "moeedge-expert-ranking-1"
_MAX_BYTES = 1 << 28  # of a file that is read: 200 layers of 1,024 experts are 10 MB
_DIGITS = 6  # of losses in the file


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class ExpertRanking:
    """The experts of each layer of one model, ranked on one run. Layers without experts have zeros."""

    model: str  # file name
    architecture: str
    n_expert_used: int  # k
    expert_layers: tuple[int, ...]  # that the run recorded, upwards
    order: NDArray[np.int32]  # [n_layers, n_experts], most used first
    frequency: NDArray[np.int64]  # [n_layers, n_experts], tokens of verifications that used the expert
    lost: NDArray[np.float64]  # [n_layers, n_experts + 1], mean share of the picks' weight outside the best b experts
    measured: Literal["weights", "picks"]  # what the losses sum
    n_steps: int  # verifications
    tokens_per_step: float
    # [n_layers] nats per token by which the model's distribution moves if this layer alone has budget k; None: unknown
    sensitivity: NDArray[np.float64] | None = None
    source: dict[str, Any] = field(default_factory=dict)  # the run: prompts, gamma, version

    @property
    def n_layers(self) -> int:
        """Layers of the model, with and without experts."""
        return int(self.order.shape[0])

    @property
    def n_experts(self) -> int:
        """N."""
        return int(self.order.shape[1])


def rank_experts(trace: Trace, sensitivity: NDArray[np.float64] | None = None) -> ExpertRanking:
    """The ranking of a trace's verifications; a trace without drafts is cut into windows (trace/schedule.py).

    sensitivity: float64 [n_layers], where it was measured. Raises InputError where the trace has no experts or no
    verification.
    """
    schedule = schedules(trace)[0]
    n_layers, n_experts = trace.meta.n_layers, trace.meta.n_experts
    frequency = np.zeros((n_layers, n_experts), dtype=np.int64)
    lost = np.zeros((n_layers, n_experts + 1), dtype=np.float64)
    layers = trace.expert_layers()
    for layer in layers:
        picks, mass = step_masses(schedule, layer)
        frequency[layer] = picks.sum(axis=0)
        lost[layer] = lost_curve(mass)
    lengths = np.diff(schedule.starts)[~schedule.prefill]
    return ExpertRanking(
        model=trace.meta.model,
        architecture=trace.meta.architecture,
        n_expert_used=trace.meta.n_expert_used,
        expert_layers=tuple(layers),
        order=static_order(frequency),
        frequency=frequency,
        lost=lost,
        measured="weights" if has_weights(trace) else "picks",
        n_steps=schedule.n_steps,
        tokens_per_step=float(lengths.mean()),
        sensitivity=sensitivity,
        source={
            "program": trace.meta.source,
            "draft": trace.meta.draft,
            "gamma": schedule.gamma,
            "verifications": schedule.rejected_token_model,
            **{key: trace.meta.parameters[key] for key in _SOURCE_KEYS if key in trace.meta.parameters},
        },
    )


_SOURCE_KEYS = ("dataset", "prompts", "dataset_sha256", "n_predict", "temperature", "seed")


def has_weights(trace: Trace) -> bool:
    """Whether the trace has the weight of every recorded pick."""
    return trace.weights is not None and bool(np.isfinite(trace.weights[trace.ids != trace.sentinel]).all())


def step_masses(schedule: Schedule, layer: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Picks int64 and their summed weights float64, both [n_steps, n_experts], of each verification in one layer.

    Without weights in the trace every pick weighs 1.
    """
    trace, n_experts = schedule.trace, schedule.trace.meta.n_experts
    lengths = np.diff(schedule.starts)
    is_step = ~schedule.prefill
    rows = schedule.rows[np.repeat(is_step, lengths)]
    step_of = np.repeat(np.arange(schedule.n_steps), lengths[is_step])
    ids = trace.layer_ids(layer)[rows]
    known = ids >= 0
    flat_ids = (step_of[:, None] * n_experts + ids)[known]
    weights = None
    if trace.weights is not None and has_weights(trace):
        weights = trace.weights[rows, layer][known].astype(np.float64)
    shape, n_flat = (schedule.n_steps, n_experts), schedule.n_steps * n_experts
    picks = np.bincount(flat_ids, minlength=n_flat).reshape(shape)
    mass = np.bincount(flat_ids, weights=weights, minlength=n_flat).reshape(shape)
    return picks, mass.astype(np.float64)


def lost_curve(mass: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean share of each step's mass [n_steps, N] outside its best b experts, float64 [N + 1] for b = 0..N.

    It falls and is convex: the best experts come first in every step. Steps without mass are left out.
    """
    mass = mass[mass.sum(axis=1) > 0.0]
    if not len(mass):
        return np.zeros(mass.shape[1] + 1)
    shares = -np.sort(-mass, axis=1) / mass.sum(axis=1, keepdims=True)
    kept = np.concatenate(([0.0], np.cumsum(shares.mean(axis=0))))
    return np.clip(1.0 - kept, 0.0, 1.0)


def budget_costs(ranking: ExpertRanking) -> NDArray[np.float64]:
    """What each budget costs in each layer, float64 [n_layers, n_experts + 1], convex in the budget.

    The sensitivity, taken as proportional to what the layer loses; without it the loss itself, as if all layers
    mattered alike. In measurements they do not: see docs/log.md.
    """
    if ranking.sensitivity is None:
        return ranking.lost
    least = ranking.lost[:, ranking.n_expert_used]
    weight = np.divide(ranking.sensitivity, least, out=np.zeros_like(least), where=least > 0.0)
    return np.asarray(ranking.lost * weight[:, None])


def fit_layers(ranking: ExpertRanking, mean_budget: float) -> tuple[int, ...]:
    """Budgets per layer of the model, 0 for layers without experts, that cost least at this mean over the others.

    From k experts per layer, one expert at a time goes to the layer where it saves the most. The costs are convex, so
    no other budgets of the same sum cost less (`budget_costs`). Raises InputError for a mean below k.
    """
    k, n_experts, layers = ranking.n_expert_used, ranking.n_experts, ranking.expert_layers
    if not math.isfinite(mean_budget) or mean_budget < k:
        raise InputError(
            f"A mean expert budget of {mean_budget:g} is below the {k} experts that the model uses per token.",
            f"Give at least {k}.",
        )
    costs = budget_costs(ranking)
    budgets = dict.fromkeys(layers, k)
    left = round(min(mean_budget, n_experts) * len(layers)) - k * len(layers)

    def entry(layer: int) -> tuple[float, int, int]:
        """Order of the heap: the largest saving, then the smallest budget, then the first layer."""
        budget = budgets[layer]
        return (float(costs[layer, budget + 1] - costs[layer, budget]), budget, layer)

    heap = [entry(layer) for layer in layers if k < n_experts]
    heapq.heapify(heap)
    for _ in range(left):
        layer = heap[0][2]
        budgets[layer] += 1
        if budgets[layer] < n_experts:
            heapq.heapreplace(heap, entry(layer))
        else:
            heapq.heappop(heap)
    return tuple(budgets.get(layer, 0) for layer in range(ranking.n_layers))


def write_ranking(ranking: ExpertRanking, path: Path) -> None:
    """Writes the JSON file (docs/expert-budget.md). Raises InputError where the path cannot be written."""
    document = {
        "schema": SCHEMA,
        "model": ranking.model,
        "architecture": ranking.architecture,
        "n_layers": ranking.n_layers,
        "n_experts": ranking.n_experts,
        "n_expert_used": ranking.n_expert_used,
        "measured": ranking.measured,
        "n_steps": ranking.n_steps,
        "tokens_per_step": ranking.tokens_per_step,
        "source": ranking.source,
        "layers": [
            {
                "layer": layer,
                "order": ranking.order[layer].tolist(),
                "frequency": ranking.frequency[layer].tolist(),
                "lost": [round(value, _DIGITS) for value in ranking.lost[layer].tolist()],
                **({} if ranking.sensitivity is None else {"sensitivity": float(ranking.sensitivity[layer])}),
            }
            for layer in ranking.expert_layers
        ],
    }
    try:
        with replace_file(path) as temporary:
            temporary.write_text(json.dumps(document, ensure_ascii=False) + "\n", encoding="utf-8")
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the ranking {path}: {reason}.", "Choose another path.") from None


def read_ranking(path: Path) -> ExpertRanking:
    """Reads a file that `write_ranking` wrote. Raises InputError, with the reason, for anything else."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise _unusable(path, "it is larger than any ranking")
        text = path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        raise InputError(f"The ranking {path} does not exist.", "Check the path.") from None
    except OSError as error:
        raise _unusable(path, error.strerror or "it cannot be read") from None
    except UnicodeDecodeError:
        raise _unusable(path, "it is not UTF-8 text") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise _unusable(path, "it is not JSON") from None
    if not isinstance(document, dict) or document.get("schema") != SCHEMA:
        raise _unusable(path, f"its schema is not {SCHEMA}")
    try:
        return _parse(document)
    except KeyError as error:
        raise _unusable(path, f"{error} is missing") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise _unusable(path, str(error)) from None


def _unusable(path: Path, reason: str) -> InputError:
    hint = "Make one with moeedge profile --save-ranking FILE."
    return InputError(f"{path} is not a usable ranking of experts: {reason}.", hint)


def _parse(document: dict[str, Any]) -> ExpertRanking:
    """Raises KeyError, TypeError, ValueError or OverflowError for anything that is no ranking."""
    n_layers = _integer(document, "n_layers", 1, 1 << 16)
    n_experts = _integer(document, "n_experts", 1, MAX_EXPERTS)
    entries = document["layers"]
    if not isinstance(entries, list) or not entries or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("layers must be a list of objects")
    if n_layers * n_experts > 1 << 26:
        raise ValueError("it names more experts than any model has")
    layers = [_integer(entry, "layer", 0, n_layers - 1) for entry in entries]
    if layers != sorted(set(layers)):
        raise ValueError("its layers must be different and in order")
    order = np.tile(np.arange(n_experts, dtype=np.int32), (n_layers, 1))
    frequency = np.zeros((n_layers, n_experts), dtype=np.int64)
    lost = np.zeros((n_layers, n_experts + 1), dtype=np.float64)
    for layer, entry in zip(layers, entries, strict=True):
        order[layer] = _numbers(entry, "order", n_experts, int)
        frequency[layer] = _numbers(entry, "frequency", n_experts, int)
        lost[layer] = _numbers(entry, "lost", n_experts + 1, float)
        if not np.array_equal(np.sort(order[layer]), np.arange(n_experts)):
            raise ValueError(f"the order of layer {layer} does not name every expert once")
    if frequency.min() < 0:
        raise ValueError("a frequency is negative")
    if not ((lost >= 0.0) & (lost <= 1.0)).all() or (np.diff(lost, axis=1) > 0.0).any():
        raise ValueError("losses must be shares that fall with the budget")
    sensitivity = None
    if any("sensitivity" in entry for entry in entries):
        sensitivity = np.zeros(n_layers, dtype=np.float64)
        sensitivity[layers] = [_number(entry["sensitivity"], "sensitivity") for entry in entries]
        if sensitivity.min() < 0.0:
            raise ValueError("a sensitivity is negative")
    measured = document["measured"]
    if measured not in ("weights", "picks"):
        raise ValueError("measured must be weights or picks")
    tokens_per_step = _number(document["tokens_per_step"], "tokens_per_step")
    source = document.get("source", {})
    for name, kind in (("model", str), ("architecture", str)):
        if not isinstance(document[name], kind):
            raise ValueError(f"{name} must be text")
    return ExpertRanking(
        model=document["model"],
        architecture=document["architecture"],
        n_expert_used=_integer(document, "n_expert_used", 1, n_experts),
        expert_layers=tuple(layers),
        order=order,
        frequency=frequency,
        lost=lost,
        measured=measured,
        n_steps=_integer(document, "n_steps", 0, 1 << 62),
        tokens_per_step=tokens_per_step,
        sensitivity=sensitivity,
        source=source if isinstance(source, dict) else {},
    )


def _integer(document: dict[str, Any], name: str, least: int, most: int) -> int:
    value = document[name]
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise ValueError(f"{name} must be an integer from {least} to {most}")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{name} must be a number")
    return float(value)


def _numbers(entry: dict[str, Any], name: str, length: int, kind: type[int] | type[float]) -> list[Any]:
    values = entry[name]
    if not isinstance(values, list) or len(values) != length:
        raise ValueError(f"{name} must have {length} numbers")
    allowed = (int,) if kind is int else (int, float)
    if not all(type(value) in allowed for value in values):
        raise ValueError(f"{name} must have {length} numbers")
    return values
