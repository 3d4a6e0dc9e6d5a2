"""Policy spac, the default: expected activations of the next verification, from earlier ones and the draft's tokens.

The score of an expert is the number of tokens of the next batch that are expected to use it: for known tokens, what
they activated before, in similar contexts where a draft model gives hidden states (token_experts.py); for the others, a
fitted mix of decayed counts (activation_ema.py). Uploads and victims follow from the scores (policies/planner.py).

Utility and tau. MoE-SpAc's utilities are integers 0..K, and tau counts the same steps. Here the utility is the score in
units of the marginal one, the score of the last expert that fits the slots, limited to K:

  tau = 1   everything that fits is hot: memory alone decides
  tau = j   only experts expected to be used j times as often as the last one that fits

so the balancer (balancer.py) can keep work on the CPU where the device is slow, and changes nothing where it is fast. A
slow link limits the uploads of a plan instead, for all layers together. Where there are more slots than used experts,
the mean score is the unit. The workload of each tau follows from the scores, per layer and step, with the measured time
curves; the cost model's warm-up ratios r_c and r_g are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import (
    BoolArray,
    CacheShape,
    ExpertPrediction,
    FloatArray,
    Observation,
    Plan,
    PolicyConfig,
    Resident,
)
from moeedge.policies.planner import PooledPolicy
from moeedge.policies.spac.activation_ema import ActivationEMA
from moeedge.policies.spac.balancer import ExpectedWorkload
from moeedge.policies.spac.token_experts import NextBatchPredictor

# An absent expert must score higher than its victim by so many standard deviations of a count with the marginal mean
_MARGIN_KNOWN = 0.25
_MARGIN_UNKNOWN_MIN = 0.3  # the batch's tokens are not known before verification
_MARGIN_UNKNOWN_MAX = 3.0
# Limit on what plans for unknown tokens move: the share of the slots that changes in a step, above which the margin
# rises, slowly. On gpt-oss-20b, rejected tokens modelled optimistically, 0.85 uploads per layer and step find 0.60 of
# the pairs, 0.38 (this share) find 0.57
_UNKNOWN_TURNOVER = 0.074
_UNKNOWN_LINK_SHARE = 0.5  # or this share of the link's transfers in a step, where these are known and more
_MARGIN_GAIN = 0.008  # of the margin, per step, at twice the limit
_MARGIN_FIRST_PLAN = 1.0  # a second plan follows that knows the draft: only clearly better experts move
# Mix and trust change slowly: after the first steps it is enough to fit every fourth one; likewise for tau where the
# CPU is clearly the slower side
_FIT_ALL_STEPS, _FIT_EVERY = 24, 4


class Spac(PooledPolicy):
    """Score: activations that the next batch is expected to bring."""

    name = "spac"
    required_inputs: frozenset[str] = frozenset({"draft-states"})  # without them, the tokens alone

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config, cap=config.effective_cap)
        size = self._score.shape
        n = self._score.size
        self._binary = config.binary
        fitted = "no-ada-bc" not in config.ablations
        predictor_bytes = 0 if self._binary else config.predictor_bytes
        if predictor_bytes == 0:
            self.required_inputs = frozenset()
        self._ema = ActivationEMA(n, fitted=fitted)
        self._predictor = NextBatchPredictor(shape.n_layers, shape.n_experts, predictor_bytes, fitted=fitted)
        self._layer_start = (np.arange(shape.n_layers) * shape.n_experts)[:, None, None]
        self._n_steps = 0
        self._n_expert_layers = shape.expert_layers.size
        self._n_used = 0.0  # experts per token
        self._layer_pairs = 0.0  # expected activations per layer, of the last plan
        # by the last step; under the ablations that read it
        self._last_used: BoolArray = np.zeros(size, dtype=np.bool_)
        self._used = self._last_used if config.used_only else None
        self._reads_last_used = self._binary or config.used_only
        self._flat_score = self._score.reshape(-1)
        # an array, not a number: for that NumPy's minimum takes four times as long
        self._caps: FloatArray = np.full(size, self._cap, dtype=np.float32)
        self._n_batch = float(config.gamma + 1)  # tokens expected in the next batch
        self._marginal = 1.0  # the score of the last expert that fits, of the last plan
        self._tau[:] = config.fixed_tau or 1.0
        self._workload: ExpectedWorkload | None = None  # None: tau is fixed
        if config.cost_model is not None and config.fixed_tau is None and not config.binary:
            self._workload = ExpectedWorkload(shape, config.effective_cap, config.cost_model, config.gamma)
        self._unknown_margin = _MARGIN_UNKNOWN_MIN
        self._n_slots = float(shape.capacity.sum())
        self._n_balanced = 0  # steps
        self._n_planned = 0  # plans since the last step
        self._n_plans = 1  # plans of the last step: more than one where drafts become known

    def observe(self, observation: Observation) -> None:
        """Learns from the routing of a step."""
        counts = observation.counts
        if observation.n_tokens < 1:
            return
        if not observation.prefill:
            self._n_plans = self._n_planned
        self._n_planned = 0
        if self._n_used == 0.0:
            self._n_used = float(counts.sum()) / observation.n_tokens / max(self._n_expert_layers, 1)
        now = self._ema.read(counts.reshape(-1), observation.n_tokens)
        fit = False
        if not observation.prefill:
            fit = self._n_steps < _FIT_ALL_STEPS or self._n_steps % _FIT_EVERY == 0
            self._n_steps += 1
            self._n_batch = float(observation.n_tokens)
            if fit:
                self._predictor.fit_trust(self._ema.rate, now, observation.n_tokens)
        self._ema.observe(observation.n_tokens, self._rejected(observation), fit=fit)
        if observation.tokens is not None and observation.ids is not None:
            self._predictor.learn(observation.tokens, observation.ids)
        if self._reads_last_used:
            np.greater(counts, 0, out=self._last_used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        """Plans to hold the experts with the most expected activations."""
        known = len(tokens) > 1 or (len(tokens) == 1 and self._n_batch <= 1.0)
        self._expect(tokens, known, prediction.hidden_states if prediction is not None else None)
        score = self._score
        margin = 0.0 if self._binary else self._margin(known) * math.sqrt(self._marginal)
        marginal = self._planner.fit(score, resident, margin)
        unit = self._unit(marginal)
        np.divide(score, unit, out=self._utility)
        np.minimum(self._utility, self._caps, out=self._utility)
        if self._n_planned == 0:  # once per step: the second plan has the same threshold
            self._balance()
        self._n_planned += 1
        expected = None if self._binary else score
        plan = self._planner.moves(score, self._utility, self._tau, resident, self._max_uploads, self._used, expected)
        if not known and self._n_plans == 1 and plan.victims.size:
            self._limit_turnover(len(plan.uploads))
        return plan

    def reset(self) -> None:
        """Forgets the short memory; tables and the long memory stay."""
        self._ema.reset()

    def _margin(self, known: bool) -> float:
        if known:
            return _MARGIN_KNOWN
        return _MARGIN_FIRST_PLAN if self._n_plans > 1 else self._unknown_margin

    def _limit_turnover(self, n_uploads: int) -> None:
        """Raises the margin where plans for unknown tokens move many experts: those used by chance leave again soon."""
        allowed = max(_UNKNOWN_TURNOVER * self._n_slots, 1.0)
        if self._max_uploads is not None:  # a fast link would be idle otherwise
            allowed = max(allowed, _UNKNOWN_LINK_SHARE * self._max_uploads)
        ratio = min(n_uploads / allowed, 4.0)
        margin = self._unknown_margin * math.exp(_MARGIN_GAIN * (ratio - 1.0))
        self._unknown_margin = min(max(margin, _MARGIN_UNKNOWN_MIN), _MARGIN_UNKNOWN_MAX)

    def _balance(self) -> None:
        """Updates tau of every layer and the number of uploads that fit a step's time."""
        if self._workload is None:
            return
        self._n_balanced += 1
        if self._workload.is_stable and self._n_balanced % _FIT_EVERY != 0:
            return  # keep the solution of the step before
        self._tau, self._max_uploads = self._workload.solve(self._score, self._utility, self._layer_pairs)

    def _rejected(self, observation: Observation) -> NDArray[np.intp] | None:
        """Activations [n] of the rejected drafts; None where there are none or they are unknown."""
        first = observation.n_accepted + 1
        if observation.prefill or observation.ids is None or first >= observation.n_tokens:
            return None
        if self._n_plans > 1:  # the drafts that return are known before the next verification
            return None
        ids = observation.ids[:, first:]
        flat_ids = ids + self._layer_start
        known = flat_ids.reshape(-1) if ids.min() >= 0 else flat_ids[ids >= 0]
        return np.bincount(known, minlength=self._score.size)

    def _expect(self, tokens: Sequence[int], known: bool, hidden_states: FloatArray | None) -> None:
        """Sets the scores: activations [n_layers, n_experts] expected in the next batch."""
        if self._binary:
            np.copyto(self._score, self._last_used)
            return
        n_batch = float(len(tokens)) if known else self._n_batch
        if known or self._n_plans == 1:
            self._predictor.expect(self._ema.rate, tokens, n_batch, self._flat_score, hidden_states)
        else:  # one token of many, and a plan that knows them all follows
            np.multiply(self._ema.rate, np.float32(n_batch), out=self._flat_score)
        self._layer_pairs = n_batch * self._n_used

    def _unit(self, marginal: list[float]) -> Any:
        """The score of utility 1: a number for one group, else [n_layers, 1]."""
        least = max(self._layer_pairs / self.shape.n_experts, 1e-6)
        if len(marginal) == 1:
            self._marginal = max(marginal[0], least) if marginal[0] < math.inf else least
            return np.float32(self._marginal)
        units = [max(value, least) if value < math.inf else least for value in marginal]
        self._marginal = sum(units) / max(len(units), 1)
        by_group = np.array([*units, least], dtype=np.float32)  # the last: layers without experts, whose group is -1
        return np.asarray(by_group[self.shape.group][:, None])
