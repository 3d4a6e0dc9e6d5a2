"""Policy spac, the default: decayed counts over the time that an expert stays, and the draft's tokens where that pays.

The score of an expert is the number of activations that it is expected to bring per step while it stays on the device:
a fitted mix of decayed counts (ActivationEMA). How long experts stay is the number of slots over the experts that
arrive per step. A slow link moves few experts, which stay long, so that the score tells what is used in the long run; a
fast link makes it follow the next step. The link's speed need not be known.

For the next batch the draft's tokens are known before verification. Their earlier activations, in similar contexts
where a draft model gives hidden states (token_experts.py), replace the counts' prediction of that batch, as far as it
proved right, and as far as the next batch matters for the time that an expert stays. Whether these predictions bring
more activations to the device than the counts alone is measured as the model runs (LookaheadJudge); where they do
not, they are neither made nor learned.

MoE-SpAc's utilities are integers 0..K, and tau counts the same steps. Here the utility is the score in units of the
marginal one, the score of the last expert that fits the slots (with more slots than used experts, the mean score),
limited to K. At tau = 1 everything that fits is hot; at tau = j only experts expected to be used j times as often as
the last one that fits. So the balancer (utility.py) can keep work on the CPU where the device is slow, and changes
nothing where it is fast; a slow link limits the uploads of a plan, for all layers together. The workload of each tau
follows from the scores, per layer and step, with the measured time curves; the ratios r_c and r_g are not used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.experts import BoolArray, FloatArray, Resident, count_ids
from moeedge.policies.base import CacheShape, ExpertPrediction, LookaheadStatus, Observation, Plan, PolicyConfig
from moeedge.policies.planner import PooledPolicy
from moeedge.policies.token_experts import NextBatchPredictor
from moeedge.policies.utility import ExpectedWorkload

_LAST, _REJECTED, _SHORT, _LONG, _OTHER_TEXTS = range(5)  # rows of the averages
# Of the three decayed averages, per step: memories of about 3, 20 and 200 steps. Chosen on texts 0 to 152 of the
# gpt-oss-20b trace, where one average more or less, or other memories, change the hit rate by less than 0.003
_KEPT = (0.7, 0.95, 0.995)
_N = 5
_INITIAL_MIX = np.array([0.25, 0.0, 0.25, 0.25, 0.25])
_FORGET = 0.98  # per step: the fit remembers about 50 steps
_RIDGE = 0.01  # of the mean square of an average
_FITTED_MAX = 2048  # experts that the regression reads: every second, third, ... one of more
_SOLVE_ALL_STEPS, _SOLVE_EVERY = 24, 4  # the mix changes slowly after the first steps
_IDENTITY = np.eye(_N)


class ActivationEMA:
    """Activations that an expert brings while it stays on the device, predicted from decayed counts.

    An uploaded expert stays for many steps where few experts move, for one or two where many do. So the prediction is a
    discounted mean over the steps to come; the caller sets `discount` after the turnover of the slots (0: the next
    step):

        rate = (1 - discount) * sum over j >= 0 of discount^j * (activations per token of step t + 1 + j)

    Five averages are kept per expert, in activations per token: of the last step, of the drafts that it rejected, and
    three exponentially decayed ones, which remember a passage, a text, and other texts. Their best mix differs from
    text to text and with the discount, so it is fitted while the model runs: ridge regression of what came on the
    averages before it, with old steps forgotten, a pull towards a fixed mix and no negative weights. A trace of
    discounted past averages pairs each step with all averages that should have predicted it (as in TD(1); Sutton,
    1988). Arrays are flat over layers and experts, n = n_layers * n_experts, float32.

    No product of arrays uses BLAS, here and in token_experts.py: it would spread those of 9,216 elements and more over
    threads and wait for cores that the model is computing on, 50 microseconds for a sum of 5.

    Predicts `rate` [n]. Call `read`, then `observe`, for every step. fitted: False keeps the initial mix.
    """

    def __init__(self, n: int, *, fitted: bool = True) -> None:
        self._fitted = fitted
        self.discount = 0.0  # 0 to below 1
        self.rate: FloatArray = np.zeros(n, dtype=np.float32)
        self.now: FloatArray = np.zeros(n, dtype=np.float32)  # activations per token of the step read last
        self._averages: FloatArray = np.zeros((_N, n), dtype=np.float32)
        self._change: FloatArray = np.zeros(n, dtype=np.float32)
        self._filled = [0.0] * len(_KEPT)  # total weight of the steps in each decayed average: 1 after many
        self._every = -(-n // _FITTED_MAX)
        # of the fitted experts: the averages, and their discounted sum over the steps so far
        self._sample: FloatArray = np.zeros((_N, len(range(0, n, self._every))), dtype=np.float32)
        self._trace: FloatArray = np.zeros(self._sample.shape, dtype=np.float32)
        self._trace_weight = 0.0
        self._gram = np.zeros((_N, _N))  # products of the averages with each other, and with what came
        self._products = np.zeros(_N)
        self._n_steps = 0
        self.mix = _INITIAL_MIX.copy()

    def reset(self) -> None:
        """Forgets the passage, which says little about a new text; keeps the longer memories and the mix."""
        self._filled[0] = 0.0

    def read(self, counts: NDArray[Any], n_tokens: int) -> FloatArray:
        """Reads the activations [n] of a step of `n_tokens` tokens into `now`."""
        np.copyto(self.now, counts, casting="unsafe")
        self.now *= np.float32(1.0 / n_tokens)
        return self.now

    def observe(
        self, n_tokens: int, rejected: NDArray[Any] | None = None, *, fit: bool = True, weight: float = 1.0
    ) -> None:
        """Takes in the step in `now`, with its weight in the decayed averages.

        rejected: activations [n] of its rejected drafts. fit: False for a step that is not to be predicted (a prefill).
        """
        now, averages, change = self.now, self._averages, self._change
        if fit and self._fitted and self._filled[-1] > 0.0:
            self._fit(weight)
        averages[_LAST] = now
        if rejected is None:
            averages[_REJECTED] = 0.0
        else:
            np.multiply(rejected, np.float32(1.0 / n_tokens), out=averages[_REJECTED], casting="unsafe")
        for index, decay in enumerate(_KEPT):
            self._filled[index] = decay * self._filled[index] + (1.0 - decay) * weight
            average = averages[_SHORT + index]
            np.subtract(now, average, out=change)
            change *= np.float32((1.0 - decay) * weight / self._filled[index])  # the first step counts in full
            average += change
        rate = self.rate
        rate.fill(0.0)
        for average, share in zip(averages, self.mix.tolist(), strict=True):
            if share > 0.0:
                np.multiply(average, np.float32(share), out=change)
                rate += change

    def _fit(self, weight: float) -> None:
        """One step of the regression: the mix of the averages that would have predicted the step in `now`."""
        sample, trace = self._sample, self._trace
        np.copyto(sample, self._averages[:, :: self._every])
        discount = self.discount
        trace *= np.float32(discount)
        self._trace_weight = discount * self._trace_weight + 1.0
        trace += sample
        self._gram *= _FORGET
        self._gram += weight * np.einsum("ij,kj->ik", sample, sample)
        self._products *= _FORGET
        self._products += weight / self._trace_weight * np.einsum("ij,j->i", trace, self.now[:: self._every])
        self._n_steps += 1
        if self._n_steps > _SOLVE_ALL_STEPS and self._n_steps % _SOLVE_EVERY != 0:
            return
        pull = _RIDGE * float(self._gram.trace()) / _N + 1e-12
        left = self._gram + pull * _IDENTITY
        right = self._products + pull * _INITIAL_MIX
        mix = np.linalg.solve(left, right)
        if mix.min() < 0.0:  # drop the negative weights and solve for the others
            rows = np.flatnonzero(mix > 0.0)
            mix[:] = 0.0
            mix[rows] = np.maximum(np.linalg.solve(left[rows][:, rows], right[rows]), 0.0)
        self.mix = mix


_GAIN_MIN = 0.01  # of the activations that the best experts by decayed counts alone would have brought
_JUDGE_EVERY = 4  # steps
_N_JUDGED_MIN = 12  # before the first decision: the memories are empty at first
_JUDGEMENT_KEPT = 0.95  # of the sums, per judged step: about 20 judged steps
_PAUSE_STEPS, _PAUSE_STEPS_MAX = 256, 4096  # without predictions, doubled each time that they do not pay


class LookaheadJudge:
    """Compares two rankings of the experts after each judged step; `on` says whether to use the predictions.

    Both choose as many experts as there are slots. The activations that the step brought to either choice tell the gain
    with a perfectly fast link. Where it stays below 1 %, the predictions rest for a while.
    """

    def __init__(self, n_slots: int) -> None:
        self._n_slots = n_slots
        self.on = True
        self._hits = self._hits_without = 0.0
        self._n_judged = self._n_steps = self._n_paused = 0
        self._pause_steps = _PAUSE_STEPS

    @property
    def wants_judgement(self) -> bool:
        """Whether the step that comes is judged, if there are predictions for it."""
        return self.on and self._n_steps % _JUDGE_EVERY == 0

    @property
    def status(self) -> LookaheadStatus:
        """The decision, and the gain measured so far."""
        gain = self._gain if self._n_judged else None
        if not self.on:
            return LookaheadStatus(used=False, gain=gain, reason="it does not pay here", reads_drafts=False)
        return LookaheadStatus(used=self._n_judged > 0, gain=gain, reason="" if self._n_judged else "not judged yet")

    @property
    def _gain(self) -> float:
        return self._hits / max(self._hits_without, 1e-9) - 1.0

    def end_step(self) -> None:
        """A verification ended."""
        self._n_steps += 1
        self._n_paused += not self.on
        if not self.on and self._n_paused >= self._pause_steps:
            self._pause_steps = min(2 * self._pause_steps, _PAUSE_STEPS_MAX)
            self.on, self._n_judged = True, 0
            self._hits = self._hits_without = 0.0

    def judge(self, score: FloatArray, score_without: FloatArray, now: FloatArray) -> None:
        """Adds a step with the activations `now` [n]: the scores [n] with and without predictions."""
        if not 0 < self._n_slots < now.size:
            return
        at = now.size - self._n_slots
        self._hits = _JUDGEMENT_KEPT * self._hits + float(now[np.argpartition(score, at)[at:]].sum())
        self._hits_without = _JUDGEMENT_KEPT * self._hits_without + float(
            now[np.argpartition(score_without, at)[at:]].sum()
        )
        self._n_judged += 1
        if self._n_judged >= _N_JUDGED_MIN and self._gain < _GAIN_MIN:
            self.on = False
            self._n_paused = 0


# An absent expert must score higher than its victim by so many standard deviations of a count with the marginal mean.
# Of experts that are closer, as many improve as worsen. On texts 0 to 152 of gpt-oss-20b 0 finds 0.001 more pairs with
# half as many uploads again
_MARGIN = 0.1
_MARGIN_FIRST_PLAN = 1.0  # a second plan follows that knows the draft: only clearly better experts move
# Steps that count for the score: a fifth of the time that an expert stays. A third to an eighth, and limits from 10 to
# 20, change hit rates by less than 0.002 (gpt-oss-20b, texts 0 to 152, 0.1 to 10 uploads per layer and step)
_HORIZON_SHARE, _HORIZON_MAX = 0.2, 10.0
_TURNOVER_GAIN = 0.05  # weight of the last step in the mean number of experts that arrive
_BALANCE_EVERY = 4  # steps, where the CPU is clearly the slower side
_NO_LOOKAHEAD = LookaheadStatus(used=False, reason="it is switched off", reads_drafts=False)


class Spac(PooledPolicy):
    """Score: activations per step that an expert is expected to bring while it stays."""

    name = "spac"
    required_inputs: frozenset[str] = frozenset({"draft-states"})  # without them, the tokens alone

    def __init__(self, shape: CacheShape, config: PolicyConfig) -> None:
        super().__init__(shape, config, cap=config.effective_cap)
        size, n = self._score.shape, self._score.size
        self._binary = config.binary
        fitted = "no-ada-bc" not in config.ablations
        predictor_bytes = 0 if self._binary else config.predictor_bytes
        self._n_slots = int(shape.capacity.sum())
        self._ema = ActivationEMA(n, fitted=fitted)
        self._predictor = NextBatchPredictor(shape.n_layers, shape.n_experts, predictor_bytes, fitted=fitted)
        # None: no predictions from tokens
        self._judge = LookaheadJudge(self._n_slots) if predictor_bytes > 0 else None
        self.required_inputs = Spac.required_inputs if predictor_bytes > 0 else frozenset()
        self._n_used = 0.0  # experts per token
        self._layer_pairs = 0.0  # expected activations per layer, of the last plan
        # by the last step; under the ablations that read it
        self._last_used: BoolArray = np.zeros(size, dtype=np.bool_)
        self._used = self._last_used if config.used_only else None
        self._reads_last_used = self._binary or config.used_only
        self._flat_score = self._score.reshape(-1)
        self._score_without: FloatArray = np.zeros(n, dtype=np.float32)  # the score without predictions from tokens
        self._is_judged = False  # whether it belongs to the last plan
        # an array, not a number: for that NumPy's minimum takes four times as long
        self._caps: FloatArray = np.full(size, self._cap, dtype=np.float32)
        self._n_batch_max = float(config.gamma + 1)
        self._n_batch = self._n_batch_max  # tokens expected in the next batch
        self._marginal = 1.0  # the score of the last expert that fits, of the last plan
        self._tau[:] = config.fixed_tau or 1.0
        self._workload: ExpectedWorkload | None = None  # None: tau is fixed
        if config.cost_model is not None and config.fixed_tau is None and not config.binary:
            self._workload = ExpectedWorkload(shape, config.effective_cap, config.cost_model, config.gamma)
        self._link_uploads = self._max_uploads  # of a plan, as configured; None: not limited
        self._held: BoolArray | None = None  # residency at the last step
        self._n_arrived = 0.0  # experts per step, mean
        self._n_balanced = 0  # steps
        self._n_planned = 0  # plans since the last step
        self._n_plans = 1  # plans of the last step: more than one where drafts become known

    @property
    def lookahead(self) -> LookaheadStatus:
        """Whether predictions from the draft's tokens are used, and the gain measured so far."""
        return _NO_LOOKAHEAD if self._judge is None else self._judge.status

    def observe(self, observation: Observation) -> None:
        counts = observation.counts
        if observation.n_tokens < 1:
            return
        n_planned, self._n_planned = self._n_planned, 0
        if self._n_used == 0.0:
            self._n_used = float(counts.sum()) / observation.n_tokens / max(self.shape.expert_layers.size, 1)
        now = self._ema.read(counts.reshape(-1), observation.n_tokens)
        looks_ahead = self._looks_ahead
        if not observation.prefill:
            self._n_plans = n_planned
            self._n_batch = float(observation.n_tokens)
            if self._judge is not None:
                if looks_ahead:
                    self._predictor.fit_trust(self._ema.rate, now, observation.n_tokens)
                    if self._is_judged:
                        self._judge.judge(self._flat_score, self._score_without, now)
                self._judge.end_step()
        self._is_judged = False
        # a step counts by its tokens, a prompt as its mean token: otherwise it would outweigh the steps after it
        weight = (1 if observation.prefill else observation.n_tokens) / self._n_batch_max
        first, rejected = observation.n_accepted + 1, None  # rejected draft
        if not observation.prefill and observation.ids is not None and first < observation.n_tokens:
            rejected = count_ids(observation.ids[:, first:], self.shape.n_experts).reshape(-1)
        self._ema.observe(observation.n_tokens, rejected, fit=not observation.prefill, weight=weight)
        if looks_ahead and observation.tokens is not None and observation.ids is not None:
            self._predictor.learn(observation.tokens, observation.ids)
        if self._reads_last_used:
            np.greater(counts, 0, out=self._last_used)

    def plan(self, resident: Resident, tokens: Sequence[int], prediction: ExpertPrediction | None = None) -> Plan:
        if self._n_planned == 0:
            self._set_discount(resident)
        known = len(tokens) > 1 or (len(tokens) == 1 and self._n_batch <= 1.0)
        self._expect(tokens, known, prediction.hidden_states if prediction is not None else None)
        score = self._score
        is_first_of_two = not known and self._n_plans > 1 and self._looks_ahead
        deviations = _MARGIN_FIRST_PLAN if is_first_of_two else _MARGIN
        margin = 0.0 if self._binary else deviations * math.sqrt(self._marginal)
        np.divide(score, self._unit(self._fit(resident, margin)), out=self._utility)
        np.minimum(self._utility, self._caps, out=self._utility)
        if self._n_planned == 0:  # once per step: the second plan has the same threshold
            self._balance()
        self._n_planned += 1
        return self._moves(resident, self._max_uploads, self._used, None if self._binary else score)

    def reset(self) -> None:
        """Forgets the passage; tables and longer memories stay."""
        self._ema.reset()
        self._n_planned = 0  # for a step that this text does not have

    @property
    def _looks_ahead(self) -> bool:
        return self._judge is not None and self._judge.on

    def _set_discount(self, resident: Resident) -> None:
        """Sets the steps that count for the score by the turnover of the slots."""
        held = np.asarray(resident != 0)
        n_arrived = 0 if self._held is None else int(np.count_nonzero(held > self._held))
        self._held = held
        self._n_arrived += _TURNOVER_GAIN * (n_arrived - self._n_arrived)
        horizon = _HORIZON_SHARE * self._n_slots / max(self._n_arrived, 1e-3)
        self._ema.discount = 1.0 - 1.0 / min(max(horizon, 1.0), _HORIZON_MAX)

    def _balance(self) -> None:
        """Updates tau of every layer and the number of uploads that fit a step's time."""
        if self._workload is None:
            return
        self._n_balanced += 1
        if self._workload.is_stable and self._n_balanced % _BALANCE_EVERY != 0:
            return  # keep the solution of the step before
        self._tau, max_uploads = self._workload.solve(self._score, self._utility, self._layer_pairs)
        limits = [limit for limit in (self._link_uploads, max_uploads) if limit is not None]
        self._max_uploads = min(limits, default=None)

    def _expect(self, tokens: Sequence[int], known: bool, hidden_states: FloatArray | None) -> None:
        """Sets the scores: activations [n_layers, n_experts] per step, of a batch of the next one's size."""
        if self._binary:
            np.copyto(self._score, self._last_used)
            return
        n_batch = float(len(tokens)) if known else self._n_batch
        score = np.multiply(self._ema.rate, np.float32(n_batch), out=self._flat_score)
        self._layer_pairs = n_batch * self._n_used
        if known and self._judge is not None and self._looks_ahead:
            self._is_judged = self._judge.wants_judgement
            if self._is_judged:
                np.copyto(self._score_without, score)
            share = self._predictor.add(self._ema.rate, tokens, score, hidden_states, weight=1.0 - self._ema.discount)
            self._is_judged = self._is_judged and share > 0.0

    def _unit(self, marginal: list[float]) -> Any:
        """The score of utility 1: a number for one group, else [n_layers, 1]."""
        least = max(self._layer_pairs / self.shape.n_experts, 1e-6)
        units = [max(value, least) if value < math.inf else least for value in marginal]
        self._marginal = sum(units) / max(len(units), 1)
        if len(units) == 1:
            return np.float32(self._marginal)
        by_group = np.array([*units, least], dtype=np.float32)  # the last: layers without experts, whose group is -1
        return np.asarray(by_group[self.shape.group][:, None])
