"""What a trace holds, in figures: for `moeedge trace info`, and for whoever needs gamma and acceptance of a trace."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from moeedge.native.abi import Phase
from moeedge.trace.format import Trace


@dataclass(frozen=True)
class TraceSummary:
    """Counts over a whole trace; None where the trace cannot say."""

    model: str
    architecture: str
    source: str
    n_layers: int
    expert_layers: int  # layers of which anything was recorded
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
    acceptance: float | None  # chance of a draft to be accepted when all before it were; None without drafts
    tokens_per_step: float | None  # text per step
    has_weights: bool
    has_tokens: bool  # vocabulary ids
    has_hidden_states: bool  # the draft's hidden states
    not_recorded: float  # share of (token, layer) pairs of the expert layers without experts
    expert_bytes: int | None  # mean of the expert layers
    overlap: float | None  # share of a token's experts that the next token of its text uses too

    def as_dict(self) -> dict[str, Any]:
        """For JSON, with the key of trace files for k."""
        return {"n_experts_used" if name == "n_expert_used" else name: value for name, value in asdict(self).items()}


def summarize(trace: Trace) -> TraceSummary:
    """Reads the figures off the arrays."""
    meta, layers = trace.meta, trace.expert_layers()
    decoded = (trace.phase == Phase.DECODE) | (trace.phase == Phase.VERIFY)
    key = trace.sequence[decoded].astype(np.int64) << 32 | trace.step[decoded]
    n_steps = int(np.count_nonzero(np.diff(key))) + 1 if key.size else 0
    gamma, acceptance = speculation(trace)
    n_text = int(trace.text_rows().size)
    sizes = trace.expert_bytes()
    known = (trace.ids[:, layers] != trace.sentinel).any(axis=2)
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
        rejected_tokens=int(np.count_nonzero(decoded & ~trace.accepted)),
        sequences=int(np.unique(trace.sequence).size),
        steps=n_steps,
        gamma=gamma,
        acceptance=acceptance,
        tokens_per_step=n_text / n_steps if n_steps else None,
        has_weights=trace.weights is not None and bool(np.isfinite(trace.weights).any()),
        has_tokens=bool((trace.token >= 0).any()),
        has_hidden_states=trace.hidden_states is not None and bool(np.isfinite(trace.hidden_states).any()),
        not_recorded=float(1.0 - known.mean()) if known.size else 0.0,
        expert_bytes=None if sizes is None or not layers else round(float(sizes[layers].mean())),
        overlap=_overlap(trace, layers),
    )


def speculation(trace: Trace) -> tuple[int | None, float | None]:
    """The longest draft of the verification steps, and the chance of a draft to be accepted.

    The chance is that of a single draft when all before it were accepted: accepted drafts by those that were judged,
    and of a step's refused drafts only the first was judged by the target alone.
    """
    rows = np.flatnonzero(trace.phase == Phase.VERIFY)
    if rows.size == 0:
        return None, None
    key = trace.sequence[rows].astype(np.int64) << 32 | trace.step[rows]
    starts = np.flatnonzero(np.r_[True, np.diff(key) != 0])
    n_tokens = np.diff(np.r_[starts, rows.size])
    n_accepted = np.add.reduceat(trace.accepted[rows].astype(np.int64), starts) - 1
    gamma = int(n_tokens.max()) - 1
    n_judged = int(np.minimum(n_accepted + 1, n_tokens - 1).sum())
    return (gamma, int(n_accepted.sum()) / n_judged if n_judged else None) if gamma > 0 else (None, None)


def _overlap(trace: Trace, layers: list[int]) -> float | None:
    """Mean over layers and adjacent tokens of |experts(t) & experts(t + 1)| / |experts(t)|, a layer at a time."""
    rows = trace.text_rows()
    if rows.size < 2 or not layers:
        return None
    adjacent = trace.sequence[rows[1:]] == trace.sequence[rows[:-1]]
    shared = used = 0
    for layer in layers:
        ids = trace.layer_ids(layer)[rows]
        first, second = ids[:-1][adjacent], ids[1:][adjacent]
        shared += int((first[:, :, None] == second[:, None, :])[first >= 0].any(axis=-1).sum())
        used += int(np.count_nonzero(first >= 0))
    return shared / used if used else None
