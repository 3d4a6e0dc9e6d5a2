"""Distributions by llama.cpp's own samplers, in any order, where the default chain of `sampling.py` is not enough.

Each position of a verification is filtered after the tokens that lead to it, so that rejection sampling keeps the
distribution. XTC's chance is drawn here, from the answer's seed: what it leaves is a distribution like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.engine.sampling import NOT_FINITE, SHORT, Candidates, FloatRow, Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError, InputError
from moeedge.llama.samplers import NativeSampler, TokenArray, make_filter

if TYPE_CHECKING:
    from moeedge.llama.model import Model

_ALL_TOKENS = 1 << 17  # what repeat_last_n -1 means: llama.cpp's window has a size
_MIN_KEEP = 0

# llama.cpp's function and its parameters, by the name in --samplers
_FILTERS: dict[str, Callable[[SamplingConfig, int], tuple[Any, ...]]] = {
    "penalties": lambda c, n_vocab: (
        *("penalties", n_vocab, _ALL_TOKENS if c.repeat_last_n < 0 else c.repeat_last_n),
        *(c.repeat_penalty, c.frequency_penalty, c.presence_penalty),
    ),
    "dry": lambda c, _: (
        *("dry", c.dry_multiplier, c.dry_base, c.dry_allowed_length, c.dry_penalty_last_n),
        c.dry_sequence_breakers,
    ),
    "top_n_sigma": lambda c, _: ("top_n_sigma", c.top_n_sigma),
    "top_k": lambda c, _: ("top_k", c.top_k),
    "typ_p": lambda c, _: ("typical", c.typical_p, _MIN_KEEP),
    "top_p": lambda c, _: ("top_p", c.top_p, _MIN_KEEP),
    "min_p": lambda c, _: ("min_p", c.min_p, _MIN_KEEP),
    "xtc": lambda c, _: ("xtc", 1.0, c.xtc_threshold, _MIN_KEEP, 0),
    "temperature": lambda c, _: ("temp_ext", c.temperature, c.dynatemp_range, c.dynatemp_exponent),
    "infill": lambda _, __: ("infill",),
}


class Path(list[int]):
    """The last tokens of a text, to append to, with the filters that count them; `filters` are in the chain's order."""

    def __init__(self, tokens: Sequence[int], filters: list[NativeSampler], counting: list[NativeSampler]) -> None:
        super().__init__()
        self.filters = filters
        self._counting = counting
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Goes on with `token`."""
        super().append(token)
        for sampler in self._counting:
            sampler.accept(token)


class ChainSampler(Sampler):
    """Draws tokens by the filters that `config.samplers` names, in their order, after `config.logit_bias`.

    Raises InputError for a bias of a token that the model does not have.
    """

    def __init__(self, config: SamplingConfig, model: Model) -> None:
        n_vocab = model.info.n_vocab
        super().__init__(config, n_vocab)
        self.greedy = False  # temperature 0 is one of the filters, and leaves one candidate
        self._names = config.samplers
        # with tokens of probability 0 typical-p's entropy is no number, and xtc without a threshold keeps only these;
        # other filters take them, and the dynamic temperature counts them
        self._needs_possible = {"typ_p": config.typical_p < 1, "xtc": config.xtc_threshold <= 0}
        self._may_overflow = config.temperature <= config.dynatemp_range  # a temperature of 0, or next to it
        self.use(model)
        windows = {
            "penalties": _ALL_TOKENS if config.repeat_last_n < 0 else config.repeat_last_n,
            "dry": config.dry_penalty_last_n if config.dry_multiplier else 0,
        }
        self._counts = [windows.get(name, 0) > 0 for name in config.samplers]
        self._n_last = max((windows.get(name, 0) for name in config.samplers), default=0)
        self._tokens = TokenArray(n_vocab)
        bias = dict(config.logit_bias)
        if unknown := [token for token in bias if token >= n_vocab]:
            raise InputError(f"The model has no token {unknown[0]:,}.", f"--logit-bias takes 0 to {n_vocab - 1:,}.")
        if config.ignore_eos:
            bias |= dict.fromkeys(model.eog_tokens, -math.inf)
        self._bias_ids = np.fromiter(bias, np.intp)
        self._bias = np.fromiter(bias.values(), np.float32)

    def use(self, model: Model) -> None:
        self._filters = [
            make_filter(name, model.vocab, *rest)
            for name, *rest in (_FILTERS[name](self.config, self.n_vocab) for name in self.config.samplers)
        ]

    def recent(self, history: Sequence[int]) -> list[int]:
        filters = [item.clone() if counts else item for item, counts in zip(self._filters, self._counts, strict=True)]
        counting = [item for item, counts in zip(filters, self._counts, strict=True) if counts]
        return Path(history[-self._n_last :] if self._n_last else [], filters, counting)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        path = history if isinstance(history, Path) else self.recent(history)
        assert isinstance(path, Path)
        if not math.isfinite(float(logits.max())):
            raise EngineError(*NOT_FINITE)
        row = logits
        if len(self._bias):
            row = logits.copy()
            known = self._bias_ids < len(row)
            row[self._bias_ids[known]] += self._bias[known]
            if not math.isfinite(float(row.max())):
                raise EngineError("Every token is excluded.", "Change --logit-bias, or the grammar.")
        self._tokens.fill(row)
        for name, sampler in zip(self._names, path.filters, strict=True):
            if name == "xtc" and not self._takes_xtc():
                continue
            if self._needs_possible.get(name):
                self._tokens.drop_excluded()  # by a bias, a grammar, or top_n_sigma
            sampler.apply(self._tokens)
            if name == "temperature" and self._may_overflow:
                self._tokens.drop_excluded()
        ids, values = self._tokens.read()
        if len(ids) > SHORT:
            weights = np.exp(values.astype(np.float64) - float(values.max()))
            return Candidates(ids.astype(np.intp), weights / weights.sum())
        best = float(values.max())
        kept = [(token, math.exp(value - best)) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]
        total = math.fsum(weight for _, weight in kept)
        return Candidates([t for t, w in kept if w > 0], [w / total for _, w in kept if w > 0])

    def _takes_xtc(self) -> bool:
        return self.config.xtc_probability > 0 and self._rng.random() <= self.config.xtc_probability
