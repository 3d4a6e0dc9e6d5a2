"""Answers that follow a grammar, exact under speculation.

As in llama.cpp a token is drawn without the grammar and drawn again, from what the grammar allows, where it is
refused. With C the distribution of the filters, V the probability of C's allowed tokens, and M the distribution of the
filters over allowed tokens only, a token's probability is C(x) [x allowed] + (1 - V) M(x). M needs a look at the entire
vocabulary; it is computed only where a refused token's turn has come. Drafts are verified against this distribution,
each after its own path of tokens. Greedy: the largest logit that is allowed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from moeedge.engine.sampling import NOT_FINITE, SHORT, Candidates, FloatRow, Sampler
from moeedge.engine.types import SamplingConfig
from moeedge.errors import EngineError, InputError
from moeedge.llama.samplers import Grammar, NativeSampler, TokenArray, TokenIds, make_filter

if TYPE_CHECKING:
    from moeedge.llama.model import Model


_ALL_TOKENS = 1 << 17  # of repeat_last_n -1: llama.cpp's window has a size
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
        super().append(token)
        for sampler in self._counting:
            sampler.accept(token)


class ChainSampler(Sampler):
    """Draws by the filters of `config.samplers`, after its logit_bias. Raises InputError for an unknown token."""

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
        if unknown := [token for token in bias if not 0 <= token < n_vocab]:
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

    def recent(self, history: Sequence[int]) -> Path:
        filters = [item.clone() if counts else item for item, counts in zip(self._filters, self._counts, strict=True)]
        counting = [item for item, counts in zip(filters, self._counts, strict=True) if counts]
        return Path(history[-self._n_last :] if self._n_last else [], filters, counting)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        path = history if isinstance(history, Path) else self.recent(history)
        if not math.isfinite(float(logits.max())):
            raise EngineError(*NOT_FINITE)
        row = logits
        if len(self._bias):
            row = logits.copy()
            in_row = self._bias_ids < len(row)
            row[self._bias_ids[in_row]] += self._bias[in_row]
            if not math.isfinite(float(row.max())):
                raise EngineError("Every token is excluded.", "Change --logit-bias, or the grammar.")
        self._tokens.fill(row)
        for name, sampler in zip(self._names, path.filters, strict=True):
            chance = self.config.xtc_probability
            if name == "xtc" and not (chance > 0 and self._rng.random() <= chance):
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
        pairs = [(token, math.exp(value - best)) for token, value in zip(ids.tolist(), values.tolist(), strict=True)]
        total = math.fsum(weight for _, weight in pairs)
        return Candidates([t for t, w in pairs if w > 0], [w / total for _, w in pairs if w > 0])


_N_LIKELY, _N_POSSIBLE = 64, 1024  # tokens checked before the entire vocabulary, which takes 10 ms with 151,936
_NONE = Candidates([], [])


class GrammarPath(list[int]):
    """A draft's tokens. `seen`: as the filters take them. grammar: None while reasoning and after a refused token."""

    def __init__(self, seen: list[int], grammar: Grammar | None, check: TokenArray) -> None:
        super().__init__()
        self.seen = seen
        self.grammar = grammar
        self._check = check

    def append(self, token: int) -> None:
        self.seen.append(token)
        if self.grammar is not None:
            if self.grammar.allowed(self._check, [token])[0]:
                self.grammar.accept(token)
            else:
                self.grammar = None


class GrammarSampler(Sampler):
    """Draws the tokens of one answer, which follows `config.grammar` after the text `after` that ends reasoning.

    begun: its first tokens. Raises InputError for a wrong grammar, or one that the begun tokens do not follow.
    """

    def __init__(self, config: SamplingConfig, model: Model, begun: Sequence[int] = (), after: str = "") -> None:
        super().__init__(config, model.info.n_vocab)
        self._plain = ChainSampler(config, model) if config.needs_chain else Sampler(config, model.info.n_vocab)
        self._plain._rng = self._rng  # one stream of random numbers
        self.greedy = self._plain.greedy
        self._tokens = TokenArray(model.info.n_vocab)
        self._after = after.encode()
        self._taken: list[int] = []
        self.use(model)
        for token in begun:
            if not self._allows(token):
                raise InputError("The answer so far does not follow the grammar.", "Use /set grammar off to go on.")
            self._take(token)

    @property
    def state(self) -> dict[str, Any]:
        """The position in the stream of random numbers and in the grammar; may be set to go back to it."""
        return {"random": dict(self._rng.bit_generator.state), "n_taken": len(self._taken)}

    @state.setter
    def state(self, state: dict[str, Any]) -> None:
        self._rng.bit_generator.state = state["random"]
        if state["n_taken"] != len(self._taken):
            self._begin(self._taken[: state["n_taken"]])

    def use(self, model: Model) -> None:
        self._model = model
        self._plain.use(model)
        self._start = Grammar.parse(self.config.grammar, model.vocab)
        self._begin(self._taken)

    def _begin(self, taken: Sequence[int]) -> None:
        """Sets the tokens of the answer, which the grammar allows."""
        self._grammar, self._taken = self._start.clone(), []
        self._waits, self._tail = bool(self._after), b""
        for token in taken:
            self._take(token)

    def recent(self, history: Sequence[int]) -> GrammarPath:
        grammar = None if self._waits else self._grammar.clone()
        return GrammarPath(self._plain.recent(history), grammar, self._tokens)

    def candidates(self, logits: FloatRow, history: Sequence[int]) -> Candidates:
        """Of a draft, without the tokens that are refused; none where all likely ones are: the draft ends there."""
        path = history if isinstance(history, GrammarPath) else self.recent(history)
        if path.grammar is None:
            return self._plain.candidates(logits, path.seen)
        if self.greedy:
            token = self._likely_argmax(logits, path.seen, path.grammar, _N_LIKELY)
            return _NONE if token is None else Candidates.certain(token)
        likely = self._plain.candidates(logits, path.seen)
        allowed = path.grammar.allowed(self._tokens, likely.ids)
        if allowed.all():
            return likely
        return _mixed([(likely, 1.0, allowed)], 1.0 / _sum(likely, allowed)) if allowed.any() else _NONE

    def _verified(self, history: Sequence[int]) -> list[int]:
        return self._plain.recent(history)

    def _verify(self, logits: FloatRow, seen: list[int], token: int, draft: Candidates) -> int | None:
        if self.greedy:
            best = self._allowed_argmax(logits, seen)
            return None if best == token else best
        target = self._plain.candidates(logits, seen)
        allowed = self._allowed(target.ids)
        least = self._rng.random() * draft.probability_of(token)
        if not allowed.all():
            places = np.flatnonzero((np.asarray(target.ids) == token) & allowed)
            if least < float(np.asarray(target.probabilities)[places].sum()):
                return None
            again = self._allowed_candidates(logits, seen)
            target = _mixed([(target, 1.0, allowed), (again, 1.0 - _sum(target, allowed), None)])
        if least < target.probability_of(token):
            return None
        residual = self._residual(target, draft)
        return self.pick(target if residual is None else target._replace(probabilities=residual))

    def _draw(self, logits: FloatRow, seen: list[int]) -> int:
        if self.greedy:
            return self._allowed_argmax(logits, seen)
        token = self.pick(self._plain.candidates(logits, seen))
        if self._allows(token):
            return token
        return self.pick(self._allowed_candidates(logits, seen))

    def _allowed_argmax(self, logits: FloatRow, seen: list[int]) -> int:
        """The token of the largest logit that is allowed, the lowest id among equals."""
        if self._waits:
            return self.argmax(logits, seen)
        token = self._likely_argmax(logits, seen, self._grammar, _N_LIKELY, _N_POSSIBLE)
        return self.argmax(self._allowed_logits(logits), seen) if token is None else token

    def _likely_argmax(self, logits: FloatRow, seen: Sequence[int], grammar: Grammar, *n_checked: int) -> int | None:
        """As `_allowed_argmax`, of the most likely tokens, first of few, then of more; None if all are refused."""
        token = self.argmax(logits, seen)
        if grammar.allowed(self._tokens, [token])[0]:
            return token
        for n in n_checked:
            ids = self.largest(n, logits, seen)
            allowed = grammar.allowed(self._tokens, ids)
            if allowed.any():
                return int(ids[int(allowed.argmax())])
        return None

    def _allowed_candidates(self, logits: FloatRow, seen: list[int]) -> Candidates:
        """M: what the filters leave of the allowed tokens."""
        likely = self._likely_logits(logits, seen)
        row = self._allowed_logits(logits) if likely is None else likely
        if self.config.ignore_eos:
            allowed = np.flatnonzero(row > -np.inf)
            if np.isin(allowed, self._model.eog_tokens).all():  # the grammar is complete
                return Candidates.certain(int(allowed[0]))
        left = self._plain.candidates(row, seen)
        is_allowed = row[np.asarray(left.ids)] > -np.inf
        if is_allowed.all():
            return left
        if not is_allowed.any():  # infill puts the end of the answer in the place of what is unlikely
            raise EngineError("The samplers leave no token that the grammar allows.", "Change --samplers.")
        return _mixed([(left, 1.0, is_allowed)], 1.0 / _sum(left, is_allowed))

    def _likely_logits(self, logits: FloatRow, seen: list[int]) -> FloatRow | None:
        """The logits of the most likely allowed tokens, others -inf, where top-k drops the others anyway."""
        if self.config.needs_chain or self.config.top_k == 0:
            return None
        ids = self.largest(_N_POSSIBLE, logits, seen)
        ids = ids[self._grammar.allowed(self._tokens, ids)]
        if len(ids) < self.config.top_k:
            return None
        row = np.full_like(logits, -np.inf)
        row[ids] = logits[ids]
        return row

    def _allowed_logits(self, logits: FloatRow) -> FloatRow:
        """A copy of `logits` with -inf for tokens that the grammar refuses. Raises EngineError if it refuses all."""
        allowed = self._grammar.allowed(self._tokens, np.arange(len(logits), dtype=np.int32))
        if not allowed.any():
            raise EngineError("The grammar allows no token of the model at this place.", "Change the grammar.")
        return np.where(allowed, logits, np.float32(-np.inf))

    def _allowed(self, ids: TokenIds) -> NDArray[np.bool_]:
        return np.ones(len(ids), dtype=np.bool_) if self._waits else self._grammar.allowed(self._tokens, ids)

    def _allows(self, token: int) -> bool:
        return self._waits or bool(self._grammar.allowed(self._tokens, [token])[0])

    def _take(self, token: int) -> None:
        """Goes on with `token` of the answer. What follows the end of reasoning in the same token is not checked."""
        self._taken.append(token)
        if not self._waits:
            self._grammar.accept(token)
            return
        self._tail += self._model.piece(token, special=True)
        self._waits = self._after not in self._tail
        self._tail = self._tail[-len(self._after) :]


def new_sampler(config: SamplingConfig, model: Model, begun: Sequence[int] = (), after: str = "") -> Sampler:
    """The sampler of one answer. begun, after: as of GrammarSampler. Raises InputError for a wrong grammar."""
    if config.grammar:
        return GrammarSampler(config, model, begun, after)
    return ChainSampler(config, model) if config.needs_chain else Sampler(config, model.info.n_vocab)


def _sum(candidates: Candidates, allowed: NDArray[np.bool_]) -> float:
    return float(np.asarray(candidates.probabilities)[allowed].sum())


def _mixed(parts: Sequence[tuple[Candidates, float, NDArray[np.bool_] | None]], scale: float = 1.0) -> Candidates:
    """The sum of distributions with their weights, of the tokens that a mask keeps."""
    total: dict[int, float] = {}
    for candidates, weight, mask in parts:
        keep = np.ones(len(candidates.ids), dtype=np.bool_) if mask is None else mask
        ids, probabilities = np.asarray(candidates.ids)[keep], np.asarray(candidates.probabilities)[keep]
        for token, p in zip(ids.tolist(), probabilities.tolist(), strict=True):
            total[token] = total.get(token, 0.0) + weight * scale * p
    return Candidates(list(total), list(total.values()))
