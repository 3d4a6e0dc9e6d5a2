"""Perplexity of a fixed text that is decoded in batches as large as a verification, so that an expert budget acts.

Every token is predicted from a KV cache that such batches wrote. An answer differs: its prompt is decoded exactly, and
its batches end with drafts that may be rejected, which compete for the shortlist, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moeedge.data.prompts import EvaluationText
from moeedge.errors import InputError
from moeedge.llama.context import Context
from moeedge.native.abi import Phase
from moeedge.records import derived, figure
from moeedge.run import Run

_WINDOW_TOKENS = 512  # as llama.cpp's perplexity program by default


@dataclass(frozen=True, kw_only=True)
class Perplexity:
    """How well a model predicts a text; `exp(nll)` is the perplexity."""

    text: str = figure("Name of the text", key="perplexity_text")
    text_sha256: str = figure("SHA-256 of the text, hexadecimal", key="perplexity_text_sha256")
    n_tokens: int = figure("Tokens predicted", key="perplexity_tokens")
    batch_tokens: int = figure("Tokens per batch, a verification of gamma + 1", key="perplexity_batch")
    window_tokens: int  # after so many tokens the KV cache is emptied
    nll: float  # mean negative log-likelihood of a token, in nats
    nll_stderr: float  # standard error of that mean

    @derived("Perplexity of a text", key="perplexity")
    def value(self) -> float:
        return math.exp(self.nll)

    @derived("Its standard error", key="perplexity_stderr")
    def stderr(self) -> float:
        """Its standard error, by the derivative of exp."""
        return self.value * self.nll_stderr


def measure_perplexity(
    context: Context, text: EvaluationText, *, batch_tokens: int, run: Run | None = None
) -> Perplexity | None:
    """Decodes `text` in batches of `batch_tokens`, as the context's expert budget has them; None if cancelled.

    Overwrites the KV cache, which is empty afterwards. Raises InputError for a text of fewer than two tokens.
    """
    tokens, window = context.model.tokenize(text.text), min(_WINDOW_TOKENS, context.n_ctx)
    losses: list[NDArray[np.float64]] = []
    try:
        for start in range(0, len(tokens), window):
            part = tokens[start : start + window]
            context.clear()
            for first in range(0, len(part) - 1, batch_tokens):
                if run is not None and run.cancelled():
                    return None
                batch = part[first : min(first + batch_tokens, len(part) - 1)]
                phase = Phase.VERIFY if len(batch) > 1 else Phase.DECODE
                logits = context.decode(batch, phase=phase, logits="all")
                losses.append(negative_log_likelihood(logits, part[first + 1 : first + 1 + len(batch)]))
    finally:
        context.clear()
    if not losses:
        raise InputError(f"The text {text.name} has {len(tokens)} token(s).", "Name a longer text.")
    nll = np.concatenate(losses)
    return Perplexity(
        text=text.name,
        text_sha256=text.sha256,
        n_tokens=nll.size,
        batch_tokens=batch_tokens,
        window_tokens=window,
        nll=float(nll.mean()),
        nll_stderr=float(nll.std(ddof=1) / math.sqrt(nll.size)) if nll.size > 1 else 0.0,
    )


def negative_log_likelihood(logits: NDArray[np.float32], targets: Sequence[int]) -> NDArray[np.float64]:
    """Returns -log softmax(logits)[target] of each row, in nats: float64 [n] of logits [n, n_vocab]."""
    rows = logits.astype(np.float64)
    highest = rows.max(axis=1)
    total = np.log(np.exp(rows - highest[:, None]).sum(axis=1)) + highest
    return np.asarray(total - rows[np.arange(len(rows)), list(targets)])
