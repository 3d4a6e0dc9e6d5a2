"""Filters against llama.cpp's own samplers, rejection sampling against the distribution it must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from moeedge.engine.sampling import SHORT, Candidates, Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError

P_VALUE = 1e-3  # seeds are fixed, so a passing test passes always
ALL = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def llama_chain(logits: np.ndarray, config: SamplingConfig, history: Sequence[int]) -> np.ndarray:
    """The distribution of llama.cpp's sampler chain, float64 [n_vocab]."""
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    lib.llama_sampler_chain_add(
        chain, lib.llama_sampler_init_penalties(len(logits), config.repeat_last_n, config.repeat_penalty, 0.0, 0.0)
    )
    for sampler in (
        lib.llama_sampler_init_top_k(config.top_k),
        lib.llama_sampler_init_top_p(config.top_p, 0),
        lib.llama_sampler_init_min_p(config.min_p, 0),
        lib.llama_sampler_init_temp(config.temperature),
        lib.llama_sampler_init_dist(1),
    ):
        lib.llama_sampler_chain_add(chain, sampler)
    for token in history:
        lib.llama_sampler_accept(chain, token)
    data = (lib.llama_token_data * len(logits))()
    for token, logit in enumerate(logits):
        data[token].id, data[token].logit = token, float(logit)
    array = lib.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    lib.llama_sampler_apply(chain, array)
    row = np.zeros(len(logits))
    for i in range(array.size):
        row[array.data[i].id] = array.data[i].p
    lib.llama_sampler_free(chain)
    return row


def dense(candidates: Candidates, n_vocab: int) -> np.ndarray:
    """The same distribution as float64 [n_vocab]."""
    row = np.zeros(n_vocab)
    row[candidates.ids] = candidates.probabilities
    return row


def sparse(row: np.ndarray) -> Candidates:
    ids = np.flatnonzero(row)
    return Candidates(ids, row[ids])


configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000, SHORT + 1]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    repeat_penalty=st.sampled_from([1.0, 1.1, 1.8, 0.7]),
    repeat_last_n=st.sampled_from([0, 1, 3, 64]),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 50, 1500, SHORT + 500]), configs)
def test_filters_agree_with_llama_cpp(seed: int, n_vocab: int, config: SamplingConfig) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.5, 3]), n_vocab).astype(np.float32)
    history = rng.integers(0, n_vocab, rng.integers(0, 12)).tolist()
    ours = dense(Sampler(config, n_vocab).candidates(logits, history), n_vocab)
    theirs = llama_chain(logits, config, history)
    if not np.array_equal(ours > 0, theirs > 0):
        # llama.cpp sums in float32: a token at the very edge of top-p may fall on either side
        edge = min(ours[ours > 0].min(initial=1), theirs[theirs > 0].min(initial=1))
        assert abs(np.count_nonzero(ours) - np.count_nonzero(theirs)) == 1
        assert edge < 0.5
    else:
        np.testing.assert_allclose(ours, theirs, atol=2e-6)
    assert ours.sum() == pytest.approx(1)


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1, 7, 40, 300]), st.sampled_from([301, 500, 5000, 20000]))
def test_top_k_finds_the_largest(seed: int, k: int, n_vocab: int) -> None:
    # few distinct values: ties at the edge go to the lower id
    logits = np.random.default_rng(seed).integers(0, 500, n_vocab).astype(np.float32)
    config = SamplingConfig(temperature=1.0, top_k=k, top_p=1.0, min_p=0.0)
    expected = sorted(range(n_vocab), key=lambda token: (-logits[token], token))[:k]
    assert Sampler(config, n_vocab).candidates(logits, []).ids == expected


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([1.0, 0.95, 0.3]), st.sampled_from([0.0, 0.001, 0.05]))
def test_without_top_k_the_candidates_are_those_of_a_sorted_vocabulary(seed: int, top_p: float, min_p: float) -> None:
    n_vocab = 5000
    logits = np.random.default_rng(seed).normal(0, 3, n_vocab).astype(np.float32)
    config = SamplingConfig(temperature=1.0, top_k=0, top_p=top_p, min_p=min_p)
    found = Sampler(config, n_vocab).candidates(logits, [])
    order = np.argsort(-logits, kind="stable")
    p = np.exp(logits[order].astype(np.float64) - logits.max())
    n_kept = n_vocab if top_p == 1 else int(np.searchsorted(np.cumsum(p), top_p * p.sum())) + 1
    kept = order[: min(n_kept, int(np.count_nonzero(p >= min_p)))]
    assert len(found.ids) == pytest.approx(len(kept), abs=1)  # the sum for top-p has float32 terms
    n_same = min(len(found.ids), len(kept))
    if top_p < 1 or min_p > 0:
        assert found.ids[:n_same].tolist() == kept[:n_same].tolist()
    expected = p[:n_same] / p[: len(found.ids)].sum()
    np.testing.assert_allclose(np.sort(found.probabilities)[::-1][:n_same], expected, rtol=1e-9)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_the_penalty_leaves_the_logits_as_they_were(temperature: float) -> None:
    """llama.cpp's own buffer: it is read again where a step is repeated. The draft's may lack the target's last ids."""
    logits = np.random.default_rng(1).normal(0, 2, 1000).astype(np.float32)
    before = logits.copy()
    config = SamplingConfig(temperature=temperature, repeat_penalty=1.5, seed=0)
    history = [int(logits.argmax()), 3, 1000, 1063]
    found = Sampler(config, 1064).candidates(logits, history)
    np.testing.assert_array_equal(logits, before)
    in_range = Sampler(config, 1000).candidates(logits, history[:2])
    assert found.ids == in_range.ids
    np.testing.assert_array_equal(found.probabilities, in_range.probabilities)


def test_greedy_takes_the_first_of_equals_and_the_penalty_moves_it() -> None:
    logits = np.array([1.0, 3.0, 3.0, -1.0], dtype=np.float32)
    assert Sampler(SamplingConfig(temperature=0), 4).argmax(logits, [1]) == 1
    penalized = Sampler(SamplingConfig(temperature=0, repeat_penalty=2.0), 4)
    assert penalized.argmax(logits, [1]) == 2
    assert penalized.argmax(np.array([-1.0, -1.5, -3, -4], dtype=np.float32), [0]) == 1  # -1 becomes -2, not -0.5
    assert dense(penalized.candidates(logits, [1]), 4).tolist() == [0, 0, 1, 0]


@pytest.mark.parametrize("place", [0, 150, 199])
@pytest.mark.parametrize("config", [SamplingConfig(temperature=0.0), SamplingConfig(), ALL])
def test_logits_that_are_no_numbers_are_an_error(config: SamplingConfig, place: int) -> None:
    logits = np.zeros(200, dtype=np.float32)
    for value in (np.nan, np.inf):
        logits[place] = value
        with pytest.raises(EngineError, match="not a number"):
            Sampler(config, 200).candidates(logits, [])


def test_the_same_seed_draws_the_same_tokens() -> None:
    p = sparse(np.random.default_rng(0).dirichlet(np.ones(50)))
    config = SamplingConfig(temperature=1.0, seed=7)
    first, second = Sampler(config, 50), Sampler(config, 50)
    assert [first.pick(p) for _ in range(100)] == [second.pick(p) for _ in range(100)]
    fresh = Sampler(SamplingConfig(temperature=1.0), 50)
    assert [Sampler(SamplingConfig(temperature=1.0, seed=fresh.seed), 50).pick(p)] == [fresh.pick(p)]


def test_draw_follows_the_distribution_and_never_takes_the_impossible() -> None:
    p = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    sampler = Sampler(SamplingConfig(temperature=1.0, seed=1), len(p))
    candidates = Candidates(np.arange(len(p)), p)
    drawn = np.bincount([sampler.pick(candidates) for _ in range(5000)], minlength=len(p))
    assert drawn[p == 0].sum() == 0
    assert chisquare(drawn[p > 0], 5000 * p[p > 0]).pvalue > P_VALUE


@pytest.mark.parametrize(("n_draws", "tolerance"), [(4000, 0.03), pytest.param(20_000, 0.02, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", ["close", "far", "disjoint", "one-hot", "equal"])
def test_rejection_sampling_keeps_the_target_distribution(case: str, n_draws: int, tolerance: float) -> None:
    """Two drafts and the bonus token: the first two tokens that come out are distributed as the target's."""
    n_vocab = 6
    rng = np.random.default_rng(3)
    p = rng.dirichlet(np.ones(n_vocab), size=3)
    q = {
        "close": 0.8 * p[:2] + 0.2 * rng.dirichlet(np.ones(n_vocab), size=2),
        "far": rng.dirichlet(np.full(n_vocab, 0.3), size=2),
        "disjoint": np.eye(n_vocab)[[0, 1]],
        "one-hot": np.eye(n_vocab)[[2, 3]],
        "equal": p[:2],
    }[case]
    if case == "disjoint":
        p[0, 0] = p[1, 1] = 0
        p /= p.sum(axis=1, keepdims=True)
    sampler = Sampler(replace(ALL, seed=5), n_vocab)
    with np.errstate(divide="ignore"):
        logits = np.log(p).astype(np.float32)
    proposals = [sparse(row) for row in q]
    first, second, accepted = np.zeros(n_vocab), np.zeros(n_vocab), 0
    for _ in range(n_draws):
        drafts = [sampler.pick(proposal) for proposal in proposals]
        n_accepted, token = sampler.accept(logits, drafts, proposals, [])
        tokens = [*drafts[:n_accepted], token]
        first[tokens[0]] += 1
        if len(tokens) > 1:  # the rows do not depend on the tokens before, so neither may the second token
            second[tokens[1]] += 1
        accepted += n_accepted >= 1
    for observed, row in ((first, p[0]), (second, p[1])):
        if observed.sum():
            assert observed[row == 0].sum() == 0
            assert chisquare(observed[row > 0], observed.sum() * row[row > 0]).pvalue > P_VALUE
    # the acceptance rate is 1 minus the total variation distance
    assert accepted / n_draws == pytest.approx(np.minimum(p[0], q[0]).sum(), abs=tolerance)
    if case == "equal":  # up to the rounding of float32 logits
        assert accepted >= n_draws - 1


def test_each_draft_is_accepted_by_its_own_filtered_distribution() -> None:
    """A certain draft is accepted with its probability in the target, filtered with the drafts before it."""
    rng = np.random.default_rng(2)
    config = SamplingConfig(temperature=0.9, top_k=8, repeat_penalty=1.3, repeat_last_n=3, seed=11)
    for _ in range(50):
        logits = rng.normal(0, 2, (4, 40)).astype(np.float32)
        drafts = rng.integers(0, 40, 3).tolist()
        history = rng.integers(0, 40, 5).tolist()
        proposals = [Candidates.certain(token) for token in drafts]
        p = [dense(Sampler(config, 40).candidates(logits[i], history + drafts[:i]), 40) for i in range(4)]
        n_accepted, token = Sampler(config, 40).accept(logits, drafts, proposals, history)
        chances = np.random.Generator(np.random.PCG64(11)).random(3)  # the sampler's own
        rejected = [chance >= p[i][draft] for i, (chance, draft) in enumerate(zip(chances, drafts, strict=True))]
        assert n_accepted == ([*rejected, True]).index(True)
        assert p[n_accepted][token] > 0


def test_greedy_acceptance_stops_at_the_first_difference() -> None:
    logits = np.zeros((4, 5), dtype=np.float32)
    logits[range(4), [1, 2, 3, 4]] = 1
    sampler = Sampler(SamplingConfig(temperature=0), 5)
    proposals = [Candidates.certain(0)] * 3
    assert sampler.accept(logits, [1, 2, 3], proposals, [0]) == (3, 4)
    assert sampler.accept(logits, [1, 0, 3], proposals, [0]) == (1, 2)
    assert sampler.accept(logits[:1], [], [], [0]) == (0, 1)


def test_the_entire_history_counts_with_a_window_of_minus_one() -> None:
    logits = np.array([5.0, 4.0, 1.0], dtype=np.float32)
    history = [0] + [2] * 100
    assert Sampler(SamplingConfig(temperature=0, repeat_penalty=2, repeat_last_n=-1), 3).argmax(logits, history) == 1
    assert Sampler(SamplingConfig(temperature=0, repeat_penalty=2), 3).argmax(logits, history) == 0
