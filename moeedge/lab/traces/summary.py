"""The figures of a routing trace, for `moeedge lab trace info`."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import draft_stats, recorded_steps


@dataclass(frozen=True)
class TraceSummary:
    """Counts over an entire trace; None where the trace does not say."""

    model: str
    architecture: str
    source: str
    n_layers: int
    expert_layers: int  # layers with recorded experts
    n_experts: int
    n_expert_used: int
    tokens: int  # rows
    prefill_tokens: int
    text_tokens: int  # accepted ones of decode and verification steps
    draft_tokens: int  # rows of the draft phase
    rejected_tokens: int
    sequences: int  # that have rows
    steps: int  # decode and verification calls
    gamma: int | None  # the longest draft; None without verifications
    acceptance_rate: float | None  # accepted over drafted tokens; None without drafts
    acceptance_chance: float | None  # of a draft, after all before it were accepted; None without drafts
    tokens_per_step: float | None  # text per step
    has_weights: bool
    has_tokens: bool  # vocabulary ids
    has_hidden_states: bool  # of the draft
    not_recorded: float  # share of (token, layer) pairs of the expert layers without experts
    expert_bytes: int | None  # mean of the expert layers
    overlap: float | None  # share of a token's experts that the next token of its text uses too

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the key that trace files have for k."""
        return {"n_experts_used" if name == "n_expert_used" else name: value for name, value in asdict(self).items()}


def summarize_trace(trace: Trace) -> TraceSummary:
    """The figures of a trace."""
    meta, layers = trace.meta, trace.expert_layers()
    steps = recorded_steps(trace)
    drafts = draft_stats(trace)
    n_text = int(trace.text_rows().size)
    expert_bytes = trace.expert_bytes()
    is_recorded = (trace.ids[:, layers] != trace.sentinel).any(axis=2)
    return TraceSummary(
        model=meta.model,
        architecture=meta.architecture,
        source=meta.source,
        n_layers=meta.n_layers,
        expert_layers=len(layers),
        n_experts=meta.n_experts,
        n_expert_used=meta.n_expert_used,
        tokens=trace.n_tokens,
        prefill_tokens=int(np.count_nonzero(trace.phase == Phase.PREFILL)),
        text_tokens=n_text,
        draft_tokens=int(np.count_nonzero(trace.phase == Phase.DRAFT)),
        rejected_tokens=int(steps.n_tokens.sum()) - n_text,
        sequences=int(np.unique(trace.sequence).size),
        steps=len(steps),
        gamma=None if drafts is None else drafts.gamma,
        acceptance_rate=None if drafts is None else drafts.acceptance_rate,
        acceptance_chance=None if drafts is None else drafts.acceptance_chance,
        tokens_per_step=n_text / len(steps) if len(steps) else None,
        has_weights=trace.weights is not None and bool(np.isfinite(trace.weights).any()),
        has_tokens=bool((trace.token >= 0).any()),
        has_hidden_states=trace.hidden_states is not None and bool(np.isfinite(trace.hidden_states).any()),
        not_recorded=float(1.0 - is_recorded.mean()) if is_recorded.size else 0.0,
        expert_bytes=None if expert_bytes is None or not layers else round(float(expert_bytes[layers].mean())),
        overlap=_overlap(trace, layers),
    )


def _overlap(trace: Trace, layers: list[int]) -> float | None:
    """Mean over layers and adjacent tokens of |experts(t) & experts(t + 1)| / |experts(t)|."""
    rows = trace.text_rows()
    if rows.size < 2 or not layers:
        return None
    is_adjacent = trace.sequence[rows[1:]] == trace.sequence[rows[:-1]]
    n_shared = n_used = 0
    for layer in layers:
        ids = trace.layer_ids(layer)[rows]
        first, second = ids[:-1][is_adjacent], ids[1:][is_adjacent]
        n_shared += int((first[:, :, None] == second[:, None, :])[first >= 0].any(axis=-1).sum())
        n_used += int(np.count_nonzero(first >= 0))
    return n_shared / n_used if n_used else None
