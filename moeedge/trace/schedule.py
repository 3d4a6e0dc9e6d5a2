"""From a routing trace to the batches that a decoder would run, and what each of them activates.

A trace with verification steps is replayed as it was computed: its batches, its refused drafts, its acceptance. A trace
of plain text is cut into verification windows of gamma + 1 tokens, each draft accepted with a fixed chance. What
rejected drafts would have routed to is then unknown, so there are two models of rejected tokens, as bounds:

  optimistic   they route like the tokens that really follow
  pessimistic  they route like unrelated tokens of the same text

Both draw the same acceptances for the same seed. The prompt of a text, where the trace holds it, comes first as one
batch (`prefill`): policies see it, nothing is counted.

Batches come in chunks, counted together and shared by all that replays them (moeedge/sim/replay.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.counting import count_ids
from moeedge.errors import InputError
from moeedge.native.abi import Phase
from moeedge.trace.format import Trace
from moeedge.trace.steps import RejectedTokenModel, Steps, recorded_steps, simulated_steps, text_steps
from moeedge.trace.summary import speculation

GAMMA, ACCEPTANCE = 8, 0.8  # of a text of which nothing else is known: MoE-SpAc's draft length
_CELLS_AT_ONCE = 1 << 20  # of the counts of a chunk: 4 MB
_PREFILL_TOKENS = 4096  # at least so many tokens of prompts may lie in a chunk


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class Batch:
    """What is computed together: a prompt, or the token emitted last and the drafts behind it."""

    ids: NDArray[np.int32]  # [n_layers, n_tokens, k], -1: not recorded
    counts: NDArray[np.int32]  # [n_layers, n_experts], activations
    tokens: NDArray[np.int32] | None  # [n_tokens], vocabulary ids where known
    n_accepted: int  # drafts that became text
    prefill: bool
    is_first: bool  # the first batch of its text
    hidden_states: NDArray[np.float32] | None = None  # [n_states, d], the draft's, of the first tokens, where known

    @property
    def n_tokens(self) -> int:
        """Tokens that are computed together."""
        return int(self.ids.shape[1])


@dataclass(frozen=True, eq=False)
class Chunk:
    """Batches that follow each other."""

    first: int  # number of the first batch in its schedule
    batches: list[Batch]
    counts: NDArray[np.int32]  # [n_batches, n_layers, n_experts]
    counted: NDArray[np.bool_]  # [n_batches], False: a prompt


@dataclass(frozen=True, eq=False)
class Schedule:
    """The batches of a trace, as rows of it."""

    trace: Trace
    rejected_token_model: RejectedTokenModel | Literal["recorded"]
    gamma: int
    acceptance: float | None  # None without drafts
    rows: NDArray[np.int64]  # [n], batch by batch
    starts: NDArray[np.int64]  # [n_batches + 1], into `rows`
    n_text: NDArray[np.int64]  # [n_batches], tokens that became text, the one emitted before included
    prefill: NDArray[np.bool_]  # [n_batches]
    is_first: NDArray[np.bool_]  # [n_batches]

    @property
    def n_steps(self) -> int:
        """Batches without prompts."""
        return int(np.count_nonzero(~self.prefill))

    @property
    def n_texts(self) -> int:
        """Texts that have a batch."""
        return int(np.count_nonzero(self.is_first))

    @property
    def tokens_per_step(self) -> float:
        """Text per step."""
        return float(self.n_text[~self.prefill].mean()) if self.n_steps else 0.0

    @property
    def has_tokens(self) -> bool:
        """Whether the vocabulary id of every token is known."""
        return bool((self.trace.token[self.rows] >= 0).all())

    def batches(self) -> list[Batch]:
        """All batches in order, at once."""
        return [batch for chunk in self.chunks() for batch in chunk.batches]

    def chunks(self) -> Iterator[Chunk]:
        """All batches in order."""
        cells = self.trace.meta.n_layers * self.trace.meta.n_experts
        n_at_once = max(_CELLS_AT_ONCE // cells, 1)
        first, n_batches = 0, self.prefill.size
        lengths = np.diff(self.starts)
        while first < n_batches:
            last = min(first + n_at_once, n_batches)
            long = np.cumsum(lengths[first:last]) > max(_PREFILL_TOKENS, 16 * n_at_once)
            if long.any():  # prompts of thousands of tokens
                last = first + max(int(np.argmax(long)), 1)
            yield self._chunk(first, last)
            first = last

    def _chunk(self, first: int, last: int) -> Chunk:
        trace = self.trace
        n_layers, n_experts = trace.meta.n_layers, trace.meta.n_experts
        begin, end = int(self.starts[first]), int(self.starts[last])
        rows = self.rows[begin:end]
        ids = trace.ids[rows].astype(np.int32)  # [tokens, n_layers, k]
        ids[ids == trace.sentinel] = -1
        lengths = np.diff(self.starts[first : last + 1])
        batch_of = np.repeat(np.arange(last - first), lengths)  # [tokens]
        row_of = batch_of[:, None, None] * n_layers + np.arange(n_layers)[:, None]
        by_row = count_ids(ids, n_experts, rows=row_of, n_rows=(last - first) * n_layers)
        counts = by_row.reshape(last - first, n_layers, n_experts).astype(np.int32)
        tokens = trace.token[rows]
        known = bool((tokens >= 0).all()) if tokens.size else False
        blocks = _blocks(ids, lengths)
        places = self.starts[first : last + 1] - begin
        batches = [
            Batch(
                ids=blocks[index],
                counts=counts[index],
                tokens=tokens[places[index] : places[index + 1]] if known else None,
                n_accepted=0 if self.prefill[first + index] else int(self.n_text[first + index]) - 1,
                prefill=bool(self.prefill[first + index]),
                is_first=bool(self.is_first[first + index]),
                hidden_states=self._states(rows[places[index] : places[index + 1]]),
            )
            for index in range(last - first)
        ]
        assert counts.shape[1:] == (n_layers, n_experts)
        return Chunk(first, batches, counts, ~self.prefill[first:last])

    def _states(self, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Of the first tokens of a batch: the draft computes no state of the last draft before its verification."""
        hidden_states = self.trace.hidden_states
        if hidden_states is None or rows.size < 2:
            return None
        known = np.isfinite(hidden_states[rows[:-1]]).all(axis=1)
        n_known = int(np.argmin(known)) if not known.all() else known.size
        return hidden_states[rows[:n_known]].astype(np.float32) if n_known else None


def _blocks(ids: NDArray[np.int32], lengths: NDArray[np.int64]) -> list[NDArray[np.int32]]:
    """Ids of each batch, contiguous [n_layers, n_tokens, k]; all at once where the batches are of one length."""
    n_layers, k = ids.shape[1:]
    if lengths.size and (lengths == lengths[0]).all():
        together = ids.reshape(lengths.size, int(lengths[0]), n_layers, k).transpose(0, 2, 1, 3)
        return list(np.ascontiguousarray(together))
    ends = np.cumsum(lengths)
    pairs = zip((ends - lengths).tolist(), ends.tolist(), strict=True)
    return [np.ascontiguousarray(ids[start:end].transpose(1, 0, 2)) for start, end in pairs]


def recorded_schedule(trace: Trace) -> Schedule | None:
    """The batches as they were computed; None where the trace has no verification steps."""
    gamma, acceptance = speculation(trace)
    if gamma is None:
        return None
    return _schedule(trace, recorded_steps(trace), "recorded", gamma, acceptance)


def as_computed(trace: Trace) -> Schedule:
    """The batches as they were computed, whether there were drafts or not."""
    return recorded_schedule(trace) or cut_schedule(
        trace, gamma=0, acceptance=1.0, rejected_token_model="optimistic", seed=0
    )


def cut_schedule(
    trace: Trace,
    *,
    gamma: int,
    acceptance: float = 1.0,
    rejected_token_model: RejectedTokenModel = "optimistic",
    seed: int = 0,
) -> Schedule:
    """The text cut into windows of gamma + 1 tokens; with gamma 0 one token after the other.

    Windows that would leave their text are dropped. Raises ValueError for an impossible gamma or acceptance,
    InputError where no window fits.
    """
    if gamma < 0:
        raise ValueError(f"gamma must be >= 0, not {gamma}")
    if not 0 <= acceptance <= 1:  # NaN too
        raise ValueError(f"acceptance must be in [0, 1], not {acceptance}")
    if gamma == 0:
        return _schedule(trace, text_steps(trace), rejected_token_model, 0, None)
    steps = simulated_steps(
        trace,
        gamma=gamma,
        acceptance=acceptance,
        rejected_token_model=rejected_token_model,
        rng=np.random.default_rng(seed),
    )
    return _schedule(trace, steps, rejected_token_model, gamma, acceptance)


def _schedule(
    trace: Trace,
    steps: Steps,
    rejected_token_model: RejectedTokenModel | Literal["recorded"],
    gamma: int,
    acceptance: float | None,
) -> Schedule:
    """Steps as batches, with each text's prompt in front."""
    if not len(steps):
        raise InputError(
            f"No text of the trace is as long as a step of {gamma + 1} tokens.", "Use a smaller --gamma, or 0."
        )
    prompts = np.flatnonzero(trace.phase == Phase.PREFILL)
    of_prompts, counts = np.unique(trace.sequence[prompts], return_counts=True)
    used = np.isin(of_prompts, steps.sequence)
    prompts = prompts[np.isin(trace.sequence[prompts], of_prompts[used])]
    of_prompts, counts = of_prompts[used], counts[used]
    # sort key: the text, then prompt before steps; np.lexsort keeps the order of steps
    owner = np.concatenate((of_prompts, steps.sequence))
    is_prompt = np.r_[np.ones(of_prompts.size, dtype=np.bool_), np.zeros(len(steps), dtype=np.bool_)]
    lengths = np.concatenate((counts, steps.n_tokens)).astype(np.int64)
    order = np.lexsort((np.arange(owner.size), owner))
    flat = np.concatenate((prompts, steps.rows[steps.rows >= 0]))
    begins = np.cumsum(lengths) - lengths
    sorted_lengths = lengths[order]
    starts = np.concatenate(([0], np.cumsum(sorted_lengths)))
    inside = np.arange(int(starts[-1])) - np.repeat(starts[:-1], sorted_lengths)
    return Schedule(
        trace=trace,
        rejected_token_model=rejected_token_model,
        gamma=gamma,
        acceptance=acceptance,
        rows=flat[np.repeat(begins[order], sorted_lengths) + inside],
        starts=starts,
        n_text=np.concatenate((counts, steps.n_text))[order],
        prefill=is_prompt[order],
        is_first=np.r_[True, np.diff(owner[order]) != 0],
    )


def schedules(
    trace: Trace,
    *,
    gamma: int | None = None,
    acceptance: float | None = None,
    rejected_token_models: Sequence[RejectedTokenModel] | None = None,
    seed: int = 0,
) -> list[Schedule]:
    """What a trace is replayed as: once as it was recorded, or once per model of rejected tokens.

    As recorded where the trace has verification steps and nothing else is asked for. Otherwise its text is cut into
    windows: by both models unless `rejected_token_models` says which; gamma and acceptance are the trace's where it has
    them and none are given, else 8 and 0.8. Without drafts (gamma 0) the models are the same: once.
    """
    if not trace.expert_layers():
        raise InputError(
            "The trace records no experts: there is nothing to replay.", "Look at it with moeedge trace info."
        )
    own_gamma, own_acceptance = speculation(trace)
    if own_gamma is not None and gamma is None and acceptance is None and rejected_token_models is None:
        recorded = recorded_schedule(trace)
        assert recorded is not None
        return [recorded]
    gamma = gamma if gamma is not None else own_gamma if own_gamma is not None else GAMMA
    acceptance = acceptance if acceptance is not None else own_acceptance if own_acceptance is not None else ACCEPTANCE
    kept: Sequence[RejectedTokenModel] = (
        rejected_token_models if rejected_token_models is not None else ("optimistic", "pessimistic")
    )
    if gamma == 0:
        kept = kept[:1]
    return [
        cut_schedule(trace, gamma=gamma, acceptance=acceptance, rejected_token_model=rejected_token_model, seed=seed)
        for rejected_token_model in kept
    ]


def texts_of(trace: Trace, first: int, last: int | None = None) -> Trace:
    """The texts number `first` up to but not including `last`, in order of their appearance."""
    numbers = np.unique(trace.sequence)[first:last]
    return trace.rows_of(np.isin(trace.sequence, numbers))
