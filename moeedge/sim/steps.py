"""What a simulation is driven by: steps, each one batch of tokens with the experts that they used.

From a recorded trace come the verifications as they were, or, for a run without drafts, its text token by token. Plain
text is cut into windows of gamma + 1 tokens, of which a number follows the stated acceptance; what refused drafts
routed to is not known then: like the text that came (optimistic), or like unrelated tokens of it (pessimistic).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.trace import PREFILL, Trace

Tail = Literal["optimistic", "pessimistic"]


@dataclass(frozen=True, eq=False)
class Step:
    """One batch: the token emitted last and the drafts behind it."""

    ids: NDArray[np.int32]  # [n_layers, n_tokens, k], -1: not recorded
    tokens: NDArray[np.int32] | None  # [n_tokens], vocabulary ids
    n_accepted: int  # drafts that became text
    prefill: bool = False
    fresh: bool = False  # a text begins

    @property
    def n_tokens(self) -> int:
        """Of the batch."""
        return int(self.ids.shape[1])


def count(ids: NDArray[np.int32], n_experts: int) -> NDArray[np.uint32]:
    """Activations [n_layers, n_experts] of ids [n_layers, n_tokens, k]."""
    cells = np.arange(ids.shape[0])[:, None, None] * n_experts + ids
    counted = np.bincount(cells[ids >= 0], minlength=ids.shape[0] * n_experts)
    return counted.reshape(ids.shape[0], n_experts).astype(np.uint32)


def cut(
    texts: Sequence[NDArray[np.int32]], gamma: int, acceptance: float, seed: int, tail: Tail = "optimistic"
) -> list[Step]:
    """Windows over texts, ids [T, n_layers, k] each; gamma 0: one token per step."""
    rng = np.random.default_rng(seed)
    return [step for text in texts for step in _windows(text, gamma, acceptance, rng, tail)]


def _windows(
    ids: NDArray[np.int32], gamma: int, acceptance: float, rng: np.random.Generator, tail: Tail
) -> Iterator[Step]:
    start = 0
    while start + gamma + 1 <= len(ids):
        refused = np.flatnonzero(rng.random(gamma) >= acceptance)
        n_accepted = int(refused[0]) if refused.size else gamma
        window = ids[start : start + gamma + 1].astype(np.int32)
        if tail == "pessimistic":
            window[n_accepted + 1 :] = ids[rng.integers(0, len(ids), gamma - n_accepted)]
        yield Step(np.ascontiguousarray(window.transpose(1, 0, 2)), None, n_accepted, fresh=start == 0)
        start += n_accepted + 1


def recorded(trace: Trace) -> list[Step]:
    """The steps of a trace as they were computed, prefills included."""
    ids = _ids(trace)
    key = trace.sequence.astype(np.int64) << 32 | trace.step
    starts = np.flatnonzero(np.r_[True, np.diff(key) != 0])
    steps = []
    for start, stop in zip(starts, np.r_[starts[1:], len(key)], strict=True):
        prefill = bool(trace.phase[start] == PREFILL)
        fresh = start == 0 or trace.sequence[start] != trace.sequence[start - 1]
        n_accepted = 0 if prefill else max(int(trace.accepted[start:stop].sum()) - 1, 0)
        block = np.ascontiguousarray(ids[start:stop].transpose(1, 0, 2))
        tokens = np.ascontiguousarray(trace.token[start:stop])
        steps.append(Step(block, tokens, n_accepted, prefill, bool(fresh)))
    return steps


def texts_of(trace: Trace) -> list[NDArray[np.int32]]:
    """The decoded text of every sequence, ids [T, n_layers, k]: what a run without drafts would have computed."""
    rows = trace.text_rows()
    ids = _ids(trace)[rows]
    edges = np.flatnonzero(np.diff(trace.sequence[rows])) + 1
    return [part for part in np.split(ids, edges) if len(part)]


def _ids(trace: Trace) -> NDArray[np.int32]:
    ids = trace.ids.astype(np.int32)
    ids[trace.ids == trace.sentinel] = -1
    return ids
