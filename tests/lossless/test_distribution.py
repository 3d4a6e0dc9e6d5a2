"""At temperature > 0 speculation changes no probability.

One test computes the distribution of the next token exactly from the sampler's own decisions. The others compare
sampled answers of the engine with the exact distribution (chi-square). The exact probability of each short continuation
comes from stock llama.cpp's logits and an independent, plain implementation of the filter chain; with a grammar or
llama.cpp's samplers from its sampler chain and grammar sampler over the entire vocabulary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chi2_contingency, chisquare

from moeedge.engine.sampling import Candidates, Sampler, Weights
from moeedge.engine.session import Session
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.llama import library
from moeedge.llama.model import Model
from moeedge.scheduler.governor import DraftChoice, DraftGovernor, StepCost
from moeedge.scheduler.stopping import DraftStop
from tests.conftest import TinyFactory
from tests.engine.test_grammar import Reference
from tests.engine.test_sampler_chain import reference
from tests.support.sessions import answered
from tests.support.stock import StockContext

N_DRAWS = 2000
SMALLEST_CLASS = 5.0  # expected draws; rarer continuations are pooled
P_VALUE = 1e-3  # seeds are fixed, so a test that passes once always passes
OPENING = np.random.default_rng(6).integers(0, 256, 6).tolist()

# name -> sampling, length of the continuations compared
SAMPLINGS = {
    "temperature-1": (SamplingConfig(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0), 2),
    "top-k": (SamplingConfig(temperature=1.5, top_k=4, top_p=1.0, min_p=0.0), 3),
    "top-p": (SamplingConfig(temperature=1.0, top_k=0, top_p=0.5, min_p=0.0), 2),
    "min-p": (SamplingConfig(temperature=1.2, top_k=40, top_p=0.95, min_p=0.2), 2),
    "penalty": (SamplingConfig(temperature=1.5, top_k=4, top_p=1, min_p=0, repeat_penalty=1.5, repeat_last_n=6), 3),
}
WIDE = SamplingConfig(temperature=1.0, top_k=12, top_p=1.0, min_p=0.0)
CONSTRAINED = {  # continuations of two tokens
    "grammar": replace(WIDE, grammar='root ::= [^a-m0-9]+ "."', top_k=8),
    "typical": replace(WIDE, typical_p=0.7, samplers=("top_k", "typ_p", "temperature")),
    "penalties": replace(WIDE, frequency_penalty=1.0, presence_penalty=1.0, top_k=8),
    "grammar-chain": replace(WIDE, grammar='root ::= [^a-f0-9]+ "."', top_n_sigma=2.0, top_k=8),
}
Probabilities = dict[tuple[int, ...], float]


@pytest.fixture(scope="module")
def target(tiny: TinyFactory) -> Path:
    return tiny("qwen3moe", layers=2, experts=8, used=2, logit_std=2.5)


@pytest.fixture(scope="module")
def draft(tiny: TinyFactory) -> Path:
    return tiny("qwen3", layers=1, logit_std=2.5)


@pytest.fixture(scope="module")
def prompt(target: Path) -> list[int]:
    """The opening, its greedy continuation and the opening again: n-gram lookup proposes what is likely."""
    library.start()
    with StockContext(target) as stock:
        return [*OPENING, *stock.answer(OPENING, 8), *OPENING]


def filtered(logits: np.ndarray, config: SamplingConfig, history: Sequence[int]) -> np.ndarray:
    """llama.cpp's chain on logits [n_vocab]: repeat penalty, top-k, top-p, min-p, temperature."""
    values = logits.astype(float)
    for token in set(history[-config.repeat_last_n :]):
        values[token] *= config.repeat_penalty if values[token] <= 0 else 1 / config.repeat_penalty
    order = sorted(range(len(values)), key=lambda token: -values[token])
    order = order[: config.top_k or len(order)]
    weights = np.exp(values[order] - values[order[0]])
    weights /= weights.sum()
    kept, total = [], 0.0
    for token, weight in zip(order, weights, strict=True):
        if total >= config.top_p or weight < config.min_p * weights[0]:
            break
        kept.append(token)
        total += weight
    result = np.zeros(len(values))
    result[kept] = np.exp((values[kept] - values[kept[0]]) / config.temperature)
    return result / result.sum()


def constrained(
    model: Model, logits: np.ndarray, config: SamplingConfig, history: Sequence[int], n_answer: int
) -> np.ndarray:
    """The same by llama.cpp's samplers; the last `n_answer` tokens of the history are the answer so far."""
    row = reference(model, logits, config, history)
    if config.grammar:
        grammar = Reference(model.vocab, config.grammar)
        for token in history[len(history) - n_answer :]:
            grammar.accept(token)
        allowed = np.isfinite(grammar.mask(np.zeros(len(logits))))
        grammar.close()
        masked = np.where(allowed, logits, -np.inf).astype(np.float32)
        row = row * allowed
        row = row + (1 - row.sum()) * reference(model, masked, config, history)
    return np.where(row > 1e-9, row, 0)


def exact(target: Path, prompt: list[int], config: SamplingConfig, length: int) -> Probabilities:
    """The probability of every continuation of the prompt with `length` tokens."""
    by_llama_cpp = config in CONSTRAINED.values()
    with StockContext(target) as stock, Model.load(target, header_only=True) as model:

        def follow(logits: np.ndarray, history: list[int], n_left: int) -> Probabilities:
            n_answer = len(history) - len(prompt)
            if by_llama_cpp:
                row = constrained(model, logits, config, history, n_answer)
            else:
                row = filtered(logits, config, history)
            found: Probabilities = {}
            for token in np.flatnonzero(row).tolist():
                if n_left == 1 or (by_llama_cpp and model.is_eog(token)):
                    found[(token,)] = row[token]
                    continue
                position = stock.n_past
                after = follow(stock.decode([token])[0], [*history, token], n_left - 1)
                stock.trim(position)
                found |= {(token, *rest): row[token] * probability for rest, probability in after.items()}
            return found

        return follow(stock.decode(prompt, every=False)[0], prompt, length)


def sample(
    options: EngineConfig,
    prompt: list[int],
    config: SamplingConfig,
    length: int,
    governor: DraftGovernor | None = None,
) -> tuple[Counter[tuple[int, ...]], int, int]:
    """N_DRAWS continuations, and how many tokens were drafted and accepted for them."""
    drawn: Counter[tuple[int, ...]] = Counter()
    drafted = accepted = 0
    with Session.open(options) as session:
        session.governor = governor
        for seed in range(N_DRAWS):
            generation = answered(session, prompt, length + 1, sampling=replace(config, seed=seed))
            drawn[tuple(generation.tokens[:length])] += 1
            drafted += generation.stats.drafted
            accepted += generation.stats.accepted
    return drawn, drafted, accepted


def p_value(expected: Probabilities, drawn: Counter[tuple[int, ...]]) -> float:
    """Of the chi-square test of the draws of each continuation, the rare ones in one common class."""
    common = [key for key, probability in expected.items() if probability * N_DRAWS >= SMALLEST_CLASS]
    observed = np.array([drawn[key] for key in common])
    wanted = np.array([expected[key] * N_DRAWS for key in common])
    rest = N_DRAWS - wanted.sum()
    if rest >= SMALLEST_CLASS:
        observed, wanted = np.append(observed, N_DRAWS - observed.sum()), np.append(wanted, rest)
    else:
        wanted = wanted * observed.sum() / wanted.sum()
    assert len(observed) > 8, "too few classes for a test"
    return float(chisquare(observed, wanted).pvalue)


def check(
    options: EngineConfig,
    prompt: list[int],
    config: SamplingConfig,
    length: int,
    governor: DraftGovernor | None = None,
) -> None:
    """Sampled answers have the exact distribution."""
    expected = exact(options.model, prompt, config, length)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    drawn, drafted, accepted = sample(options, prompt, config, length, governor)
    if options.draft is not None:
        assert 0 < accepted < drafted, "both acceptance and rejection are under test"
    assert set(drawn) <= set(expected), "a token was drawn that the filters exclude"
    assert p_value(expected, drawn) > P_VALUE


def engine(target: Path, source: Path | str | None, gamma: int = 4) -> EngineConfig:
    return EngineConfig(model=target, draft=source, gamma=gamma, n_ctx=64, n_threads=1)  # type: ignore[arg-type]


class _FixedRandom:
    """A random generator that returns one value again and again."""

    def __init__(self, value: float) -> None:
        self.value = value

    def random(self) -> float:
        return self.value


def next_token_distribution(config: SamplingConfig, logits: np.ndarray, proposal: Candidates) -> np.ndarray:
    """The exact distribution [n_vocab] of the token that follows, one draft drawn from `proposal`.

    logits: float32 [2, n_vocab]. Sums over all drafts: the acceptance probability is the length of the interval of
    random numbers that accept, found by bisection; a rejected draft adds the normalized weights that its replacement
    is drawn with.
    """
    n_vocab = logits.shape[1]
    sampler = Sampler(config, n_vocab)
    rng = sampler._rng = _FixedRandom(0.0)  # type: ignore[assignment]
    drawn_with: list[np.ndarray] = []

    def draw_index(weights: Weights) -> int:
        drawn_with.append(np.array(weights))
        return 0

    sampler._draw_index = draw_index  # type: ignore[method-assign]

    def is_accepted(draft: int, value: float) -> bool:
        rng.value = value
        drawn_with.clear()
        return sampler.accept(logits, [draft], [proposal], [])[0] == 1

    target_ids = sampler.candidates(logits[0], []).ids
    result = np.zeros(n_vocab)
    for draft, probability in zip(proposal.ids, proposal.probabilities, strict=True):
        low, high = 0.0, 1.0  # random numbers are in [0, 1)
        if is_accepted(draft, np.nextafter(1.0, 0.0)):
            low = 1.0
        elif not is_accepted(draft, 0.0):
            high = 0.0
        while high - low > 1e-12:
            middle = (low + high) / 2
            low, high = (middle, high) if is_accepted(draft, middle) else (low, middle)
        result[draft] += probability * low
        if low < 1.0:
            assert not is_accepted(draft, np.nextafter(1.0, 0.0))
            (weights,) = drawn_with or [np.ones(1)]  # a single candidate is taken without a draw
            result[target_ids] += probability * (1.0 - low) * weights / weights.sum()
    return result


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(
        [SamplingConfig(temperature=0.7, top_k=0, top_p=1.0, min_p=0.0), *(c for c, _ in SAMPLINGS.values())]
    ),
    st.sampled_from(["model", "ngram", "equal", "disjoint"]),
)
def test_accepted_and_replaced_drafts_have_the_exact_distribution(seed: int, config: SamplingConfig, kind: str) -> None:
    rng = np.random.default_rng(seed)
    n_vocab = 12
    logits = rng.normal(0, 2, (2, n_vocab)).astype(np.float32)
    target = Sampler(config, n_vocab).candidates(logits[0], [])
    absent = np.setdiff1d(np.arange(n_vocab), target.ids)
    proposal = {
        "model": Sampler(config, n_vocab).candidates(rng.normal(0, 2, n_vocab).astype(np.float32), []),
        "ngram": Candidates.certain(int(rng.integers(0, n_vocab))),
        "equal": target,
        "disjoint": Candidates.certain(int(absent[0]) if len(absent) else 0),
    }[kind]
    found = next_token_distribution(config, logits, proposal)
    np.testing.assert_allclose(found, filtered(logits[0], config, []), atol=1e-6)


# every source; then every sampling with a source of drafts that may be rejected, slowly
_QUICK = (("temperature-1", "none"), ("top-p", "ngram"), ("min-p", "model"), ("grammar", "model"), ("typical", "ngram"))
_SLOW = (
    *((name, source) for name in ("temperature-1", "top-k", "penalty") for source in ("model", "ngram")),
    *(("grammar", "none"), ("grammar", "ngram"), ("penalties", "model"), ("grammar-chain", "ngram")),
)


@pytest.mark.parametrize(
    ("name", "source"), [*_QUICK, *(pytest.param(*pair, marks=pytest.mark.slow) for pair in _SLOW)]
)
def test_speculation_keeps_the_distribution(
    name: str, source: str, target: Path, draft: Path, prompt: list[int]
) -> None:
    config, length = SAMPLINGS[name] if name in SAMPLINGS else (CONSTRAINED[name], 2)
    path = {"none": None, "model": draft, "ngram": "ngram"}[source]
    check(engine(target, path), prompt, config, length)


@pytest.mark.parametrize("kind", ["glm4moe", "step35", "eagle3", "", "dspark"])
def test_a_draft_head_keeps_the_distribution(kind: str, target: Path, tiny: TinyFactory) -> None:
    """Own heads, one or in turn; EAGLE-3; DFlash, whose places know no path."""
    source: Any = "mtp"
    if kind in ("glm4moe", "step35"):
        target = tiny(kind, layers=2, experts=8, used=2, logit_std=2.5)
    elif kind == "eagle3":
        source = tiny("eagle3", target_layers="0,1,1")
    else:
        source = tiny("dflash", target_layers="0,1", variant=kind, draft_vocab=304)
    check(engine(target, source), OPENING, *SAMPLINGS["top-k"])


def test_the_test_can_fail(target: Path, draft: Path, prompt: list[int]) -> None:
    """The draft's own answers, as if accepted without a check, are distinguished from the target's."""
    config, length = SAMPLINGS["temperature-1"]
    drawn, _, _ = sample(engine(draft, None), prompt, config, length)
    assert p_value(exact(target, prompt, config, length), drawn) < 1e-9


class _EndsEarly(DraftGovernor):
    """Drafts up to four tokens, as long as they are likely; n-grams take every other step in which they find some."""

    class _Likely(DraftStop):
        def keeps(self, confidence: float) -> bool:
            return confidence > 0.3

    def __init__(self) -> None:
        super().__init__()
        self.by_source = Counter[str]()
        self.n_left_out = 0

    def choose(self, ngram: float | None = None, n_texts: int = 1) -> DraftChoice:
        self._n_steps += 1
        self.stop = self._Likely()
        source: Any = "ngram" if ngram is not None and self._n_steps % 2 else "draft"
        self.choice = DraftChoice(gamma=4, gamma_max=4, best=4, source=source)
        self.by_source[source] += 1
        return self.choice

    def observe(self, step: StepCost) -> None:
        self.n_left_out += len(step.confidences) > step.n_drafted


def test_drafts_that_end_early_keep_the_distribution(target: Path, draft: Path, prompt: list[int]) -> None:
    """Whether a draft is kept depends on its distribution, and which source drafts on the text so far."""
    governor = _EndsEarly()
    check(engine(target, draft), prompt, *SAMPLINGS["temperature-1"], governor)
    assert governor.n_left_out > 0
    assert min(governor.by_source["draft"], governor.by_source["ngram"]) > 0


@pytest.mark.slow
def test_with_and_without_speculation(target: Path, draft: Path, prompt: list[int]) -> None:
    """The two samples themselves, tokens 2 to 4, which come from full acceptance and the bonus token, too."""
    config, length = SAMPLINGS["top-k"]
    samples = []
    for gamma in (0, 4):
        drawn, _, _ = sample(engine(target, draft, gamma), prompt, config, length + 1)
        later: Counter[tuple[int, ...]] = Counter()
        for tokens, count in drawn.items():
            later[tokens[1:]] += count
        samples.append(later)
    common = [tokens for tokens in samples[0] if samples[0][tokens] + samples[1][tokens] >= 2 * SMALLEST_CLASS]
    table = [[*(each[tokens] for tokens in common), 0] for each in samples]
    for row in table:
        row[-1] = N_DRAWS - sum(row)  # the rare ones in one class
    assert chi2_contingency(table).pvalue > P_VALUE
