"""A trace by kind of text: overlap and distinct experts per data set, category and language.

The production study of MoE speculation, "Generalization across data domains", asks whether the overlap of adjacent
tokens is a property of the routing or of the text (13 categories of Spec-Bench, seven languages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis import expert_counts
from moeedge.analysis.routing_curves import mean_or_none, unique_curve
from moeedge.trace.format import Trace
from moeedge.trace.steps import Steps

Kind = Literal["dataset", "category", "language"]
KINDS: tuple[Kind, ...] = ("dataset", "category", "language")
UNIQUE_TOKENS = 4  # B of the distinct experts that groups are compared by


@dataclass(frozen=True)
class GroupProfile:
    """Figures of the texts of one group, means over layers; None: too few tokens, or nothing was drafted."""

    kind: Kind
    name: str
    texts: int
    tokens: int  # accepted ones
    overlap: float | None  # of adjacent tokens
    overlap_independence: float | None  # with the popularity of the group's own tokens
    unique: float | None  # distinct experts of UNIQUE_TOKENS consecutive tokens
    unique_independence: float | None
    acceptance_rate: float | None  # accepted over drafted tokens


def profile_groups(trace: Trace, steps: Steps, layers: Sequence[int]) -> list[GroupProfile]:
    """The groups of every kind that has several, in order of appearance.

    Texts are described by the trace's parameter "texts", a list of objects with some of the kinds as keys, one per
    sequence number; without it there are no groups.
    """
    described = trace.meta.parameters.get("texts")
    if not isinstance(described, list):
        return []
    rows = steps.text_rows()
    ids = {layer: trace.layer_ids(layer)[rows] for layer in layers}
    groups = []
    for kind in KINDS:
        sequences: dict[str, list[int]] = {}
        for number, text in enumerate(described):
            if name := _name(text, kind):
                sequences.setdefault(name, []).append(number)
        if len(sequences) > 1:
            groups += [_profile(trace, kind, name, found, rows, ids, steps) for name, found in sequences.items()]
    return groups


def _name(text: Any, kind: Kind) -> str:
    value = text.get(kind) if isinstance(text, dict) else None
    return value if isinstance(value, str) else ""


def _profile(
    trace: Trace,
    kind: Kind,
    name: str,
    sequences: list[int],
    rows: NDArray[np.int64],
    ids: dict[int, NDArray[np.int32]],
    steps: Steps,
) -> GroupProfile:
    n_experts = trace.meta.n_experts
    own = np.isin(trace.sequence[rows], sequences)
    sequence = trace.sequence[rows][own]
    overlap, unique, popularity = [], [], []
    for layer_ids in ids.values():
        chosen = layer_ids[own]
        overlap.append(expert_counts.empirical_overlap(chosen, n_experts, sequence))
        unique.append(unique_curve(chosen, n_experts, (UNIQUE_TOKENS,), sequence)[UNIQUE_TOKENS])
        popularity.append(expert_counts.activation_probability(chosen, n_experts))
    has_tokens = bool(own.any()) and bool(ids)
    own_steps = np.isin(steps.sequence, sequences)
    drafted = int((steps.n_tokens[own_steps] - 1).sum())
    accepted = int((steps.n_text[own_steps] - 1).sum())
    return GroupProfile(
        kind=kind,
        name=name,
        texts=int(np.unique(sequence).size),
        tokens=int(own.sum()),
        overlap=mean_or_none(overlap),
        overlap_independence=(
            float(np.mean([expert_counts.independence_overlap(p) for p in popularity])) if has_tokens else None
        ),
        unique=mean_or_none(unique),
        unique_independence=(
            float(np.mean([expert_counts.independence_unique(p, UNIQUE_TOKENS) for p in popularity]))
            if has_tokens
            else None
        ),
        acceptance_rate=accepted / drafted if drafted else None,
    )
