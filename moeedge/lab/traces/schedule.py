"""From a routing trace to the batches that a decoder would run, and the activations of each.

A trace with verification steps is replayed as it was computed. A trace of plain text is cut into verification windows
(steps.simulated_steps), with one of two models of the rejected tokens. The prompt of a text, if the trace holds it,
comes first as one batch (`prefill`): policies see it, no figure counts it.

A cut window has no drafts: before it is verified, policies know its first token alone, and no hidden state; afterwards,
the tokens that became text. To know which drafts are unknown would tell in advance how many are accepted.

Batches are made in chunks, which are counted together, and shared by all policies of a replay (lab/sim/replay.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import InputError, require
from moeedge.experts import count_ids
from moeedge.native.abi import Phase
from moeedge.policies.base import CacheShape, Observation
from moeedge.speculation import check_gamma
from moeedge.trace.format import Trace
from moeedge.trace.steps import (
    GAMMA,
    RejectedTokenModel,
    Steps,
    draft_stats,
    recorded_steps,
    simulated_steps,
    text_steps,
)

ACCEPTANCE_CHANCE = 0.8  # of a text whose trace has no drafts
AcceptanceSource = Literal["recorded", "measured", "assumed"]
_CHUNK_COUNTS = 1 << 20  # elements of a chunk's counts, 4 MB
_CHUNK_TOKENS = 4096  # a chunk ends before it has more tokens, unless its batches are many


def cache_shape(trace: Trace, ratio: float) -> CacheShape:
    """One pool of slots for a share `ratio` of the experts of all layers that the trace records."""
    meta, layers = trace.meta, trace.expert_layers()
    group = np.full(meta.n_layers, -1, dtype=np.int32)
    group[layers] = 0
    n_slots = int(ratio * len(layers) * meta.n_experts + 1e-9)
    return CacheShape(meta.n_layers, meta.n_experts, group, np.array([n_slots], dtype=np.int32))


@dataclass(frozen=True, eq=False, kw_only=True)
class Batch(Observation):
    """A prompt or a verification, as policies observe it; without the weights and scores of routers."""

    counts: NDArray[np.int32]
    ids: NDArray[np.int32]
    is_first: bool  # of its text
    hidden_states: NDArray[np.float32] | None = None  # [n_states, d], the draft's, of the first tokens; None: unknown
    drafts_known: bool = True  # before the verification; False: of a cut window
    rows: NDArray[np.int64] | None = None  # [n_tokens], of the trace

    @property
    def known_tokens(self) -> list[int]:
        """Vocabulary ids that are known before the verification, of the batch's first tokens; empty: none."""
        if self.tokens is None:
            return []
        return [*map(int, self.tokens if self.drafts_known else self.tokens[:1])]


@dataclass(frozen=True, eq=False)
class Schedule:
    """The batches of a trace, as rows of it."""

    trace: Trace
    rejected_token_model: RejectedTokenModel | Literal["recorded"]
    gamma: int
    acceptance_chance: float | None  # of a draft, after all before it were accepted; None without drafts
    rows: NDArray[np.int64]  # [n], batch by batch
    starts: NDArray[np.int64]  # [n_batches + 1], into `rows`
    n_text: NDArray[np.int64]  # [n_batches], tokens that became text, with the one emitted before
    prefill: NDArray[np.bool_]  # [n_batches]
    is_first: NDArray[np.bool_]  # [n_batches]
    # whether drafts were accepted as the trace says, drawn with the chance that it measured, or with an assumed one
    acceptance_source: AcceptanceSource | None = None  # None: no drafts

    @property
    def n_steps(self) -> int:
        """Batches that are not prompts."""
        return int(np.count_nonzero(~self.prefill))

    @property
    def n_texts(self) -> int:
        """Texts that have a batch."""
        return int(np.count_nonzero(self.is_first))

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of text per step."""
        return float(self.n_text[~self.prefill].mean()) if self.n_steps else 0.0

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted over drafted tokens; None without drafts."""
        n_drafted = int((np.diff(self.starts)[~self.prefill] - 1).sum())
        return int((self.n_text[~self.prefill] - 1).sum()) / n_drafted if n_drafted else None

    @property
    def drafts_known(self) -> bool:
        """Whether the tokens of a batch are known before it is verified: not in cut windows."""
        return self.rejected_token_model == "recorded" or self.gamma == 0

    @property
    def has_tokens(self) -> bool:
        """Whether the vocabulary id of every token is known before its batch is verified."""
        return self.drafts_known and bool((self.trace.token[self.rows] >= 0).all())

    @property
    def has_hidden_states(self) -> bool:
        """Whether the draft's hidden states are known."""
        return self.drafts_known and self.trace.hidden_states is not None

    def batches(self) -> Iterator[Batch]:
        """All batches in order, those of a chunk made at once."""
        n_at_once = max(_CHUNK_COUNTS // (self.trace.meta.n_layers * self.trace.meta.n_experts), 1)
        first, n_batches = 0, self.prefill.size
        lengths = np.diff(self.starts)
        while first < n_batches:
            last = min(first + n_at_once, n_batches)
            too_long = np.cumsum(lengths[first:last]) > max(_CHUNK_TOKENS, 16 * n_at_once)
            if too_long.any():  # prompts of thousands of tokens
                last = first + max(int(np.argmax(too_long)), 1)
            yield from self._chunk(first, last)
            first = last

    def _chunk(self, first: int, last: int) -> Iterator[Batch]:
        trace, n_batches = self.trace, last - first
        n_layers, n_experts = trace.meta.n_layers, trace.meta.n_experts
        rows = self.rows[self.starts[first] : self.starts[last]]
        ids = trace.ids[rows].astype(np.int32)  # [n_tokens, n_layers, k]
        ids[ids == trace.sentinel] = -1
        lengths = np.diff(self.starts[first : last + 1])
        batch_of = np.repeat(np.arange(n_batches), lengths)
        row_of = batch_of[:, None, None] * n_layers + np.arange(n_layers)[:, None]
        by_row = count_ids(ids, n_experts, rows=row_of, n_rows=n_batches * n_layers)
        counts = by_row.reshape(n_batches, n_layers, n_experts).astype(np.int32)
        tokens = trace.token[rows]
        is_known = bool((tokens >= 0).all())
        begins = self.starts[first:last] - self.starts[first]
        if not self.drafts_known:  # and never was: the rows of rejected drafts are other tokens of the text
            is_text = np.arange(rows.size) < np.repeat(begins + self.n_text[first:last], lengths)
            tokens = np.where(is_text, tokens, np.int32(-1))
        for index, (begin, length) in enumerate(zip(begins, lengths, strict=True)):
            part = slice(begin, begin + length)
            prefill = bool(self.prefill[first + index])
            yield Batch(
                ids=np.ascontiguousarray(ids[part].transpose(1, 0, 2)),
                counts=counts[index],
                n_tokens=int(length),
                tokens=tokens[part] if is_known else None,
                n_accepted=0 if prefill else int(self.n_text[first + index]) - 1,
                prefill=prefill,
                is_first=bool(self.is_first[first + index]),
                hidden_states=self._hidden_states(rows[part]) if self.drafts_known else None,
                drafts_known=self.drafts_known or prefill,
                rows=rows[part],
            )

    def _hidden_states(self, rows: NDArray[np.int64]) -> NDArray[np.float32] | None:
        """Those of a batch's first tokens: the draft does not compute the last draft before its verification."""
        hidden_states = self.trace.hidden_states
        if hidden_states is None or rows.size < 2:
            return None
        is_known = np.isfinite(hidden_states[rows[:-1]]).all(axis=1)
        n_known = is_known.size if is_known.all() else int(np.argmin(is_known))
        return hidden_states[rows[:n_known]].astype(np.float32) if n_known else None


def schedules(
    trace: Trace,
    *,
    gamma: int | None = None,
    acceptance_chance: float | None = None,
    rejected_token_models: Sequence[RejectedTokenModel] | None = None,
    seed: int = 0,
) -> list[Schedule]:
    """The schedules to replay a trace by: as it was recorded, or one for each model of rejected tokens.

    As recorded if the trace has verification steps and no argument is given. Otherwise its text is cut into windows, by
    both models unless `rejected_token_models` names them. gamma and the chance of acceptance default to the trace's
    own, else to 8 and 0.8. Without drafts (gamma 0) the models are the same: one schedule. Raises InputError where no
    experts were recorded or no window fits, ValueError for an impossible gamma or chance of acceptance.
    """
    if not trace.expert_layers():
        raise InputError(
            "The trace records no experts: there is nothing to replay.", "Look at it with moeedge lab trace info."
        )
    own = draft_stats(trace)
    if gamma is None and acceptance_chance is None and rejected_token_models is None:
        recorded = recorded_schedule(trace)
        if recorded is not None:
            return [recorded]
    if gamma is None:
        gamma = GAMMA if own is None else own.gamma
    source: AcceptanceSource = "assumed"
    chance = ACCEPTANCE_CHANCE if acceptance_chance is None else acceptance_chance
    if acceptance_chance is None and own is not None:
        chance, source = own.acceptance_chance, "measured"
    models: Sequence[RejectedTokenModel] = rejected_token_models or ("optimistic", "pessimistic")
    cut = partial(cut_schedule, trace, gamma=gamma, acceptance_chance=chance, seed=seed, acceptance_source=source)
    return [cut(rejected_token_model=model) for model in (models if gamma > 0 else models[:1])]


def recorded_schedule(trace: Trace) -> Schedule | None:
    """The batches as they were computed; None where the trace has no drafts."""
    own = draft_stats(trace)
    if own is None:
        return None
    return _schedule(trace, recorded_steps(trace), "recorded", own.gamma, own.acceptance_chance, "recorded")


def cut_schedule(
    trace: Trace,
    *,
    gamma: int,
    acceptance_chance: float = 1.0,
    rejected_token_model: RejectedTokenModel = "optimistic",
    seed: int = 0,
    acceptance_source: AcceptanceSource = "assumed",
) -> Schedule:
    """The text in windows of gamma + 1 tokens; with gamma 0 one token after the other.

    acceptance_source: where the chance is from.
    Raises ValueError for an impossible gamma or chance of acceptance, InputError where no window fits.
    """
    check_gamma(gamma)
    about = f"the chance of acceptance (--acceptance-chance) must be from 0 to 1, not {acceptance_chance:g}"
    require(0 <= acceptance_chance <= 1, about)  # NaN too
    if gamma == 0:
        return _schedule(trace, text_steps(trace), rejected_token_model, 0, None, None)
    steps = simulated_steps(
        trace,
        gamma=gamma,
        acceptance_chance=acceptance_chance,
        rng=np.random.default_rng(seed),
        rejected_token_model=rejected_token_model,
    )
    return _schedule(trace, steps, rejected_token_model, gamma, acceptance_chance, acceptance_source)


def texts_of(trace: Trace, first: int, last: int | None = None) -> Trace:
    """The texts number `first` up to but not including `last`, in order of their appearance."""
    numbers = np.unique(trace.sequence)[first:last]
    return trace.rows_of(np.isin(trace.sequence, numbers))


def _schedule(
    trace: Trace,
    steps: Steps,
    rejected_token_model: RejectedTokenModel | Literal["recorded"],
    gamma: int,
    acceptance_chance: float | None,
    acceptance_source: AcceptanceSource | None,
) -> Schedule:
    """Steps as batches, each text's prompt before its steps."""
    if not len(steps):
        raise InputError(
            f"No text of the trace is as long as a step of {gamma + 1} tokens.", "Use a smaller --gamma, or 0."
        )
    prompts = np.flatnonzero((trace.phase == Phase.PREFILL) & np.isin(trace.sequence, steps.sequence))
    prompt_texts, prompt_lengths = np.unique(trace.sequence[prompts], return_counts=True)
    owner = np.concatenate((prompt_texts, steps.sequence))
    is_prompt = np.arange(owner.size) < prompt_texts.size
    order = np.argsort(owner, kind="stable")  # by text, prompts before steps
    lengths = np.concatenate((prompt_lengths, steps.n_tokens))
    begins = np.cumsum(lengths) - lengths  # in the rows of all prompts, then of all steps
    lengths, begins = lengths[order], begins[order]
    starts = np.concatenate(([0], np.cumsum(lengths)))
    place = np.arange(int(starts[-1])) - np.repeat(starts[:-1], lengths)  # of each row in its batch
    rows = np.concatenate((prompts, steps.rows[steps.rows >= 0]))
    return Schedule(
        trace=trace,
        rejected_token_model=rejected_token_model,
        gamma=gamma,
        acceptance_chance=acceptance_chance,
        rows=rows[np.repeat(begins, lengths) + place],
        starts=starts,
        n_text=np.concatenate((prompt_lengths, steps.n_text))[order],
        prefill=is_prompt[order],
        is_first=np.r_[True, np.diff(owner[order]) != 0],
        acceptance_source=acceptance_source,
    )
