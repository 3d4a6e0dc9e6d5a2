"""What `moeedge lab fit` found: times, fit, predictions; as JSON (keys in docs/lab/speed-model.md)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import moeedge
from moeedge.engine.types import EngineInfo
from moeedge.errors import MeasurementError
from moeedge.lab.analysis.step_fit import (
    AmdahlRow,
    StepFit,
    StepTimes,
    amdahl,
    expert_share,
    expert_share_measured,
    fit_steps,
)
from moeedge.lab.analysis.step_model import Acceptance, Outlook, StepModel, outlooks

MAX_ERROR = 0.15  # of times left out, median; with more there are no predictions
_PREDICTED = ("target_efficiency", "predicted", "error")  # by the fit, of a speed-up


@dataclass(frozen=True)
class SpeedUpSample:
    """One answer at one draft length, 0: plain."""

    prompt: int
    gamma: int
    decode_s: float
    tokens: int
    steps: int


@dataclass(frozen=True)
class SpeedUp:
    """Speculative over plain decoding of one sequence at one draft length."""

    gamma: int
    tokens_per_step: float  # predicted from the acceptance of the longest drafts
    target_efficiency: float
    predicted: float  # by the fit
    measured: float | None  # None: not asked for
    measured_tokens_per_step: float | None

    @property
    def error(self) -> float | None:
        """Predicted over measured, minus 1."""
        return None if self.measured is None else self.predicted / self.measured - 1


@dataclass(frozen=True)
class FitReport:
    """Everything that was measured, fitted and predicted."""

    info: EngineInfo
    times: StepTimes
    fit: StepFit  # of the form that predicts better
    other_fit: StepFit  # of the other form
    acceptance: Acceptance
    share_fitted: float  # f of the production study, by the fit
    share_measured: float | None  # f by the slope over the active experts
    amdahl: tuple[AmdahlRow, ...]
    speed_ups: tuple[SpeedUp, ...]
    outlooks: tuple[Outlook, ...]

    @classmethod
    def of(
        cls,
        info: EngineInfo,
        times: StepTimes,
        acceptance: Acceptance,
        samples: Sequence[SpeedUpSample],
        *,
        gammas: Sequence[int],
        batch_sizes: Sequence[int],
    ) -> FitReport:
        """Fits the times in both forms and predicts with the one that misses less of what it was not given."""
        fits = [fit_steps(times, in_sequence=in_sequence) for in_sequence in (False, True)]
        fit, other = sorted(fits, key=lambda found: found.left_out_error or found.fit_error)
        fitted, sloped = expert_share(fit.model), expert_share_measured(times)
        return cls(
            info=info,
            times=times,
            fit=fit,
            other_fit=other,
            acceptance=acceptance,
            share_fitted=fitted,
            share_measured=sloped,
            amdahl=tuple(amdahl(times, fitted if sloped is None else sloped)),
            speed_ups=tuple(_speed_up(gamma, fit.model, acceptance, samples) for gamma in gammas),
            outlooks=tuple(
                outlooks(
                    fit.model,
                    acceptance,
                    gammas=gammas,
                    batch_sizes=batch_sizes,
                    max_tokens=max(point.n_tokens for point in times.target),
                )
            ),
        )

    @property
    def share(self) -> float:
        """f: measured where that was possible."""
        return self.share_fitted if self.share_measured is None else self.share_measured

    @property
    def error(self) -> float:
        """Median error of the times left out; of those fitted where there were too few to leave any out."""
        return self.fit.fit_error if self.fit.left_out_error is None else self.fit.left_out_error

    @property
    def is_usable(self) -> bool:
        """Whether the fit says enough about the times to predict others."""
        return self.error <= MAX_ERROR

    def unusable(self) -> MeasurementError:
        """Why there are no predictions."""
        return MeasurementError(
            f"There are no predictions: the fit misses the times left out by {self.error:.0%} (median), and more than "
            f"{MAX_ERROR:.0%} is too much. Samples of one batch differ by a factor of {self.spread:.2f}.",
            "Repeat it on a quiet machine, or with more repetitions (-r). -o json keeps the times.",
        )

    @property
    def spread(self) -> float:
        """Median over the target's times of the largest over the smallest sample: 1 on a quiet machine."""
        return median(max(point.samples_s) / min(point.samples_s) for point in self.times.target)

    @property
    def speed_up_error(self) -> float | None:
        """Largest absolute error of a predicted speed-up; None where none was measured."""
        return max((abs(row.error) for row in self.speed_ups if row.error is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds. A fit that is not usable has its times and errors, and no predictions."""
        fit, other, model = self.fit, self.other_fit, self.fit.model
        withheld = {} if self.is_usable else dict.fromkeys(_PREDICTED)
        return {
            "version": moeedge.__version__,
            "model": self.info.model,
            "draft": self.info.draft,
            "device": self.info.device,
            "threads": self.info.n_threads,
            "usable": self.is_usable,
            "times": asdict(self.times),
            "acceptance": asdict(self.acceptance),
            "parameters": {name: getattr(model, name) for name in fit.lower},
            "lower_bounds": fit.lower,
            "upper_bounds": {name: value for name, value in fit.upper.items() if value != float("inf")},
            "experts_in_sequence": model.in_sequence,
            "other_form": {
                "experts_in_sequence": other.model.in_sequence,
                "fit_error": other.fit_error,
                "left_out_error": other.left_out_error,
                "parameters": {name: getattr(other.model, name) for name in fit.lower},
            },
            "ridge_point_tokens": model.ridge_point,
            **{name: getattr(fit, name) for name in ("fit_error", "left_out_error", "draft_error", "reject_error")},
            "spread": self.spread,
            "speed_up_error": self.speed_up_error if self.is_usable else None,
            "fitted": [asdict(point) | {"error": point.error} for point in fit.fitted],
            "left_out": [asdict(point) | {"error": point.error} for point in fit.left_out],
            "parts_s": {str(n): model.parts_s(n) for n in sorted({point.n_tokens for point in self.times.target})},
            "expert_share_fitted": self.share_fitted,
            "expert_share_measured": self.share_measured,
            "amdahl": [asdict(row) for row in self.amdahl if self.is_usable],
            "speed_up": [asdict(row) | {"error": row.error} | withheld for row in self.speed_ups],
            "outlook": [asdict(row) for row in self.outlooks if self.is_usable],
        }


def _speed_up(gamma: int, model: StepModel, acceptance: Acceptance, samples: Sequence[SpeedUpSample]) -> SpeedUp:
    n_tokens, n_drafts = acceptance.tokens(gamma), acceptance.drafts(gamma)
    plain = {sample.prompt: sample for sample in samples if sample.gamma == 0}
    own = [sample for sample in samples if sample.gamma == gamma and sample.prompt in plain]

    def speed(of: Sequence[SpeedUpSample]) -> float:
        return sum(sample.tokens for sample in of) / sum(sample.decode_s for sample in of)

    return SpeedUp(
        gamma,
        n_tokens,
        model.target_efficiency(1, gamma),
        model.speed_up(n_tokens, n_drafts),
        speed(own) / speed([plain[sample.prompt] for sample in own]) if own else None,
        sum(sample.tokens for sample in own) / sum(sample.steps for sample in own) if own else None,
    )
