"""Sampled answers with drafts, a grammar and llama.cpp's samplers against the exact distribution (chi-square).

The exact probability of each short continuation comes from stock llama.cpp's logits, its sampler chain and its grammar
sampler over the entire vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from moeedge.engine.types import SamplingConfig
from moeedge.llama.model import Model
from tests.conftest import TinyFactory
from tests.engine.test_grammar import Reference
from tests.engine.test_sampler_chain import reference
from tests.lossless.test_distribution import (
    OPENING,
    P_VALUE,
    Probabilities,
    engine,
    p_value,
    sample,
)
from tests.support.stock import StockContext

WIDE = SamplingConfig(temperature=1.0, top_k=12, top_p=1.0, min_p=0.0)
CASES = {
    "grammar": replace(WIDE, grammar='root ::= [^a-m0-9]+ "."', top_k=8),
    "typical": replace(WIDE, typical_p=0.7, samplers=("top_k", "typ_p", "temperature")),
    "penalties": replace(WIDE, frequency_penalty=1.0, presence_penalty=1.0, top_k=8),
    "grammar-chain": replace(WIDE, grammar='root ::= [^a-f0-9]+ "."', top_n_sigma=2.0, top_k=8),
}
_QUICK = (("grammar", "model"), ("typical", "ngram"))


def distribution(
    model: Model, logits: np.ndarray, config: SamplingConfig, history: Sequence[int], n: int
) -> np.ndarray:
    """Of the next token, float64 [n_vocab]; the last `n` tokens of the history are the answer so far."""
    plain = reference(model, logits, config, history)
    if not config.grammar:
        return plain
    grammar = Reference(model.vocab, config.grammar)
    for token in history[len(history) - n :]:
        grammar.accept(token)
    allowed = np.isfinite(grammar.mask(np.zeros(len(logits))))
    masked = np.where(allowed, logits, -np.inf).astype(np.float32)
    grammar.close()
    kept = plain * allowed
    return kept + (1 - kept.sum()) * reference(model, masked, config, history)


def continuations(
    model: Model,
    stock: StockContext,
    logits: np.ndarray,
    config: SamplingConfig,
    history: list[int],
    length: int,
    n: int,
) -> Probabilities:
    row = distribution(model, logits, config, history, n)
    found: Probabilities = {}
    for token in np.flatnonzero(row > 1e-9).tolist():
        if length == 1 or model.is_eog(token):
            found[(token,)] = row[token]
            continue
        position = stock.n_past
        after = stock.decode([token])[0]
        rest = continuations(model, stock, after, config, [*history, token], length - 1, n + 1)
        stock.trim(position)
        found |= {(token, *tokens): row[token] * probability for tokens, probability in rest.items()}
    return found


@pytest.mark.parametrize(
    ("name", "source"),
    [
        pytest.param(name, source, marks=() if (name, source) in _QUICK else pytest.mark.slow)
        for name in CASES
        for source in ("none", "model", "ngram")
    ],
)
def test_speculation_keeps_the_distribution(name: str, source: str, tiny: TinyFactory) -> None:
    target: Path = tiny("qwen3moe", layers=2, experts=8, used=2, logit_std=2.5)
    draft = {"none": None, "model": tiny("qwen3", layers=1, logit_std=2.5), "ngram": "ngram"}[source]
    config = CASES[name]
    with StockContext(target) as stock, Model.load(target, header_only=True) as model:
        prompt = [*OPENING, *stock.greedy(OPENING, 8)[0], *OPENING]
        stock.trim(0)
        expected = continuations(model, stock, stock.decode(prompt, every=False)[0], config, prompt, 2, 0)
    assert sum(expected.values()) == pytest.approx(1, abs=1e-4)
    drawn, drafted, accepted = sample(engine(target, draft), prompt, config, 2)
    if source != "none":
        assert 0 < accepted < drafted, "both acceptance and rejection are under test"
    assert sum(count for tokens, count in drawn.items() if tokens not in expected) == 0
    assert p_value(expected, drawn) > P_VALUE
