"""MoESD's model of a step's time, from which speed-ups at any batch size and draft length follow, and its fit.

"MoESD: Unveil Speculative Decoding's Potential for Accelerating Sparse MoE", section 3.3 and Algorithm 1. For t tokens
in one batch, E experts of which K per token are active:

  T_T(t)   = bias + k1 * G(t) + k2 * N(t) + k3 * G(t * K / N(t))
  T_D(t)   = draft_bias + draft_k * G(t)
  T_rej(t) = reject_bias + reject_k * t
  G(t)     = s^t up to the ridge lambda * RP, from there on its tangent: a roofline with a soft knee (Eq. 11)
  N(t)     = E * (1 - (1 - K/E)^t), experts in use (Eq. 8)

The form `in_sequence` is ours: its last term is k3 * N(t) * G(t * K / N(t)), as a CPU computes experts one after the
other. RP is the ridge point of the hardware, here in tokens: how many must share a loaded weight until computing takes
as long as loading. A plain step of B sequences has t = B, its verification t = B * (gamma + 1).

The fit (Appendix B.1) is bounded least squares with SciPy's trust region reflective method, of times measured on their
own and by relative errors; departures: docs/lab/speed-model.md. Lower bounds of bias, k2 and draft_bias are the
paper's: bytes over bandwidth. Their upper bounds are the shortest measured times, which no part can exceed. The
optimisation starts from the best point of a grid over lambda and s. For fixed lambda and s the model is linear.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge import speculation
from moeedge.analysis.routing_curves import tokens_per_expert, uniform_unique
from moeedge.records import figure, figures, filled

_N_LINEAR = 8  # of the parameters, the first ones, for a fixed ridge_share and growth
_TARGET_PARAMETERS = 6  # of the parameters T_T depends on that many
_RIDGE_SHARE = (0.2, 1.0)  # MoESD: lambda in [0.2, 1]
_GROWTH = (1.0 + 1e-4, 2.0)  # MoESD: more than 1, and not too steep; see _bounds
_GROWTH_GRID = (1.001, 1.01, 1.03, 1.1, 1.3, 1.7)
_RIDGE_GRID = (0.2, 0.5, 1.0)
_EVALUATIONS = 100

FloatArray = NDArray[np.float64]


def roofline(n_tokens: float | FloatArray, ridge_tokens: float, growth: float) -> FloatArray:
    """G(t) of MoESD, Eq. 11, of any shape: growth^t, and its tangent beyond `ridge_tokens`; 0 for no tokens."""
    tokens = np.asarray(n_tokens, dtype=np.float64)
    log_growth = math.log(growth)
    bent = np.exp(np.minimum(tokens, ridge_tokens) * log_growth)
    values = bent * (1 + np.maximum(tokens - ridge_tokens, 0.0) * log_growth)
    return np.asarray(np.where(tokens > 0, values, 0.0))


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What a model runs on."""

    bytes_per_s: float  # of memory, for weights
    flops: float  # operations per second, as its kernels reach them

    def ridge_tokens(self, bytes_per_weight: float) -> float:
        """RP: tokens at which two operations per weight and token take as long as loading the weight."""
        return self.flops / self.bytes_per_s * bytes_per_weight / 2


@dataclass(frozen=True, kw_only=True)
class StepModel:
    """The fitted parameters, which are declared as figures, of one model with its draft on one machine; s: seconds."""

    n_experts: int  # E
    n_used: int  # K
    ridge_point: float  # RP, tokens
    bias_s: float = figure("loading the weights that every step reads")
    k1_s: float = figure("dense operations, times G(t)")
    k2_s: float = figure("loading one expert in every layer, times N(t)")
    k3_s: float = figure("operations of experts, times G(tokens per expert), in sequence times N(t)")
    draft_bias_s: float = figure("loading the draft")
    draft_k_s: float = figure("operations of the draft, times G(t)")
    reject_bias_s: float = figure("rejection sampling")
    reject_k_s: float = figure("the same, times t")
    ridge_share: float = figure("lambda: where the slope of G begins, as a share of the ridge point")
    growth: float = figure("s: growth of G before")
    in_sequence: bool = False  # experts are computed one after the other; False: as MoESD prints it

    @property
    def ridge_tokens(self) -> float:
        """lambda * RP."""
        return self.ridge_share * self.ridge_point

    def parts_s(self, n_tokens: float) -> dict[str, float]:
        """T_T(t) by its four terms: fixed, dense (k1), experts (k2), load (k3)."""
        n_active = uniform_unique(self.n_experts, self.n_used, n_tokens)
        load = tokens_per_expert(self.n_experts, self.n_used, n_tokens)
        return {
            "fixed": self.bias_s,
            "dense": self.k1_s * self._g(n_tokens),
            "experts": self.k2_s * n_active,
            "load": self.k3_s * self._g(load) * (n_active if self.in_sequence else 1.0),
        }

    def _g(self, n_tokens: float) -> float:
        return float(roofline(n_tokens, self.ridge_tokens, self.growth))

    def target_s(self, n_tokens: float) -> float:
        """T_T(t)."""
        return sum(self.parts_s(n_tokens).values())

    def draft_s(self, n_tokens: float) -> float:
        """T_D(t): one pass of the draft over t sequences."""
        return self.draft_bias_s + self.draft_k_s * self._g(n_tokens)

    def reject_s(self, n_tokens: float) -> float:
        """T_rej(t)."""
        return self.reject_bias_s + self.reject_k_s * n_tokens

    def target_efficiency(self, batch_size: int, gamma: int) -> float:
        """T_T(B, 1) / T_T(B, gamma)."""
        return speculation.target_efficiency(self.target_s(batch_size), self.target_s(batch_size * (gamma + 1)))

    def speed_up(self, n_tokens: float, n_drafts: float, batch_size: int = 1) -> float:
        """Speculative over plain decoding of `batch_size` sequences (Eq. 4).

        n_tokens, n_drafts: of one sequence and step; n_drafts is gamma, or less on average where drafts end early.
        """
        n_verified = batch_size * (n_drafts + 1)
        return speculation.speed_up(
            n_tokens,
            n_drafts,
            target_s=self.target_s(batch_size),
            verify_s=self.target_s(n_verified),
            draft_s=self.draft_s(batch_size),
            reject_s=self.reject_s(n_verified),
        )


PARAMETERS = tuple(figures(StepModel))


@dataclass(frozen=True)
class Acceptance:
    """How many drafts are accepted, counted on steps of the longest drafts."""

    at_least: tuple[float, ...]  # [gamma]: share of steps that accept 1, 2, ... drafts, of those that ask for so many
    drafted: tuple[float, ...]  # [gamma]: share of these steps that have so many: a draft ends with the text
    n_steps: int

    def tokens(self, gamma: int) -> float:
        """Expected tokens of a step with `gamma` drafts, at most as many as were counted. Raises ValueError beyond."""
        if gamma > len(self.at_least):
            raise ValueError(f"acceptance was counted for drafts of up to {len(self.at_least)} tokens, not {gamma}")
        return 1.0 + sum(self.at_least[:gamma])

    def drafts(self, gamma: int) -> float:
        """Expected drafts of such a step."""
        return sum(self.drafted[:gamma])


class DraftCount(NamedTuple):
    n_asked: int  # at most gamma; fewer at the end of an answer
    n_drafted: int  # fewer where the draft model predicts the end of the text
    n_accepted: int


def count_acceptance(steps: Iterable[DraftCount], gamma: int) -> Acceptance:
    """Counts accepted drafts by place. A draft that ends early is rejected from there on: it gives no more tokens."""
    counted = list(steps)
    asked = [sum(step.n_asked > place for step in counted) for place in range(gamma)]

    def shares(number: Callable[[DraftCount], int]) -> tuple[float, ...]:
        return tuple(sum(number(step) > place for step in counted) / n if n else 0.0 for place, n in enumerate(asked))

    return Acceptance(shares(lambda step: step.n_accepted), shares(lambda step: step.n_drafted), len(counted))


@dataclass(frozen=True)
class TimePoint:
    """Seconds of one pass over a batch, the median of its samples."""

    n_tokens: int  # in the batch
    seconds: float
    n_used: int = 0  # experts per token; 0: not a pass of the target
    n_sequences: int = 1  # that the tokens belong to
    unique_experts: float | None = None  # per MoE layer, counted; mean of the samples
    samples_s: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Everything that a fit needs to know about a model with its draft on a machine."""

    n_experts: int
    n_used: int  # of the model as it is
    target: tuple[TimePoint, ...]
    draft: tuple[TimePoint, ...]  # empty without a draft model
    reject: tuple[TimePoint, ...]
    machine: Machine
    dense_bytes: float  # that every step of the target reads
    expert_bytes: float  # of one expert in every MoE layer, together
    draft_bytes: float
    bytes_per_weight: float
    depth: int = 0  # tokens of each sequence before a batch


@dataclass(frozen=True)
class Predicted:
    """A measured time of the target and what a model gives for it."""

    n_tokens: int
    n_used: int
    n_sequences: int
    measured_s: float
    predicted_s: float
    error: float  # predicted over measured, minus 1


@dataclass(frozen=True)
class StepFit:
    """The fitted model with its errors; all errors are relative."""

    model: StepModel
    lower: dict[str, float]  # bounds by parameter
    upper: dict[str, float]
    fitted: tuple[Predicted, ...]  # the target's times, in their order
    left_out: tuple[Predicted, ...]  # each by a fit without all times of as many tokens, begun at the complete fit
    draft_error: float | None  # median of the draft's absolute errors
    reject_error: float | None

    @property
    def fit_error(self) -> float:
        """Median absolute error of the fitted times."""
        return median(abs(point.error) for point in self.fitted)

    @property
    def left_out_error(self) -> float | None:
        """Median absolute error of leave-one-out predictions; None where there were too few times to leave one out."""
        return median(abs(point.error) for point in self.left_out) if self.left_out else None


@dataclass(frozen=True)
class AmdahlRow:
    """The production study's law at one number of tokens."""

    n_tokens: int  # K + 1
    expert_ratio: float  # unique(K + 1) / k, counted where it was, else by the uniform formula
    predicted: float  # T(K + 1) / T(1)
    measured: float
    share: float | None  # the f that would make them equal


def fit_steps(times: StepTimes, *, in_sequence: bool = False) -> StepFit:
    """Fits all ten parameters of MoESD's model, or of that with experts in sequence.

    Raises ValueError for fewer target times than T_T has parameters.
    """
    if len(times.target) < _TARGET_PARAMETERS:
        raise ValueError(f"a fit needs at least {_TARGET_PARAMETERS} times of the target, not {len(times.target)}")
    model, problem, values = _fit(times, in_sequence)
    left_out: list[Predicted] = []
    sizes = {point.n_tokens for point in times.target}
    if len(sizes) > _TARGET_PARAMETERS:
        without = {}
        for size in sizes:
            others = replace(times, target=tuple(point for point in times.target if point.n_tokens != size))
            without[size] = _fit(others, in_sequence, values)[0]
        left_out = [_predict(without[point.n_tokens], point) for point in times.target]
    return StepFit(
        model=model,
        lower=dict(zip(PARAMETERS, problem.lower.tolist(), strict=True)),
        upper=dict(zip(PARAMETERS, problem.upper.tolist(), strict=True)),
        fitted=tuple(_predict(model, point) for point in times.target),
        left_out=tuple(left_out),
        draft_error=_error(times.draft, model.draft_s),
        reject_error=_error(times.reject, model.reject_s),
    )


def amdahl(times: StepTimes, expert_share: float) -> list[AmdahlRow]:
    """T(K + 1) / T(1) by the production study's law for every measured number of tokens above 1."""
    alone = [point for point in times.target if point.n_used == times.n_used and point.n_sequences == 1]
    single = next((point for point in alone if point.n_tokens == 1), None)
    rows = []
    for point in alone:
        if single is None or point is single:
            continue
        unique = point.unique_experts or uniform_unique(times.n_experts, times.n_used, point.n_tokens)
        ratio, measured = unique / times.n_used, point.seconds / single.seconds
        predicted = speculation.verification_ratio(expert_share, ratio)
        share = speculation.expert_share_for(measured, ratio) if ratio > 1 else None
        rows.append(AmdahlRow(point.n_tokens, ratio, predicted, measured, share))
    return rows


def expert_share(model: StepModel) -> float:
    """f of the production study by the fit: what routed experts take of a plain step, loading and computing."""
    parts = model.parts_s(1)
    return (parts["experts"] + parts["load"]) / sum(parts.values())


def expert_share_measured(times: StepTimes) -> float | None:
    """f by measuring: K times the slope of T(1) over the active experts, over T(1); None for fewer than two K."""
    singles = [point for point in times.target if point.n_tokens == 1 and point.n_sequences == 1]
    own = {point.n_used: point.seconds for point in singles}
    if times.n_used not in own or len(own) < 2:
        return None
    slope = float(np.polyfit(list(own), list(own.values()), 1)[0])
    return min(1.0, max(0.0, slope * times.n_used / own[times.n_used]))


def _predict(model: StepModel, point: TimePoint) -> Predicted:
    predicted_s = replace(model, n_used=point.n_used).target_s(point.n_tokens)
    error = predicted_s / point.seconds - 1
    return Predicted(point.n_tokens, point.n_used, point.n_sequences, point.seconds, predicted_s, error)


def _error(points: Sequence[TimePoint], predict: Callable[[float], float]) -> float | None:
    """Median absolute error of the predicted times; None without any."""
    errors = [abs(predict(point.n_tokens) / point.seconds - 1) for point in points]
    return median(errors) if errors else None


class _Problem:
    """The residuals of a fit, relative to the measured times, and their derivatives."""

    def __init__(self, times: StepTimes, in_sequence: bool) -> None:
        self.in_sequence = in_sequence
        self.ridge_point = times.machine.ridge_tokens(times.bytes_per_weight)
        points = (*times.target, *times.draft, *times.reject)
        self._n_target, self._n_draft = len(times.target), len(times.draft)
        self._measured_s = np.array([point.seconds for point in points])
        self._tokens = np.array([point.n_tokens for point in points], dtype=np.float64)
        shapes = [(times.n_experts, point.n_used, point.n_tokens) for point in times.target]
        self._active = np.array([uniform_unique(*shape) for shape in shapes])
        self._load = np.array([tokens_per_expert(*shape) for shape in shapes])
        self.lower, self.upper = _bounds(times, in_sequence)
        # unit of each parameter, so that all are of one size
        self.scale = np.append(np.maximum(self.upper[:_N_LINEAR], 1e-12), [1.0, 1.0])
        self.scale[~np.isfinite(self.scale)] = float(self._measured_s[0])
        self.bounds = self.lower / self.scale, self.upper / self.scale

    def columns(self, ridge_share: float, growth: float) -> FloatArray:
        """What each linear parameter is multiplied with, [n_points, _N_LINEAR], relative to the measured times."""
        ridge_tokens = ridge_share * self.ridge_point
        target, draft = slice(self._n_target), slice(self._n_target, self._n_target + self._n_draft)
        reject = slice(self._n_target + self._n_draft, None)
        found = np.zeros((len(self._tokens), _N_LINEAR))
        found[target, 0] = found[draft, 4] = found[reject, 6] = 1.0
        found[target, 1] = roofline(self._tokens[target], ridge_tokens, growth)
        found[target, 2] = self._active
        found[target, 3] = roofline(self._load, ridge_tokens, growth) * (self._active if self.in_sequence else 1.0)
        found[draft, 5] = roofline(self._tokens[draft], ridge_tokens, growth)
        found[reject, 7] = self._tokens[reject]
        return np.asarray(found * self.scale[:_N_LINEAR] / self._measured_s[:, None])

    def residuals(self, values: FloatArray) -> FloatArray:
        """Predicted over measured, minus 1, by scaled parameters."""
        return np.asarray(self.columns(values[-2], values[-1]) @ values[:_N_LINEAR] - 1.0)


def _fit(
    times: StepTimes, in_sequence: bool, start: FloatArray | None = None
) -> tuple[StepModel, _Problem, FloatArray]:
    """The model, the problem and its parameters. start: parameters to begin with."""
    from scipy.optimize import least_squares, lsq_linear  # 0.2 s to import

    problem = _Problem(times, in_sequence)
    if start is None:
        tried = []
        linear = tuple(bound[:_N_LINEAR] for bound in problem.bounds)
        for growth, ridge_share in itertools.product((*_GROWTH_GRID, float(problem.upper[-1])), _RIDGE_GRID):
            columns = problem.columns(ridge_share, growth)
            tried.append((lsq_linear(columns, np.ones(len(columns)), linear), ridge_share, growth))
        best, *others = min(tried, key=lambda each: each[0].cost)
        start = np.array([*best.x, *others])
    else:
        start = start / problem.scale
    lower, upper = problem.bounds
    room = np.where(np.isfinite(upper), upper - lower, 1.0) * 1e-6  # a start must be a little inside the bounds
    start = np.clip(start, lower + room, upper - room)
    found = least_squares(
        problem.residuals, start, bounds=problem.bounds, method="trf", x_scale="jac", max_nfev=_EVALUATIONS
    )
    values = found.x * problem.scale
    parameters: dict[str, Any] = dict(zip(PARAMETERS, values.tolist(), strict=True))
    model = filled(StepModel, times, problem, in_sequence=in_sequence, **parameters)
    return model, problem, values


def _bounds(times: StepTimes, in_sequence: bool) -> tuple[FloatArray, FloatArray]:
    """Lower and upper bounds in the order of PARAMETERS.

    With experts in sequence, k3 * N(t) * G includes loading as well, so that k2 may be 0.
    """
    shortest_s = min(point.seconds for point in times.target)
    expert_s = min(point.seconds / point.n_used for point in times.target)  # N(t) >= K
    draft_s = min((point.seconds for point in times.draft), default=0.0)
    reject_s = max((point.seconds for point in times.reject), default=0.0)
    bandwidth = times.machine.bytes_per_s
    lower = [min(times.dense_bytes / bandwidth, 0.999 * shortest_s), 0.0]
    lower += [0.0 if in_sequence else min(times.expert_bytes / bandwidth, 0.999 * expert_s), 0.0]
    lower += [min(times.draft_bytes / bandwidth, 0.999 * draft_s), 0.0, 0.0, 0.0, _RIDGE_SHARE[0], _GROWTH[0]]
    upper = [shortest_s, math.inf, expert_s, math.inf, draft_s, math.inf if times.draft else 0.0]
    ridge_tokens = times.machine.ridge_tokens(times.bytes_per_weight)
    # the largest s is 2, or with a ridge below 1.4 tokens that whose tangent says that no tokens take no time
    upper += [reject_s, reject_s, _RIDGE_SHARE[1], max(_GROWTH[1], math.exp(min(1.0 / ridge_tokens, 5.0)))]
    # SciPy needs room between the bounds, also where a part was not measured
    return np.array(lower), np.maximum(upper, np.array(lower) + 1e-12)
