"""What the draft sources propose, and that the draft model's KV cache follows the accepted text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine.drafts import DraftRequest, DraftSource, ModelDraft, NgramDraft
from moeedge.engine.sampling import Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.scheduler.stopping import DraftStop

GREEDY = Sampler(SamplingConfig(temperature=0), 304)


def ngram(history: list[int], gamma: int = 3) -> list[int]:
    source = NgramDraft()
    source.begin(history)
    return source.propose(DraftRequest(history, gamma, GREEDY)).tokens


def test_no_draft_proposes_nothing() -> None:
    assert DraftSource().propose(DraftRequest([1, 2, 1, 2], 4, GREEDY)).tokens == []


@pytest.mark.parametrize(
    ("history", "expected"),
    [
        ([1, 2, 3, 4, 9, 1, 2, 3], [4, 9, 1]),  # three tokens match
        ([7, 5, 8, 5], [8, 5, 8]),  # one matches; the copy goes on in itself
        ([1, 2, 3, 1, 2, 4, 1, 2], [4, 1, 2]),  # the latest occurrence
        ([5, 1, 2, 3, 4, 6, 2, 3, 4, 7, 1, 2, 3, 4], [6, 2, 3]),  # four tokens beat a later match of three
        ([1, 2, 3], []),
        ([1], []),
        ([4, 4], [4, 4, 4]),
    ],
)
def test_ngram_lookup(history: list[int], expected: list[int]) -> None:
    assert ngram(history) == expected


def slow_lookup(history: list[int], gamma: int) -> list[int]:
    """The same by trying every place, latest first."""
    for n in range(min(4, len(history)), 0, -1):
        for end in range(len(history) - 1, n - 1, -1):
            if history[end - n : end] == history[-n:]:
                tokens = list(history)
                for i in range(gamma):
                    tokens.append(tokens[end + i])
                return tokens[len(history) :]
    return []


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 8), st.integers(1, 5))
def test_growing_index_equals_a_search(history: list[int], gamma: int, step: int) -> None:
    source = NgramDraft()
    source.begin(history)
    for n in range(1, len(history) + 1, step):
        assert source.propose(DraftRequest(history[:n], gamma, GREEDY)).tokens == slow_lookup(history[:n], gamma)


def test_ngram_forgets_another_prompt() -> None:
    source = NgramDraft()
    source.propose(DraftRequest([1, 2, 3, 1], 2, GREEDY))
    source.begin([9, 1])
    assert source.propose(DraftRequest([9, 1], 2, GREEDY)).tokens == []


@pytest.fixture
def model_draft(tiny_draft: Path) -> Iterator[ModelDraft]:
    with Model.load(tiny_draft) as model, Context(model, n_ctx=256, n_threads=1) as context:
        yield ModelDraft(context, n_vocab=model.info.n_vocab, is_eog=model.is_eog)


def test_model_draft_is_greedy_decoding_of_the_draft(model_draft: ModelDraft) -> None:
    history = [65, 66, 67, 68]
    model_draft.begin(history)
    assert model_draft.sequence.tokens == history[:-1]
    proposal = model_draft.propose(DraftRequest(history, 5, GREEDY))
    assert model_draft.sequence.tokens == [*history, *proposal.tokens[:-1]]  # nothing follows from the last one yet
    assert all(c.probability_of(t) == 1 for c, t in zip(proposal.candidates, proposal.tokens, strict=True))

    again = [*history, *proposal.tokens]
    model_draft.context.clear()
    for i in range(len(history), len(again)):
        assert model_draft.propose(DraftRequest(again[:i], 1, GREEDY)).tokens == [again[i]]


@pytest.mark.parametrize("n_accepted", [0, 1, 3, 4])
def test_model_draft_after_a_verification(model_draft: ModelDraft, n_accepted: int) -> None:
    history = [65, 66, 67, 68]
    model_draft.begin(history)
    proposal = model_draft.propose(DraftRequest(history, 4, GREEDY))
    model_draft.rollback(len(history) + n_accepted)
    accepted = [*history, *proposal.tokens[:n_accepted]]
    assert model_draft.sequence.tokens == accepted[: len(history) + min(n_accepted, 3)]

    # the target's own token follows, whatever it is: the proposals then equal those of a fresh draft
    following = [*accepted, 99]
    proposed = model_draft.propose(DraftRequest(following, 4, GREEDY)).tokens
    model_draft.context.clear()
    assert proposed == model_draft.propose(DraftRequest(following, 4, GREEDY)).tokens


def test_states_come_with_the_same_drafts(model_draft: ModelDraft) -> None:
    """With hidden states the draft proposes the same, whatever it has to catch up on; each token's state is its own."""
    context = model_draft.context
    history = [65, 66, 67, 68]
    plain, stated = [], []
    for proposals, keeps in ((plain, False), (stated, True)):
        context.clear()
        tokens = list(history)
        model_draft.begin(tokens)
        for n_missing in (0, 1, 2, 9):  # of what the draft's cache should hold
            proposal = model_draft.propose(DraftRequest(tokens, 3, GREEDY, keep_hidden_states=keeps))
            proposals.append(proposal)
            tokens += proposal.tokens
            tokens += [70 + n_missing]
            context.trim(max(len(tokens) - 1 - n_missing, 0))
    assert [proposal.tokens for proposal in stated] == [proposal.tokens for proposal in plain]
    assert all(proposal.hidden_states is None for proposal in plain)
    context.clear()
    batch = [*history, *stated[0].tokens[:-1]]
    decoded = []
    for token in batch:
        context.decode([token], phase=Phase.DRAFT, logits="states")
        decoded.append(context.last_hidden_state().copy())
    assert stated[0].hidden_states is not None
    np.testing.assert_allclose(stated[0].hidden_states, np.stack(decoded[len(history) - 1 :]), atol=0.02)
    assert np.abs(np.diff(stated[0].hidden_states, axis=0)).max() > 0.1


def test_model_draft_samples_from_the_filtered_distribution(model_draft: ModelDraft) -> None:
    sampler = Sampler(SamplingConfig(temperature=1.0, top_k=5, seed=3), 304)
    proposal = model_draft.propose(DraftRequest([65, 66, 67], 6, sampler))
    assert len(proposal.tokens) == len(proposal.candidates) == 6
    for token, candidates in zip(proposal.tokens, proposal.candidates, strict=True):
        assert len(candidates.ids) <= 5
        assert candidates.probability_of(token) > 0
        assert sum(candidates.probabilities) == pytest.approx(1)


def test_draft_ids_stay_within_the_common_vocabulary(tiny_draft: Path) -> None:
    with Model.load(tiny_draft) as model, Context(model, n_ctx=256, n_threads=1) as context:
        narrow = ModelDraft(context, n_vocab=50, is_eog=model.is_eog)
        tokens = narrow.propose(
            DraftRequest([65, 66], 20, Sampler(SamplingConfig(temperature=2.0, seed=0), 304))
        ).tokens
        assert np.max(tokens) < 50


def test_drafting_ends_at_a_stop_token(tiny_draft: Path) -> None:
    with Model.load(tiny_draft) as model, Context(model, n_ctx=256, n_threads=1) as context:
        free = ModelDraft(context, n_vocab=304, is_eog=model.is_eog).propose(DraftRequest([65, 66], 6, GREEDY)).tokens
        context.clear()
        stopping = ModelDraft(context, n_vocab=304, is_eog=lambda token: token == free[2])
        assert stopping.propose(DraftRequest([65, 66], 6, GREEDY)).tokens == free[: free.index(free[2]) + 1]


class Only(DraftStop):
    """Keeps so many drafts, and computes `n_computed` of them."""

    def __init__(self, n_kept: int, n_computed: int) -> None:
        super().__init__()
        self.n_kept, self.n_computed = n_kept, n_computed
        self.confidences: list[float] = []

    def keeps(self, confidence: float) -> bool:
        self.confidences.append(confidence)
        return len(self.confidences) <= self.n_kept

    def goes_on(self) -> bool:
        return len(self.confidences) < self.n_computed


@pytest.mark.parametrize(("n_kept", "n_computed"), [(0, 1), (2, 2), (2, 3), (6, 6)])
@pytest.mark.parametrize("keeps_states", [False, True])
def test_a_model_draft_that_is_stopped(
    model_draft: ModelDraft, n_kept: int, n_computed: int, keeps_states: bool
) -> None:
    """The drafts are the first of those without a stop, and the KV cache follows the accepted text as before."""
    history = [65, 66, 67, 68]
    free = model_draft.propose(DraftRequest(history, 6, GREEDY))
    model_draft.context.clear()
    stop = Only(n_kept, n_computed)
    proposal = model_draft.propose(DraftRequest(history, 6, GREEDY, keep_hidden_states=keeps_states, stop=stop))
    assert proposal.tokens == free.tokens[:n_kept]
    assert len(proposal.candidates) == n_kept
    assert proposal.confidences == stop.confidences
    assert len(stop.confidences) == n_computed
    assert all(0 < confidence <= 1 for confidence in stop.confidences)
    assert (proposal.hidden_states is not None) == (keeps_states and n_kept > 0)
    following = [*history, *proposal.tokens, 99]
    model_draft.rollback(len(following) - 1)
    proposed = model_draft.propose(DraftRequest(following, 4, GREEDY)).tokens
    model_draft.context.clear()
    assert proposed == model_draft.propose(DraftRequest(following, 4, GREEDY)).tokens


def test_ngrams_are_as_sure_as_their_match_is_long() -> None:
    source = NgramDraft()
    assert source.propose(DraftRequest([1, 2, 3, 4, 9, 1, 2, 3], 3, GREEDY)).confidences == [0.75] * 3
    assert source.propose(DraftRequest([1, 2, 3, 4, 9, 1, 2, 3, 7, 4], 2, GREEDY)).confidences == [0.25] * 2
    stopped = NgramDraft().propose(DraftRequest([1, 2, 3, 4, 9, 1, 2, 3], 3, GREEDY, stop=Only(1, 2)))
    assert stopped.tokens == [4]
    assert stopped.confidences == [0.75] * 2


def test_confidence_is_the_share_of_the_most_likely_token() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 3, 500).astype(np.float32)
    share = np.exp(logits - logits.max())
    assert GREEDY.confidence(logits, []) == pytest.approx(1 / share.sum(), rel=1e-5)


def test_confidence_of_a_large_vocabulary() -> None:
    """Close to the share where few tokens are likely, never below it, and one pass wherever the likely ones are."""
    rng = np.random.default_rng(1)
    for n_likely in (1, 2, 5):
        logits = rng.normal(0, 1, 151_937).astype(np.float32)
        logits[rng.choice(len(logits), n_likely, replace=False)] = 20.0
        share = 1 / float(np.exp(logits.astype(float) - 20.0).sum())
        assert share <= GREEDY.confidence(logits, []) * (1 + 1e-6)
        assert GREEDY.confidence(logits, []) == pytest.approx(1 / n_likely, rel=0.01)
