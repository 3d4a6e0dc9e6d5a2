"""Policy spac, the default: expected activations of the next verification, from history and from the draft's tokens.

The score of an expert is how many tokens of the next batch will use it, as far as that can be told: for tokens that
are known, what they activated before, in contexts alike as the draft sees them where it is a model
(scheduler/lookahead.py); for the rest, a fitted mix of decayed counts
(scheduler/history.py). What is uploaded and given up follows from the scores (scheduler/plan.py).

Utility and tau. MoE-SpAc's utilities are integers 0..K and tau counts the same steps. Here the utility is the score in
units of the marginal one, the score of the last expert that fits the slots, cut at K:

  tau = 1   everything that fits is hot: memory alone decides
  tau = j   only what is expected to be used j times as often as the last that fits

so the balancer (scheduler/balancer.py) can keep work on the CPU where the device is slow, and where it is fast it
changes nothing. A slow link limits the uploads of a plan instead, for all layers together. Where more slots exist than
experts that are used, the mean score is the unit. The workload of each tau is worked out from the scores themselves,
per layer and step, with the measured time curves (policies/workload.py); the warm-up ratios r_c and r_g of the units
are not needed here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import (
    CacheShape,
    ExecutionModel,
    ExpertPrediction,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
)
from moeedge.policies.planner import Planner
from moeedge.policies.spac.activation_ema import ActivationEMA
from moeedge.policies.spac.token_experts import NextBatchPredictor
from moeedge.policies.spac.workload import ExpectedWorkload

FloatArray = NDArray[np.float32]

# By how much a newcomer must be better, in standard deviations of a count whose mean is the marginal score
_MARGIN_KNOWN = 0.25
_MARGIN_GUESSED = 0.3  # the tokens are not known, and will not be: at least
_MARGIN_GUESSED_MOST = 3.0
# What guesses may cost: the share of the slots that changes in a step, above which the margin rises, slowly. On
# gpt-oss-20b, optimistic tail, 0.85 uploads per layer and step find 0.60 of the pairs, 0.38 (this share) find 0.57
_GUESSED_TURNOVER = 0.074
_GUESSED_LINK = 0.5  # or so much of what the link carries in a step, where that is known and more
_GUESS_PULL = 0.008  # of the margin, per step, at twice as many
_MARGIN_AHEAD = 1.0  # a second plan follows, which will know the draft: only what is clearly better
# Mix and trust change slowly: after the first steps every fourth one is enough to follow them; and so it is for tau
# where the CPU is the slower side by far
_FIT_EAGERLY, _FIT_EVERY = 24, 4


class Spac:
    """See the module."""

    name = "spac"
    execution_model = ExecutionModel()
    required_inputs: frozenset[str] = frozenset({"draft-states"})  # where there are none, the tokens alone must do

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        self._binary = config.binary
        self._used_only = config.used_only
        self.shape = shape
        self.cap = config.effective_cap
        cells = (shape.n_layers, shape.n_experts)
        n = shape.n_layers * shape.n_experts
        fitted = "no-ada-bc" not in config.ablations
        self._history = ActivationEMA(n, fitted=fitted)
        predictor_bytes = 0 if self._binary else config.predictor_bytes
        if predictor_bytes == 0:
            self.required_inputs = frozenset()
        self._ahead = NextBatchPredictor(*cells, predictor_bytes, judged=fitted)
        self._planner = Planner(shape, self.cap, evict=config.evicts)
        self._first = (np.arange(shape.n_layers) * shape.n_experts)[:, None, None]
        self._n_steps = 0
        self._n_expert_layers = int(np.count_nonzero(shape.group >= 0))
        self._n_used = 0.0  # experts per token
        self._layer_pairs = 0.0  # expected activations per layer, of the last plan
        self._used = np.zeros(cells, dtype=np.bool_)  # in the last step
        self._score: FloatArray = np.zeros(n, dtype=np.float32)
        self._utility: FloatArray = np.zeros(cells, dtype=np.float32)
        # an array, not a number: for that NumPy's minimum takes four times as long
        self._caps: FloatArray = np.full(cells, self.cap, dtype=np.float32)
        self._n_batch = float(config.gamma + 1)  # tokens of the next batch, as far as is known
        self._marginal = 1.0  # the score of the last that fits, of the last plan
        self._tau: FloatArray = np.full(shape.n_layers, config.fixed_tau or 1.0, dtype=np.float32)
        self._workload: ExpectedWorkload | None = None  # None: tau stays as it is
        if config.cost_model is not None and config.fixed_tau is None and not config.binary:
            self._workload = ExpectedWorkload(shape, self.cap, config.cost_model, config.gamma)
        self._max_uploads: int | None = None
        self._guess_margin = _MARGIN_GUESSED
        self._n_slots = float(shape.capacity.sum())
        self._n_balanced = 0  # steps
        self._n_planned = 0  # plans since the last step
        self._n_plans = 1  # plans of the last step: more than one where drafts become known

    def observe(self, observation: Observation) -> None:
        """Learns from a step; call it once per verification, decode or prefill."""
        counts = observation.counts
        if observation.n_tokens < 1:
            return
        if not observation.prefill:
            self._n_plans = self._n_planned
        self._n_planned = 0
        if self._n_used == 0.0:
            self._n_used = float(counts.sum()) / observation.n_tokens / max(self._n_expert_layers, 1)
        now = self._history.sense(counts.reshape(-1), observation.n_tokens)
        fit = False
        if not observation.prefill:
            fit = self._n_steps < _FIT_EAGERLY or self._n_steps % _FIT_EVERY == 0
            self._n_steps += 1
            self._n_batch = float(observation.n_tokens)
            if fit:
                self._ahead.judge(self._history.rate, now, observation.n_tokens)
        self._history.observe(observation.n_tokens, self._refused(observation), fit=fit)
        if observation.tokens is not None and observation.ids is not None:
            self._ahead.learn(observation.tokens, observation.ids)
        if self._binary or self._used_only:
            np.greater(counts, 0, out=self._used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """What to move; see scheduler/policy.py."""
        known = len(tokens) > 1 or (len(tokens) == 1 and self._n_batch <= 1.0)
        score = self._expected(tokens, known, prediction.hidden_states if prediction is not None else None)
        margin = 0.0 if self._binary else self._margin(known) * math.sqrt(self._marginal)
        marginal = self._planner.fit(score, resident, margin)
        unit = self._unit(marginal)
        np.divide(score, unit, out=self._utility)
        np.minimum(self._utility, self._caps, out=self._utility)
        if self._n_planned == 0:  # once per step, and the threshold of a step holds for its second plan
            self._threshold(score)
        self._n_planned += 1
        allowed = self._used if self._used_only else None
        expected = None if self._binary else score
        plan = self._planner.moves(score, self._utility, self._tau, resident, self._max_uploads, allowed, expected)
        if not known and self._n_plans == 1 and plan.victims.size:
            self._weigh_guesses(len(plan.uploads))
        return plan

    def _margin(self, known: bool) -> float:
        if known:
            return _MARGIN_KNOWN
        return _MARGIN_AHEAD if self._n_plans > 1 else self._guess_margin

    def _weigh_guesses(self, n_uploads: int) -> None:
        """Asks more of a newcomer where guesses move much: what is used by chance leaves as fast as it came."""
        allowed = max(_GUESSED_TURNOVER * self._n_slots, 1.0)
        if self._max_uploads is not None:  # a fast link would be idle otherwise
            allowed = max(allowed, _GUESSED_LINK * self._max_uploads)
        ratio = min(n_uploads / allowed, 4.0)
        margin = self._guess_margin * math.exp(_GUESS_PULL * (ratio - 1.0))
        self._guess_margin = min(max(margin, _MARGIN_GUESSED), _MARGIN_GUESSED_MOST)

    def _threshold(self, score: FloatArray) -> None:
        """tau of every layer, and how many uploads fit a step's time."""
        if self._workload is None:
            return
        self._n_balanced += 1
        if self._workload.sure and self._n_balanced % _FIT_EVERY != 0:
            return  # the solution of the step before stands
        self._tau, self._max_uploads = self._workload.solve(score, self._utility, self._layer_pairs)

    def reset(self) -> None:
        """A new conversation: the table and the long memory stay."""
        self._history.reset()

    def _refused(self, observation: Observation) -> NDArray[np.intp] | None:
        """Activations [n] of the drafts that did not become text; None where there are none, or none known."""
        first = observation.n_accepted + 1
        if observation.prefill or observation.ids is None or first >= observation.n_tokens:
            return None
        if self._n_plans > 1:  # what returns of them is known before the next verification
            return None
        ids = observation.ids[:, first:]
        cells = ids + self._first
        flat = cells.reshape(-1) if ids.min() >= 0 else cells[ids >= 0]
        return np.bincount(flat, minlength=self._score.size)

    def _expected(self, tokens: Sequence[int], known: bool, hidden_states: FloatArray | None) -> FloatArray:
        """Activations that the next batch is expected to bring, [n_layers, n_experts]."""
        score = self._score.reshape(self._utility.shape)
        if self._binary:
            np.copyto(score, self._used)
            return score
        n_batch = float(len(tokens)) if known else self._n_batch
        if known or self._n_plans == 1:
            self._ahead.expect(self._history.rate, tokens, n_batch, self._score, hidden_states)
        else:  # one token of many, and a plan that knows them all follows
            np.multiply(self._history.rate, np.float32(n_batch), out=self._score)
        self._layer_pairs = n_batch * self._n_used
        return score

    def _unit(self, marginal: list[float]) -> Any:
        """The score that has utility 1: a number for one group, else [n_layers, 1]."""
        least = max(self._layer_pairs / self.shape.n_experts, 1e-6)
        if len(marginal) == 1:
            self._marginal = max(marginal[0], least) if marginal[0] < math.inf else least
            return np.float32(self._marginal)
        units = [max(value, least) if value < math.inf else least for value in marginal]
        self._marginal = sum(units) / max(len(units), 1)
        each = np.array([*units, least], dtype=np.float32)  # the last: layers without experts, whose group is -1
        return np.asarray(each[self.shape.group][:, None])
