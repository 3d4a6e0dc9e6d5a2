"""From the rows of a trace to the steps of a decoder: rows that are computed together, and their activations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.experts import count_ids
from moeedge.native.abi import Phase
from moeedge.records import counter, figure, quotient
from moeedge.speculation import acceptance_rate, check_gamma
from moeedge.trace.format import Trace

GAMMA = 8  # drafts of a text whose trace has none: MoE-SpAc's length
RejectedTokenModel = Literal["optimistic", "pessimistic"]  # see simulated_steps


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Steps:
    """Rows of a trace grouped by decode call, in order."""

    rows: NDArray[np.int64]  # [n_steps, width], -1 beyond the tokens of a step
    sequence: NDArray[np.int32]  # [n_steps], the text of each step
    n_text: NDArray[np.int64]  # [n_steps], how many of the rows, from the first, became text

    def __len__(self) -> int:
        return int(self.rows.shape[0])

    @property
    def n_tokens(self) -> NDArray[np.int64]:
        """Tokens per step, int64 [n_steps]."""
        return np.asarray((self.rows >= 0).sum(axis=1), dtype=np.int64)

    def text_rows(self) -> NDArray[np.int64]:
        """Rows of the tokens that became text, int64 [n], step by step."""
        place = np.arange(self.rows.shape[1])
        return np.asarray(self.rows[(place < self.n_text[:, None]) & (self.rows >= 0)])

    def is_first(self) -> NDArray[np.bool_]:
        """Whether each step is the first of its text, bool [n_steps]."""
        return np.r_[True, np.diff(self.sequence) != 0] if len(self) else np.zeros(0, dtype=np.bool_)


def recorded_steps(trace: Trace, phases: tuple[Phase, ...] = (Phase.DECODE, Phase.VERIFY)) -> Steps:
    """The steps of these phases as they were computed, one per decode or verification call, with rejected drafts."""
    rows = np.flatnonzero(np.isin(trace.phase, phases))
    if not rows.size:
        return _no_steps()
    sequence, step = trace.sequence[rows], trace.step[rows]
    is_new = np.r_[True, (np.diff(sequence) != 0) | (np.diff(step) != 0)]
    index = np.cumsum(is_new) - 1  # the step of each row
    place = np.arange(rows.size) - np.flatnonzero(is_new)[index]  # of each row in its step
    n_steps = int(index[-1]) + 1
    table = np.full((n_steps, int(place.max()) + 1), -1, dtype=np.int64)
    table[index, place] = rows
    n_text = np.bincount(index, weights=trace.accepted[rows], minlength=n_steps).astype(np.int64)
    return Steps(table, sequence[is_new], n_text)


def text_steps(trace: Trace, rows: NDArray[np.int64] | None = None) -> Steps:
    """The accepted tokens one at a time, as plain decoding computes the same text; rows: of other tokens."""
    rows = trace.text_rows() if rows is None else rows
    return Steps(rows[:, None], trace.sequence[rows], np.ones(rows.size, dtype=np.int64))


def simulated_steps(
    trace: Trace,
    *,
    gamma: int,
    acceptance_chance: float,
    rng: np.random.Generator,
    rejected_token_model: RejectedTokenModel = "optimistic",
) -> Steps:
    """The text of a trace in verification windows of gamma + 1 tokens; each draft has the same chance of acceptance.

    A window that starts at token p and has n accepted drafts is followed by one at p + n + 1. Windows that would leave
    their text are dropped. A trace does not hold the routing of rejected drafts; the two models of it are bounds:
    `optimistic` takes the tokens that really follow, `pessimistic` random tokens of the same text. Both draw the same
    acceptances from generators of the same seed. Raises ValueError for an impossible gamma or chance.
    """
    check_gamma(gamma, least=1)
    require(0 <= acceptance_chance <= 1, f"the chance of acceptance must be in [0, 1], not {acceptance_chance}")
    rejected_rng = rng.spawn(1)[0]
    text, windows, n_text = trace.text_rows(), list[NDArray[np.int64]](), list[int]()
    for rows in np.split(text, np.flatnonzero(np.diff(trace.sequence[text])) + 1):
        start = 0
        while start + gamma + 1 <= rows.size:
            rejected = np.flatnonzero(rng.random(gamma) >= acceptance_chance)
            n_accepted = int(rejected[0]) if rejected.size else gamma
            window = rows[start : start + gamma + 1].copy()
            if rejected_token_model == "pessimistic":
                window[n_accepted + 1 :] = rejected_rng.choice(rows, gamma - n_accepted)
            windows.append(window)
            n_text.append(n_accepted + 1)
            start += n_accepted + 1
    if not windows:
        return _no_steps()
    table = np.stack(windows)
    return Steps(table, trace.sequence[table[:, 0]], np.array(n_text, dtype=np.int64))


def activation_counts(trace: Trace, steps: Steps, layers: list[int]) -> NDArray[np.uint16]:
    """Tokens of each step that used each expert, uint16 [n_steps, len(layers), n_experts]."""
    n_experts = trace.meta.n_experts
    counts = np.zeros((len(steps), len(layers), n_experts), dtype=np.uint16)
    index, place = np.nonzero(steps.rows >= 0)
    rows = steps.rows[index, place]
    for column, layer in enumerate(layers):
        ids = trace.layer_ids(layer)[rows]  # [tokens of all steps, k]
        counts[:, column] = count_ids(ids, n_experts, rows=index[:, None], n_rows=len(steps))
    return counts


@dataclass(frozen=True)
class DraftStats:
    """Drafts of a trace's verifications."""

    gamma: int = figure("Tokens of the longest draft")
    drafted: int = counter("drafted tokens", in_json=False)
    judged: int = counter("of these, tokens that the target judged on their own", in_json=False)
    accepted: int = counter("accepted tokens", in_json=False)
    acceptance_rate = acceptance_rate
    acceptance_chance = quotient(
        "accepted", "judged", "Chance of one draft, Leviathan et al.'s alpha", empty=0.0, most=1
    )


def draft_stats(trace: Trace) -> DraftStats | None:
    """The drafts of the recorded verifications; None without any."""
    return drafts_of(recorded_steps(trace, (Phase.VERIFY,)))


def drafts_of(steps: Steps) -> DraftStats | None:
    """The drafts of these steps; None without any. Of a step's rejected drafts the target judged only the first."""
    n_drafted, n_accepted = steps.n_tokens - 1, steps.n_text - 1
    if not n_drafted.any():
        return None
    n_judged = np.minimum(n_accepted + 1, n_drafted)
    return DraftStats(int(n_drafted.max()), *(int(each.sum()) for each in (n_drafted, n_judged, n_accepted)))


def _no_steps() -> Steps:
    return Steps(np.zeros((0, 1), dtype=np.int64), np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.int64))
