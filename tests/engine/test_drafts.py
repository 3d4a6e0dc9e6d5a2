"""What the draft sources propose, scripted ones too, and that the draft model's KV cache follows the accepted text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moeedge.engine.drafts import ConfidenceModel, DraftRequest, DraftSource, ModelDraft, NgramDraft, Proposal, Script
from moeedge.engine.sampling import Sampler
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.native.abi import Phase
from moeedge.scheduler.stopping import DraftStop
from tests.support.sessions import answered

GREEDY = Sampler(SamplingConfig(temperature=0), 304)
HISTORY = [65, 66, 67, 68]


def proposal(source: DraftSource, history: list[int], gamma: int, **options: Any) -> Proposal:
    return source.propose(DraftRequest(history, gamma, options.pop("sampler", GREEDY), **options))


def proposed(source: DraftSource, history: list[int], gamma: int, **options: Any) -> list[int]:
    return proposal(source, history, gamma, **options).tokens


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
    source = NgramDraft()
    source.propose(DraftRequest([1, 2, 3, 1], 2, GREEDY))
    source.begin(history)  # another prompt is forgotten
    assert proposed(source, history, 3) == expected
    assert proposed(DraftSource(), history, 3) == []  # no draft


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
        assert proposed(source, history[:n], gamma) == slow_lookup(history[:n], gamma)


@pytest.fixture
def model_draft(tiny_draft: Path) -> Iterator[ModelDraft]:
    with Model.load(tiny_draft) as model, Context(model, n_ctx=256, n_threads=1) as context:
        yield ModelDraft(context, n_vocab=model.info.n_vocab, is_eog=model.is_eog)


def check_equals_fresh(draft: ModelDraft, history: list[int]) -> None:
    """The proposals equal those of a draft with an empty KV cache."""
    found = proposed(draft, history, 4)
    draft.context.clear()
    assert found == proposed(draft, history, 4)


def test_model_draft_is_greedy_decoding_of_the_draft(model_draft: ModelDraft) -> None:
    model_draft.begin(HISTORY)
    assert model_draft.sequence.tokens == HISTORY[:-1]
    found = proposal(model_draft, HISTORY, 5)
    assert model_draft.sequence.tokens == [*HISTORY, *found.tokens[:-1]]  # nothing follows from the last one yet
    assert all(c.probability_of(t) == 1 for c, t in zip(found.candidates, found.tokens, strict=True))
    again = [*HISTORY, *found.tokens]
    model_draft.context.clear()
    for i in range(len(HISTORY), len(again)):
        assert proposed(model_draft, again[:i], 1) == [again[i]]


@pytest.mark.parametrize("n_accepted", [0, 1, 3, 4])
def test_model_draft_after_a_verification(model_draft: ModelDraft, n_accepted: int) -> None:
    model_draft.begin(HISTORY)
    tokens = proposed(model_draft, HISTORY, 4)
    model_draft.rollback(len(HISTORY) + n_accepted)
    accepted = [*HISTORY, *tokens[:n_accepted]]
    assert model_draft.sequence.tokens == accepted[: len(HISTORY) + min(n_accepted, 3)]
    check_equals_fresh(model_draft, [*accepted, 99])  # the target's own token follows, whatever it is


def test_states_come_with_the_same_drafts(model_draft: ModelDraft) -> None:
    """With hidden states the draft proposes the same, whatever it has to catch up on; each token's state is its own."""
    context = model_draft.context
    plain, stated = [], []
    for proposals, keeps in ((plain, False), (stated, True)):
        context.clear()
        tokens = list(HISTORY)
        model_draft.begin(tokens)
        for n_missing in (0, 1, 2, 9):  # of what the draft's cache should hold
            proposals.append(proposal(model_draft, tokens, 3, keep_hidden_states=keeps))
            tokens += [*proposals[-1].tokens, 70 + n_missing]
            context.trim(max(len(tokens) - 1 - n_missing, 0))
    assert [found.tokens for found in stated] == [found.tokens for found in plain]
    assert all(found.hidden_states is None for found in plain)
    context.clear()
    decoded = []
    for token in [*HISTORY, *stated[0].tokens[:-1]]:
        context.decode([token], phase=Phase.DRAFT, logits="states")
        decoded.append(context.last_hidden_state().copy())
    np.testing.assert_allclose(stated[0].hidden_states, np.stack(decoded[len(HISTORY) - 1 :]), atol=0.02)
    assert np.abs(np.diff(stated[0].hidden_states, axis=0)).max() > 0.1


def test_model_draft_samples_from_the_filtered_distribution(model_draft: ModelDraft) -> None:
    sampler = Sampler(SamplingConfig(temperature=1.0, top_k=5, seed=3), 304)
    found = proposal(model_draft, HISTORY[:3], 6, sampler=sampler)
    assert len(found.tokens) == len(found.candidates) == 6
    for token, candidates in zip(found.tokens, found.candidates, strict=True):
        assert len(candidates.ids) <= 5
        assert candidates.probability_of(token) > 0
        assert sum(candidates.probabilities) == pytest.approx(1)


def test_drafts_stay_within_the_common_vocabulary_and_end_at_a_stop_token(model_draft: ModelDraft) -> None:
    context = model_draft.context
    sampler = Sampler(SamplingConfig(temperature=2.0, seed=0), 304)
    narrow = ModelDraft(context, n_vocab=50, is_eog=model_draft.is_eog)
    assert max(proposed(narrow, HISTORY[:2], 20, sampler=sampler)) < 50
    context.clear()
    free = proposed(model_draft, HISTORY[:2], 6)
    context.clear()
    stopping = ModelDraft(context, n_vocab=304, is_eog=lambda token: token == free[2])
    assert proposed(stopping, HISTORY[:2], 6) == free[: free.index(free[2]) + 1]


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
@pytest.mark.parametrize("keeps", [False, True])
def test_a_model_draft_that_is_stopped(model_draft: ModelDraft, n_kept: int, n_computed: int, keeps: bool) -> None:
    """The drafts are the first of those without a stop, and the KV cache follows the accepted text as before."""
    free = proposed(model_draft, HISTORY, 6)
    model_draft.context.clear()
    stop = Only(n_kept, n_computed)
    found = proposal(model_draft, HISTORY, 6, keep_hidden_states=keeps, stop=stop)
    assert found.tokens == free[:n_kept]
    assert len(found.candidates) == n_kept
    assert found.confidences == stop.confidences
    assert len(stop.confidences) == n_computed
    assert all(0 < confidence <= 1 for confidence in stop.confidences)
    assert (found.hidden_states is not None) == (keeps and n_kept > 0)
    following = [*HISTORY, *found.tokens, 99]
    model_draft.rollback(len(following) - 1)
    check_equals_fresh(model_draft, following)


def test_ngrams_are_as_sure_as_their_match_is_long() -> None:
    source, text = NgramDraft(), [1, 2, 3, 4, 9, 1, 2, 3]
    assert proposal(source, text, 3).confidences == [0.75] * 3
    assert proposal(source, [*text, 7, 4], 2).confidences == [0.25] * 2
    stopped = proposal(NgramDraft(), text, 3, stop=Only(1, 2))
    assert stopped.tokens == [4]
    assert stopped.confidences == [0.75] * 2


def test_confidence_is_the_share_of_the_most_likely_token() -> None:
    """Of a large vocabulary close to it where few are likely, never below, one pass wherever the likely ones are."""
    logits = np.random.default_rng(0).normal(0, 3, 500).astype(np.float32)
    share = np.exp(logits - logits.max())
    assert GREEDY.confidence(logits, []) == pytest.approx(1 / share.sum(), rel=1e-5)
    rng = np.random.default_rng(1)
    for n_likely in (1, 2, 5):
        logits = rng.normal(0, 1, 151_937).astype(np.float32)
        logits[rng.choice(len(logits), n_likely, replace=False)] = 20.0
        share = 1 / float(np.exp(logits.astype(float) - 20.0).sum())
        assert share <= GREEDY.confidence(logits, []) * (1 + 1e-6)
        assert GREEDY.confidence(logits, []) == pytest.approx(1 / n_likely, rel=0.01)


@pytest.mark.parametrize("confidences", ["calibrated", "constant"])
@pytest.mark.parametrize("acceptance", [0.0, 0.5, 0.8, 1.0])
def test_a_script_accepts_at_its_rate(acceptance: float, confidences: ConfidenceModel, tiny_moe: Path) -> None:
    with Model.load(tiny_moe) as model:
        script = Script.draw(model, 20_000, acceptance, confidences, 1)
        other = Script.draw(model, 20_000, 0.3, confidences, 1)
        assert not set(script.text.tolist()) & set(model.eog_tokens)
    accepted = script.text == script.drafts
    assert accepted.mean() == pytest.approx(acceptance, abs=0.015)
    assert np.array_equal(script.text, other.text)
    if confidences == "calibrated" and 0 < acceptance < 1:  # confidence is the chance
        sure = script.confidences > 0.8
        assert accepted[sure].mean() == pytest.approx(script.confidences[sure].mean(), abs=0.02)
        assert accepted[~sure].mean() == pytest.approx(script.confidences[~sure].mean(), abs=0.02)
    else:
        assert set(script.confidences.tolist()) == {acceptance}


@pytest.mark.parametrize("draft", ["model", "ngram"])
@pytest.mark.parametrize("gamma", [1, 4, "auto"])
@pytest.mark.parametrize("mode", ["stock", "moeedge"])
def test_answers_follow_the_script(mode: Any, gamma: Any, draft: Any, tiny_moe: Path, tiny_draft: Path) -> None:
    source, auto = tiny_draft if draft == "model" else draft, gamma == "auto"
    lengths = {"gamma": 16 if auto else gamma, "auto_gamma": auto}
    config = EngineConfig(model=tiny_moe, draft=source, n_ctx=512, n_threads=1, device="none", mode=mode, **lengths)
    with Session.open(config) as session:
        script = Script.draw(session.model, 400, 0.7, "calibrated", 3)
        session.follow(script)
        generation = session.generate(script.text[:10].tolist(), n_predict=120, sampling=GREEDY.config, ignore_eos=True)
        position, n_drafted = 10, 0
        for record in generation:
            if record.n_verified:
                accepted = script.text == script.drafts
                n = next((i for i in range(record.n_drafted) if not accepted[position + i]), record.n_drafted)
                assert record.n_accepted == n
            position += len(record.tokens)
            n_drafted += record.n_drafted
        assert generation.tokens == script.text[10 : 10 + 120].tolist()
        assert n_drafted > 0
        session.follow(None)
        own = answered(session, script.text[:10].tolist(), 8, ignore_eos=False)
        assert own.tokens != script.text[10:18].tolist()


def test_a_draft_model_decodes_one_token_for_each_draft(tiny_moe: Path, tiny_draft: Path) -> None:
    """Accepted drafts stay in its KV cache, as those of a trained draft do."""
    config = EngineConfig(model=tiny_moe, draft=tiny_draft, gamma=4, n_ctx=512, device="none", mode="stock")
    with Session.open(config) as session:
        context, counts = session.draft_context, list[int]()
        decode = context.decode_parts

        def counted(parts, **how):  # type: ignore[no-untyped-def]
            counts.append(sum(len(part.tokens) for part in parts))
            return decode(parts, **how)

        context.decode_parts = counted  # type: ignore[method-assign]
        script = Script.draw(session.model, 400, 1.0, "constant", 3)
        session.follow(script)
        answered(session, script.text[:10].tolist(), 41)
        # after the prompt, 8 steps of 4 drafts; each begins with what the draft lacks: the last draft and our token
        assert counts[1:] == [1, 1, 1, 1] + [2, 1, 1, 1] * 7
