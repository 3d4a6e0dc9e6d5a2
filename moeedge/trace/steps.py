"""The rows of a trace as the steps of a decoder, computed together, and as recorded routing that a model repeats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.experts import count_ids
from moeedge.native.abi import Phase
from moeedge.records import counter, figure, quotient
from moeedge.speculation import acceptance_rate, check_gamma
from moeedge.trace.format import Trace, unusable_trace

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


_NEXT_ROWS = 16  # that lend experts where the model uses more than the trace has
_STEP = 0.618  # of the recording, between the texts of two repetitions
_MOST_ROWS = 8192  # of a trace from which experts are borrowed so


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class RecordedRouting:
    """The experts of T tokens in reading order; the sequences of a trace follow one another.

    ids: int32 [T, n_layers, k], of which a layer takes its first experts. starts: first row of each sequence. scaling:
    how the trace was fitted; empty where it has the model's own layers, experts and experts per token. A layer gets the
    recorded one at the same share of the depth. A recorded expert stands for a block of n // n_recorded experts, of
    which a token uses as many as give k; who has too few takes those of the next tokens.
    """

    ids: NDArray[np.int32]
    starts: NDArray[np.int64]
    scaling: str = ""

    def rows(self, positions: NDArray[np.int64], unrelated: NDArray[np.bool_]) -> NDArray[np.int32]:
        """Experts [n, n_layers, k] of tokens at these positions of the joined sequences, which begin anew at the end.

        unrelated: tokens that are no part of the text, such as rejected drafts: they get the rows half the recording
        further, which are of another sequence where there are several.
        """
        n = len(self.ids)
        return np.ascontiguousarray(self.ids[(positions + np.where(unrelated, n // 2, 0)) % n])

    def offset(self, repetition: int) -> int:
        """The row at which the texts of a repetition begin, far from those of the others."""
        return int(repetition * _STEP * len(self.ids)) % len(self.ids)

    def boundaries(self, first: int, n: int) -> list[int]:
        """The positions from 0 to n - 1, of a text that begins at the row `first`, at which another sequence begins."""
        rows = np.arange(first, first + n) % len(self.ids)
        return [int(position) for position in np.flatnonzero(np.isin(rows, self.starts))]


def read_routing(path: Path, *, n_layers: int, n_experts: int, used_per_layer: Sequence[int]) -> RecordedRouting:
    """The routing of a trace file, fitted to a model with `used_per_layer` experts per token, 0 for a dense layer.

    Raises InputError for an unusable file, one without a token whose experts are all recorded, and a dense model.
    """
    if not any(used_per_layer):
        raise InputError("The model has no experts to route to.", "Leave out --routing.")
    trace = Trace.load(path)
    recorded = trace.ids[:, trace.expert_layers()]
    is_text = trace.accepted & (trace.phase != Phase.DRAFT) & (recorded != trace.sentinel).all(axis=(1, 2))
    if not is_text.any():
        raise unusable_trace(path, "no token has experts in every layer")
    ids, sequence = recorded[is_text].astype(np.int32), trace.sequence[is_text]
    starts = np.flatnonzero(np.diff(sequence, prepend=sequence[0] - 1))
    own_layers = [layer for layer, used in enumerate(used_per_layer) if used]
    k, n_recorded = max(used_per_layer), trace.meta.n_experts
    before, after = (n_recorded, *ids.shape[1:]), (n_experts, len(own_layers), k)
    if before == after and {used_per_layer[layer] for layer in own_layers} == {k}:
        out = np.zeros((len(ids), n_layers, k), dtype=np.int32)
        out[:, own_layers] = ids
        return RecordedRouting(out, starts)
    # each recorded expert stands for a block of the model's: which of them it is, is fixed for a sequence and a layer
    n_block, n_each = max(n_experts // n_recorded, 1), -(-k // ids.shape[2])
    is_distinct = n_experts % n_recorded == 0 and n_each <= n_block
    ids = ids if is_distinct else ids[:_MOST_ROWS]
    starts, text = starts[starts < len(ids)], np.searchsorted(starts, np.arange(len(ids)), side="right") - 1
    out, rng = np.zeros((len(ids), n_layers, k), dtype=np.int32), np.random.default_rng(0)
    for index, layer in enumerate(own_layers):
        order = rng.permuted(np.tile(np.arange(n_block), (len(starts), n_recorded, 1)), axis=2)[:, :, :n_each]
        blocks = np.arange(n_recorded) * n_experts // n_recorded
        own = ids[:, index * ids.shape[1] // len(own_layers)]
        experts = (blocks[own][:, None] + order[text[:, None], own].swapaxes(1, 2)).reshape(len(own), -1)
        out[:, layer] = experts[:, :k] if is_distinct else _distinct(experts, k, n_experts)
    names = ("experts", "layers with experts", "experts per token")
    changes = (f"{name} {old} -> {new}" for name, old, new in zip(names, before, after, strict=True) if old != new)
    return RecordedRouting(out, starts, ", ".join(changes) or "experts per token by layer")


def _distinct(experts: NDArray[np.int64], k: int, n_experts: int) -> NDArray[np.int32]:
    """For each row [T, any number] the first `k` distinct experts of it and of the rows after it, then free ones."""
    out = np.empty((len(experts), k), dtype=np.int32)
    for row in range(len(experts)):
        found = dict.fromkeys(experts[row : row + 1 + _NEXT_ROWS].ravel().tolist())
        out[row] = list(found if len(found) >= k else found | dict.fromkeys(range(n_experts)))[:k]
    return out
