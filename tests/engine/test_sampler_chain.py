"""Filters against llama.cpp's own samplers at every position, and drafts against the distribution they must keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import llama_cpp.llama_cpp as lib
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from scipy.stats import chi2, chisquare

from moeedge.engine.grammar import ChainSampler, new_sampler
from moeedge.engine.sampling import SHORT, Candidates, Sampler
from moeedge.engine.types import DEFAULT_SAMPLERS, SAMPLERS, SamplingConfig
from moeedge.errors import EngineError, InputError
from moeedge.lab.widen.random_model import N_VOCAB
from moeedge.llama.model import Model

P_VALUE = 1e-3  # seeds are fixed, so a passing test passes always
ORDERS = [DEFAULT_SAMPLERS, DEFAULT_SAMPLERS[::-1], ("top_k", "temperature"), ("temperature", "min_p"), ("infill",), ()]
PLAIN = ("penalties", "top_k", "top_p", "min_p", "temperature")
ALL = SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0)


def reference(model: Model | None, logits: np.ndarray, config: SamplingConfig, history: Sequence[int]) -> np.ndarray:
    """The distribution of a llama_sampler_chain as llama.cpp's programs build it, float64 [n_vocab]."""
    n, breakers = len(logits), [text.encode() for text in config.dry_sequence_breakers]
    c = config
    made = {
        "penalties": lambda: lib.llama_sampler_init_penalties(
            n, c.repeat_last_n, c.repeat_penalty, c.frequency_penalty, c.presence_penalty
        ),
        "dry": lambda: lib.llama_sampler_init_dry(
            *(model.vocab, c.dry_multiplier, c.dry_base, c.dry_allowed_length, c.dry_penalty_last_n),
            *((lib.ctypes.c_char_p * len(breakers))(*breakers), len(breakers)),
        ),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(c.top_n_sigma),
        "top_k": lambda: lib.llama_sampler_init_top_k(c.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(c.typical_p, 0),
        "top_p": lambda: lib.llama_sampler_init_top_p(c.top_p, 0),
        "min_p": lambda: lib.llama_sampler_init_min_p(c.min_p, 0),
        "xtc": lambda: lib.llama_sampler_init_xtc(c.xtc_probability, c.xtc_threshold, 0, 1),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(c.temperature, c.dynatemp_range, c.dynatemp_exponent),
        "infill": lambda: lib.llama_sampler_init_infill(model.vocab),
    }
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    biases = [(token, bias) for token, bias in c.logit_bias]
    if c.ignore_eos:
        biases += [(token, -np.inf) for token in range(n) if lib.llama_vocab_is_eog(model.vocab, token)]
    array: Any = (lib.llama_logit_bias * len(biases))(*biases)
    if biases:
        lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_logit_bias(n, len(biases), array))
    for name in c.samplers:
        lib.llama_sampler_chain_add(chain, made[name]())
    lib.llama_sampler_chain_add(chain, lib.llama_sampler_init_dist(1))
    for token in history:
        lib.llama_sampler_accept(chain, token)
    data = (lib.llama_token_data * n)()
    for token, logit in enumerate(logits):
        data[token].id, data[token].logit = token, float(logit)
    tokens = lib.llama_token_data_array(data=data, size=n, selected=-1, sorted=False)
    lib.llama_sampler_apply(chain, tokens)
    row = np.zeros(n)
    for i in range(tokens.size):
        row[tokens.data[i].id] = tokens.data[i].p
    lib.llama_sampler_free(chain)
    return row


def dense(candidates: Candidates, n_vocab: int = N_VOCAB) -> np.ndarray:
    """The same distribution as float64 [n_vocab]."""
    row = np.zeros(n_vocab)
    row[candidates.ids] = candidates.probabilities
    return row


configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.0, 0.5, 1.3]),
    top_k=st.sampled_from([0, 5, 40]),
    top_p=st.sampled_from([0.5, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.05]),
    repeat_penalty=st.sampled_from([1.0, 1.3]),
    repeat_last_n=st.sampled_from([0, 3, 64]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.4]),
    typical_p=st.sampled_from([1.0, 0.4]),
    top_n_sigma=st.sampled_from([-1.0, 1.5]),
    xtc_probability=st.sampled_from([0.0, 1.0]),
    dry_multiplier=st.sampled_from([0.0, 0.8]),
    dry_penalty_last_n=st.sampled_from([8, 64]),
    dynatemp_range=st.sampled_from([0.0, 0.4]),
    samplers=st.sampled_from(ORDERS),
    logit_bias=st.sampled_from([(), ((65, 4.0), (66, -1e30))]),
    ignore_eos=st.booleans(),
)


# filters that are off leave excluded tokens to the dynamic temperature, which counts them
EXCLUDED_COUNT = SamplingConfig(
    temperature=0.5, top_k=0, top_p=1.0, min_p=0.0, top_n_sigma=1.5, dynatemp_range=0.4, samplers=ORDERS[0]
)


@example(0, EXCLUDED_COUNT)
@example(0, replace(EXCLUDED_COUNT, xtc_probability=1.0))
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32 - 1), configs)
def test_candidates_are_those_of_llama_cpps_chain(model: Model, seed: int, config: SamplingConfig) -> None:
    excludes = config.ignore_eos or config.logit_bias or config.top_n_sigma > 0
    assume(config.typical_p == 1 or not excludes)  # llama.cpp computes 0 log 0
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, N_VOCAB).astype(np.float32)
    history = rng.integers(60, 64, rng.integers(0, 20)).tolist()  # with repetitions, for dry
    before = logits.copy()
    found = dense(ChainSampler(config, model).candidates(logits, history))
    np.testing.assert_allclose(found, reference(model, logits, config, history), atol=2e-5)
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize(
    "changes",
    [
        *({"typical_p": 0.5}, {"xtc_probability": 1.0, "xtc_threshold": 0.0}),
        {"top_n_sigma": 1.0, "typical_p": 0.5, "samplers": ("top_n_sigma", "typ_p")},
        {"temperature": 0.0, "xtc_probability": 1.0, "samplers": ("temperature", "xtc", "typ_p")},
    ],
    ids=str,
)
def test_excluded_tokens_are_none_of_the_candidates(model: Model, changes: dict[str, Any]) -> None:
    """With them llama.cpp's filters compute 0 log 0, and may keep nothing else."""
    logits = np.random.default_rng(3).normal(0, 3, N_VOCAB).astype(np.float32)
    allowed = [7, 70, 170]
    excluding = np.full_like(logits, -np.inf)
    excluding[allowed] = logits[allowed]
    found = dense(ChainSampler(SamplingConfig(**changes), model).candidates(excluding, []))
    assert set(np.flatnonzero(found)) <= set(allowed)
    assert found.sum() == pytest.approx(1)


def test_what_no_token_can_be_drawn_from(model: Model) -> None:
    config = SamplingConfig(logit_bias=tuple((token, -np.inf) for token in range(N_VOCAB)))
    with pytest.raises(EngineError):
        ChainSampler(config, model).candidates(np.zeros(N_VOCAB, dtype=np.float32), [])
    with pytest.raises(EngineError):
        ChainSampler(SamplingConfig(typical_p=0.5), model).candidates(np.full(N_VOCAB, np.nan, dtype=np.float32), [])
    with pytest.raises(InputError):  # a token that is not there
        new_sampler(SamplingConfig(logit_bias=((N_VOCAB, 1.0),)), model)


def test_a_temperature_next_to_0_leaves_the_best(model: Model) -> None:
    """The entropy of certain logits is nearly 0; divided by such a temperature they are not finite."""
    logits = np.zeros(N_VOCAB, dtype=np.float32)
    logits[5] = 85.0
    config = SamplingConfig(
        temperature=0.5, dynatemp_range=0.5, dynatemp_exponent=1.15, samplers=("temperature", "min_p")
    )
    assert ChainSampler(config, model).candidates(logits, []) == Candidates([5], [1.0])


@pytest.mark.parametrize(
    "changes",
    [{"typical_p": 0.9}, {"xtc_probability": 0.5}, {"frequency_penalty": 1.5}, {"dry_multiplier": 2.0}],
    ids=str,
)
def test_drafts_keep_the_distribution_of_a_chain(model: Model, changes: dict[str, Any]) -> None:
    """The second token of a verification, after an accepted or a rejected draft, against plain draws of two tokens."""
    rng = np.random.default_rng(5)
    rows = np.full((3, N_VOCAB), -np.inf, dtype=np.float32)
    rows[:, 65:69] = rng.normal(0, 1.0, (3, 4))
    config = SamplingConfig(temperature=1.0, top_p=1.0, min_p=0.0, seed=1, **changes)
    sampler = new_sampler(config, model)
    history, n_draws = [65, 66, 65, 66, 65], 4000

    def counts(n_drafts: int) -> np.ndarray:
        pairs = np.zeros((4, 4))
        for _ in range(n_draws):
            if n_drafts:
                path = sampler.recent(history)
                q = sampler.candidates(rows[2], path)  # a draft model with logits of its own
                draft = sampler.pick(q)
                n_accepted, token = sampler.accept(rows[:2], [draft], [q], history)
                first, second = (draft, token) if n_accepted else (token, -1)
            else:
                _, first = sampler.accept(rows[:1], [], [], history)
                second = -1
            if second < 0:
                _, second = sampler.accept(rows[1:2], [], [], [*history, first])
            pairs[first - 65, second - 65] += 1
        return pairs

    with_drafts, plain = counts(1).ravel(), counts(0).ravel()
    seen = with_drafts + plain > 10
    both = np.stack([with_drafts[seen], plain[seen]])
    expected = both.sum(axis=0) / 2
    statistic = float(((both - expected) ** 2 / expected).sum())
    assert chi2.sf(statistic, int(seen.sum()) - 1) > P_VALUE and seen.sum() > 6


def test_the_smallest_sampler_that_has_all_filters(model: Model) -> None:
    assert type(new_sampler(SamplingConfig(temperature=0.3, repeat_penalty=1.2), model)) is Sampler
    assert type(new_sampler(SamplingConfig(samplers=("top_k", "temperature")), model)) is ChainSampler
    assert not SamplingConfig(xtc_threshold=0.3, dry_base=2.0).needs_chain
    cold = SamplingConfig(temperature=0)
    assert not cold.is_random and replace(cold, dynatemp_range=0.5).is_random  # which is around the temperature
    for token in (-1, model.info.n_vocab):
        with pytest.raises(InputError, match="no token"):
            new_sampler(replace(cold, logit_bias=((token, 1.0),)), model)


def test_values_that_come_from_json_are_the_same() -> None:
    config = SamplingConfig(samplers=("top_k",), logit_bias=((3, 1.5),), stop=("a",))
    as_lists = {"samplers": ["top_k"], "logit_bias": [[3, 1.5]], "stop": ["a"]}
    assert SamplingConfig(**as_lists) == config  # type: ignore[arg-type]
    assert set(DEFAULT_SAMPLERS) < set(SAMPLERS)
    for wrong in ({"samplers": ("mirostat",)}, {"typical_p": 0}, {"stop": ("",)}, {"presence_penalty": float("nan")}):
        with pytest.raises(ValueError):
            replace(config, **wrong)  # type: ignore[arg-type]


def sparse(row: np.ndarray) -> Candidates:
    ids = np.flatnonzero(row)
    return Candidates(ids, row[ids])


plain_configs = st.builds(
    SamplingConfig,
    temperature=st.sampled_from([0.3, 0.8, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 2, 5, 40, 1000, SHORT + 1]),
    top_p=st.sampled_from([0.1, 0.5, 0.9, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.1, 0.5]),
    repeat_penalty=st.sampled_from([1.0, 1.1, 1.8, 0.7]),
    repeat_last_n=st.sampled_from([0, 1, 3, 64]),
)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3, 50, 1500, SHORT + 500]), plain_configs)
def test_filters_agree_with_llama_cpp(seed: int, n_vocab: int, config: SamplingConfig) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.5, 3]), n_vocab).astype(np.float32)
    history = rng.integers(0, n_vocab, rng.integers(0, 12)).tolist()
    ours = dense(Sampler(config, n_vocab).candidates(logits, history), n_vocab)
    theirs = reference(None, logits, replace(config, samplers=PLAIN), history)
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
    # a window of -1: the entire history counts
    logits, history = np.array([5.0, 4.0, 1.0], dtype=np.float32), [0] + [2] * 100
    for last_n, best in ((-1, 1), (64, 0)):
        config = SamplingConfig(temperature=0, repeat_penalty=2, repeat_last_n=last_n)
        assert Sampler(config, 3).argmax(logits, history) == best


@pytest.mark.parametrize("place", [0, 150, 199])
@pytest.mark.parametrize("config", [SamplingConfig(temperature=0.0), SamplingConfig(), ALL])
def test_logits_that_are_no_numbers_are_an_error(config: SamplingConfig, place: int) -> None:
    logits = np.zeros(200, dtype=np.float32)
    for value in (np.nan, np.inf):
        logits[place] = value
        with pytest.raises(EngineError, match="not a number"):
            Sampler(config, 200).candidates(logits, [])


def test_draws_follow_the_distribution_and_repeat_with_the_seed() -> None:
    p = sparse(np.random.default_rng(0).dirichlet(np.ones(50)))
    config = SamplingConfig(temperature=1.0, seed=7)
    first, second = Sampler(config, 50), Sampler(config, 50)
    assert [first.pick(p) for _ in range(100)] == [second.pick(p) for _ in range(100)]
    fresh = Sampler(SamplingConfig(temperature=1.0), 50)
    assert [Sampler(SamplingConfig(temperature=1.0, seed=fresh.seed), 50).pick(p)] == [fresh.pick(p)]
    row = np.array([0.0, 0.5, 0.0, 0.3, 0.2, 0.0])
    sampler, candidates = Sampler(replace(ALL, seed=1), len(row)), Candidates(np.arange(len(row)), row)
    drawn = np.bincount([sampler.pick(candidates) for _ in range(5000)], minlength=len(row))
    assert drawn[row == 0].sum() == 0, "the impossible is never taken"
    assert chisquare(drawn[row > 0], 5000 * row[row > 0]).pvalue > P_VALUE


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
    penalized = Sampler(SamplingConfig(temperature=0, repeat_penalty=4.0), 5)
    assert penalized.accept(logits[[0, 0]] + 0.5, [1, 1], proposals, [0]) == (1, 2), "the draft before it counts"


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
