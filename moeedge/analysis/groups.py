"""A trace by kind of text: overlap and distinct experts per data set, category and language.

The production study of MoE speculation, "Generalization across data domains", asks whether the overlap of adjacent
tokens is a property of the routing or of the text (13 categories of Spec-Bench, seven languages).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moeedge.analysis.routing_curves import RoutingCurves, mean_curves
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
    groups = []
    for kind in KINDS:
        sequences: dict[str, list[int]] = {}
        for number, text in enumerate(described):
            if name := _name(text, kind):
                sequences.setdefault(name, []).append(number)
        if len(sequences) > 1:
            groups += [_profile(trace, steps, layers, kind, name, found) for name, found in sequences.items()]
    return groups


def _name(text: Any, kind: Kind) -> str:
    value = text.get(kind) if isinstance(text, dict) else None
    return value if isinstance(value, str) else ""


def _profile(
    trace: Trace, steps: Steps, layers: Sequence[int], kind: Kind, name: str, sequences: list[int]
) -> GroupProfile:
    rows = steps.text_rows()
    rows = rows[np.isin(trace.sequence[rows], sequences)]
    sequence = trace.sequence[rows]
    mean = mean_curves(
        [
            RoutingCurves.measure(
                layer, trace.layer_ids(layer)[rows], sequence, trace.meta.n_experts, trace.used_per_layer[layer]
            )
            for layer in layers
        ]
    )
    own_steps = np.isin(steps.sequence, sequences)
    drafted = int((steps.n_tokens[own_steps] - 1).sum())
    accepted = int((steps.n_text[own_steps] - 1).sum())
    return GroupProfile(
        kind=kind,
        name=name,
        texts=int(np.unique(sequence).size),
        tokens=rows.size,
        overlap=None if mean is None else mean.overlap[1],
        overlap_independence=None if mean is None else mean.overlap_independence,
        unique=None if mean is None else mean.unique[UNIQUE_TOKENS],
        unique_independence=None if mean is None else mean.unique_independence[UNIQUE_TOKENS],
        acceptance_rate=accepted / drafted if drafted else None,
    )
