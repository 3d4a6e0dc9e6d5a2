"""How much an expert budget in each layer changes what a model says; budgets per layer are fitted from it.

One layer at a time keeps to its least budget, k experts, while the others have no limit. The layer's sensitivity is the
Kullback-Leibler divergence of the model's distribution over the next token from the one without a budget.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from moeedge.llama.context import Context
from moeedge.llama.model import Model
from moeedge.llama.sequence import Logits
from moeedge.native.abi import Phase
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.trace.schedule import GAMMA

MAX_TOKENS = 192  # of all texts together; each is decoded once per layer
_TEXT_TOKENS = 64  # of one text, its last ones


def measure_sensitivity(
    model: Model,
    texts: Sequence[Sequence[int]],
    *,
    gamma: int,
    n_threads: int = 0,
    cancel: Callable[[], bool] = lambda: False,
    on_layer: Callable[[int], None] = lambda _n: None,
) -> NDArray[np.float64] | None:
    """Divergence in nats per token, float64 [n_layers], 0 for layers without experts.

    texts: token ids; their last ones are read in batches of gamma + 1, MAX_TOKENS in all. cancel: asked between layers;
    True ends with None, as do texts without two tokens and models that use all experts. on_layer: called with 1 after
    each layer. Raises EngineError where memory for one more context is short.
    """
    info = model.info
    chosen = [list(text[-_TEXT_TOKENS:]) for text in texts if len(text) > 1][: MAX_TOKENS // _TEXT_TOKENS]
    if not chosen or info.n_expert_used >= info.n_experts:
        return None
    batch_tokens = (gamma or GAMMA) + 1
    divergence = np.zeros(info.n_layers, dtype=np.float64)
    with Context(model, n_ctx=2 * _TEXT_TOKENS, n_threads=n_threads, has_budget=True) as context:
        expected = list(_read(context, chosen, batch_tokens))
        for layer in info.expert_layers:
            if cancel():
                return None
            budgets = [info.n_experts] * info.n_layers
            budgets[layer] = info.n_expert_used
            context.set_budget(ExpertBudget(budget=tuple(budgets)))
            found = _read(context, chosen, batch_tokens)
            total = sum(float((np.exp(p) * (p - q)).sum()) for p, q in zip(expected, found, strict=True))
            divergence[layer] = max(total, 0.0) / sum(map(len, chosen))
            on_layer(1)
    return divergence


def _read(context: Context, texts: list[list[int]], batch_tokens: int) -> Iterator[NDArray[np.float32]]:
    """Log probabilities [n, n_vocab] of the next token after each token, batch by batch."""
    for text in texts:
        context.clear()
        for start in range(0, len(text), batch_tokens):
            batch = text[start : start + batch_tokens]
            yield _log_softmax(context.decode(batch, phase=Phase.VERIFY, logits="all"))


def _log_softmax(logits: Logits) -> NDArray[np.float32]:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True)))
