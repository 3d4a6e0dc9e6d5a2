"""The ranking of a model's experts for expert budgets, made from a routing trace and kept in a JSON file.

A ranking holds, per layer, the static order (MoE-Spec, Eq. 4), the routing probability that verifications lose under
each budget, and the layer's sensitivity: MoE-Spec leaves open which layers tolerate tighter budgets (section 6).

A trace has the weights of each token's k experts, not the probabilities of all N. The share of the natural picks'
weight outside the shortlist is the loss; where a trace has no weights, all picks count alike.

For the sensitivity one layer at a time keeps to its least budget, k experts, while the others have no limit. It is the
Kullback-Leibler divergence of the model's distribution over the next token from the one without a budget.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError
from moeedge.lab.policies.expert_budget import Ids, static_order
from moeedge.lab.traces.schedule import Schedule, schedules
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import Logits
from moeedge.native.abi import BudgetCoverage, BudgetRanking, Phase
from moeedge.paths import write_file
from moeedge.trace.format import MAX_EXPERTS, Trace
from moeedge.trace.steps import GAMMA

SCHEMA = "moeedge-expert-ranking-1"
MAX_TOKENS = 192  # of all texts whose layers are measured together; each is decoded once per layer
_TEXT_TOKENS = 64  # of one text, its last ones
_MAX_BYTES = 1 << 28  # of a file that is read: 200 layers of 1,024 experts are 10 MB
_DIGITS = 6  # of losses in the file
_SOURCE_KEYS = ("dataset", "prompts", "dataset_sha256", "n_predict", "temperature", "seed")


def rank_experts(trace: Trace, sensitivity: NDArray[np.float64] | None = None) -> dict[str, Any]:
    """The ranking of a trace's verifications as the file has it (docs/lab/expert-budget.md).

    A trace without drafts is cut into windows (traces/schedule.py). sensitivity: float64 [n_layers], where it was
    measured. Raises InputError where the trace has no experts or no verification.
    """
    schedule, meta = schedules(trace)[0], trace.meta
    layers = []
    for layer in trace.expert_layers():
        picks, mass = step_masses(schedule, layer)
        frequency = picks.sum(axis=0)
        layers.append(
            {
                "layer": layer,
                "order": static_order(frequency).tolist(),
                "frequency": frequency.tolist(),
                "lost": [round(value, _DIGITS) for value in lost_curve(mass).tolist()],
                **({} if sensitivity is None else {"sensitivity": float(sensitivity[layer])}),
            }
        )
    return {
        "schema": SCHEMA,
        "model": meta.model,
        "architecture": meta.architecture,
        "n_layers": meta.n_layers,
        "n_experts": meta.n_experts,
        "n_expert_used": meta.n_expert_used,
        "measured": "weights" if has_weights(trace) else "picks",  # what the losses sum
        "n_steps": schedule.n_steps,
        "tokens_per_step": float(np.diff(schedule.starts)[~schedule.prefill].mean()),
        "source": {
            "program": meta.source,
            "draft": meta.draft,
            "gamma": schedule.gamma,
            "verifications": schedule.rejected_token_model,
            **{key: meta.parameters[key] for key in _SOURCE_KEYS if key in meta.parameters},
        },
        "layers": layers,
    }


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


def measure_sensitivity(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    gamma: int,
    n_threads: int = 0,
    cancel: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] = lambda _n: None,
) -> NDArray[np.float64] | None:
    """Divergence in nats per token, float64 [n_layers], 0 for layers without experts.

    texts: token ids; their last ones are read in batches of gamma + 1, MAX_TOKENS in all. cancel: asked between layers;
    True ends with None, as do texts without two tokens and models that use all experts. on_layer: called with 1 after
    each layer. Raises EngineError where memory for one more context is short.
    """
    info = model.info
    chosen = [list(text[-_TEXT_TOKENS:]) for text in texts if len(text) > 1][: MAX_TOKENS // _TEXT_TOKENS]
    if not chosen or info.n_expert_used >= info.n_experts:
        return None
    batch_tokens = (gamma or GAMMA) + 1
    divergence = np.zeros(info.n_layers, dtype=np.float64)
    with Context(model, n_ctx=2 * _TEXT_TOKENS, n_threads=n_threads, has_budget=True) as context:
        expected = list(_read(context, chosen, batch_tokens, None))
        for layer in info.expert_layers:
            if cancel():
                return None
            budgets = np.full(info.n_layers, info.n_experts, dtype=np.int32)
            budgets[layer] = info.used_per_layer[layer]
            found = _read(context, chosen, batch_tokens, budgets)
            total = sum(float((np.exp(p) * (p - q)).sum()) for p, q in zip(expected, found, strict=True))
            divergence[layer] = max(total, 0.0) / sum(map(len, chosen))
            on_layer(1)
    return divergence


def _read(
    context: Context, texts: list[list[int]], batch_tokens: int, budgets: NDArray[np.int32] | None
) -> Iterator[NDArray[np.float32]]:
    """Log probabilities [n, n_vocab] of the next token after each token, batch by batch, under budgets [n_layers]."""
    assert context.budget is not None  # the context was made with it
    native = context.budget.native
    if budgets is not None:
        native.configure(budgets, ranking=BudgetRanking.PICKS, coverage=BudgetCoverage.SUBSTITUTION)
    for text in texts:
        context.clear()
        for start in range(0, len(text), batch_tokens):
            native.set_active(budgets is not None)
            logits = context.decode(text[start : start + batch_tokens], phase=Phase.VERIFY, logits="all")
            native.set_active(False)
            yield _log_softmax(logits)


def _log_softmax(logits: Logits) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))


def write_ranking(ranking: dict[str, Any], path: Path) -> None:
    """Writes what `rank_experts` returns. Raises InputError where the path cannot be written."""
    with write_file(path, "ranking") as temporary:
        temporary.write_text(json.dumps(ranking, ensure_ascii=False) + "\n", encoding="utf-8")


def read_order(path: Path) -> Ids:
    """The static order int32 [n_layers, n_experts] of a ranking's file. Raises InputError for anything else."""
    try:
        if path.stat().st_size > _MAX_BYTES:
            raise ValueError("it is larger than any ranking")
        return _parse(json.loads(path.read_bytes()))
    except FileNotFoundError:
        raise InputError(f"The ranking {path} does not exist.", "Check the path.") from None
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except KeyError as error:
        reason = f"{error} is missing"
    except ValueError as error:
        reason = str(error)
    except (TypeError, OverflowError, RecursionError):
        reason = "it has another form"
    hint = "Make one with moeedge lab budget --save-ranking FILE."
    raise InputError(f"{path} is not a usable ranking of experts: {reason}.", hint)


def _parse(document: dict[str, Any]) -> Ids:
    """Raises one of the errors that `read_order` takes for anything that is no ranking."""
    if document["schema"] != SCHEMA:
        raise ValueError(f"its schema is not {SCHEMA}")
    n_layers, n_experts = document["n_layers"], document["n_experts"]
    if not 0 < n_experts <= MAX_EXPERTS or not 0 < n_layers <= 1 << 16 or n_layers * n_experts > 1 << 26:
        raise ValueError("it names more experts than any model has")
    order = np.tile(np.arange(n_experts, dtype=np.int32), (n_layers, 1))
    for entry in document["layers"]:
        layer, experts = entry["layer"], entry["order"]
        if layer not in range(n_layers) or sorted(experts) != list(range(n_experts)):
            raise ValueError(f"the order of layer {layer} does not name every expert once")
        order[layer] = experts
    return order
