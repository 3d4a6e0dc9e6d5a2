"""From the rows of a trace to the steps of a decoder: which rows are computed together, and what each step activates.

Three ways to cut the same trace:

  recorded_steps   as it was computed: one step per decode or verification call, rejected drafts included
  text_steps       as plain decoding would have read the same text: one accepted token per step
  simulated_steps  a trace of plain decoding cut into verification windows, with acceptance drawn at random
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.counting import count_ids
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace

RejectedTokenModel = Literal["optimistic", "pessimistic"]  # what rejected drafts route to, see simulated_steps


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Steps:
    """Rows of a trace, grouped by decode call, in order."""

    rows: NDArray[np.int64]  # [n_steps, width], -1 beyond the tokens of a step
    sequence: NDArray[np.int32]  # [n_steps], the text that each step belongs to
    n_text: NDArray[np.int64]  # [n_steps], how many of the rows, from the first, became text

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """Tokens per step, int64 [n_steps]."""
        return np.asarray((self.rows >= 0).sum(axis=1), dtype=np.int64)

    def is_first(self) -> NDArray[np.bool_]:
        """Bool [n_steps]: the first step of its text."""
        return np.r_[True, np.diff(self.sequence) != 0] if len(self) else np.zeros(0, dtype=np.bool_)


def recorded_steps(trace: Trace) -> Steps:
    """The decode and verification steps of a trace, in the order in which they were computed."""
    rows = np.flatnonzero((trace.phase == Phase.DECODE) | (trace.phase == Phase.VERIFY))
    if not rows.size:
        return _no_steps()
    sequence, step = trace.sequence[rows], trace.step[rows]
    new_step = np.r_[True, (np.diff(sequence) != 0) | (np.diff(step) != 0)]
    index = np.cumsum(new_step) - 1  # step of each row
    starts = np.flatnonzero(new_step)
    place = np.arange(rows.size) - starts[index]  # place of each row in its step
    table = np.full((starts.size, int(place.max()) + 1), -1, dtype=np.int64)
    table[index, place] = rows
    n_text = np.bincount(index, weights=trace.accepted[rows], minlength=starts.size).astype(np.int64)
    return Steps(table, sequence[new_step], n_text)


def text_steps(trace: Trace) -> Steps:
    """The accepted tokens one at a time: what a sensor of plain decoding sees of the same text."""
    rows = trace.text_rows()
    return Steps(rows[:, None], trace.sequence[rows], np.ones(rows.size, dtype=np.int64))


def simulated_steps(
    trace: Trace, *, gamma: int, acceptance: float, rejected_token_model: RejectedTokenModel, rng: np.random.Generator
) -> Steps:
    """Cut the text of a trace into verification windows of gamma + 1 tokens; each draft has a fixed chance.

    A window that starts at token p and has n accepted drafts is followed by one at p + n + 1; windows that would leave
    the text are dropped. What rejected drafts would have routed to is unknown; two bounds: `optimistic` takes the
    tokens that really follow, `pessimistic` random tokens of the same text. Both draw the same
    acceptances from generators of the same seed.
    """
    if gamma < 1:
        raise ValueError(f"gamma must be >= 1, not {gamma}")
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance must be in [0, 1], not {acceptance}")
    rejected_rng = rng.spawn(1)[0]
    text = trace.text_rows()
    sequences = trace.sequence[text]
    windows: list[NDArray[np.int64]] = []
    accepted: list[int] = []
    owners: list[int] = []
    for rows in np.split(text, np.flatnonzero(np.diff(sequences)) + 1):
        start = 0
        while start + gamma + 1 <= rows.size:
            rejected = np.flatnonzero(rng.random(gamma) >= acceptance)
            n_accepted = int(rejected[0]) if rejected.size else gamma
            window = rows[start : start + gamma + 1].copy()
            if rejected_token_model == "pessimistic":
                window[n_accepted + 1 :] = rejected_rng.choice(rows, gamma - n_accepted)
            windows.append(window)
            accepted.append(n_accepted + 1)
            owners.append(int(trace.sequence[rows[0]]))
            start += n_accepted + 1
    if not windows:
        return _no_steps()
    return Steps(np.stack(windows), np.array(owners, dtype=np.int32), np.array(accepted, dtype=np.int64))


def activation_counts(trace: Trace, steps: Steps, layers: list[int]) -> NDArray[np.uint16]:
    """How many tokens of each step used each expert, uint16 [n_steps, len(layers), n_experts]."""
    n_experts = trace.meta.n_experts
    counts = np.zeros((len(steps), len(layers), n_experts), dtype=np.uint16)
    index, place = np.nonzero(steps.rows >= 0)
    rows = steps.rows[index, place]
    for column, layer in enumerate(layers):
        ids = trace.layer_ids(layer)[rows]  # [tokens of all steps, k]
        counts[:, column] = count_ids(ids, n_experts, rows=index[:, None], n_rows=len(steps))
    return counts


def _no_steps() -> Steps:
    return Steps(np.zeros((0, 1), dtype=np.int64), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))
