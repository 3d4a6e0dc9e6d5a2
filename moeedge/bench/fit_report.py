"""What `moeedge fit` found: times, fit, predictions; as JSON, and read from it again."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import moeedge
from moeedge.analysis.step_fit import AmdahlRow, StepFit, StepTimes
from moeedge.analysis.step_model import StepModel
from moeedge.analysis.what_if import Acceptance, Outlook
from moeedge.engine.types import EngineConfig, EngineInfo
from moeedge.errors import InputError
from moeedge.llama import library


@dataclass(frozen=True)
class SpeedUp:
    """Speculative over plain decoding of one sequence at one draft length."""

    gamma: int
    tokens_per_step: float  # predicted from the acceptance of the longest drafts
    target_efficiency: float
    predicted: float  # by the fit
    from_times: float | None  # by Eq. 4 with the measured times themselves; None where one was not measured
    measured: float | None = None  # None: not asked for
    measured_tokens_per_step: float | None = None
    pairs: tuple[float, ...] = ()  # measured, prompt by prompt

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
    interrupted: bool = False

    @property
    def share(self) -> float:
        """f: measured where that was possible."""
        return self.share_fitted if self.share_measured is None else self.share_measured

    @property
    def spread(self) -> float:
        """Median over the target's times of the largest over the smallest sample: 1 on a quiet machine."""
        return median(max(point.samples_s) / min(point.samples_s) for point in self.times.target)

    @property
    def speed_up_error(self) -> float | None:
        """Largest absolute error of a predicted speed-up; None where none was measured."""
        return max((abs(row.error) for row in self.speed_ups if row.error is not None), default=None)

    def as_dict(self) -> dict[str, Any]:
        """For JSON; times in seconds."""
        model = self.fit.model
        return {
            "version": moeedge.__version__,
            "model": self.info.model,
            "draft": self.info.draft,
            "device": self.info.device,
            "threads": self.info.n_threads,
            "interrupted": self.interrupted,
            "times": asdict(self.times),
            "acceptance": asdict(self.acceptance),
            "parameters": {name: getattr(model, name) for name in self.fit.lower},
            "lower_bounds": self.fit.lower,
            "upper_bounds": {name: value for name, value in self.fit.upper.items() if value != float("inf")},
            "experts_in_sequence": model.in_sequence,
            "other_form": {
                "experts_in_sequence": self.other_fit.model.in_sequence,
                "fit_error": self.other_fit.fit_error,
                "left_out_error": self.other_fit.left_out_error,
                "parameters": {name: getattr(self.other_fit.model, name) for name in self.fit.lower},
            },
            "ridge_point_tokens": model.ridge_point,
            "fit_error": self.fit.fit_error,
            "left_out_error": self.fit.left_out_error,
            "draft_error": self.fit.draft_error,
            "reject_error": self.fit.reject_error,
            "spread": self.spread,
            "speed_up_error": self.speed_up_error,
            "evaluations": self.fit.n_evaluations,
            "fitted": [asdict(point) | {"error": point.error} for point in self.fit.fitted],
            "left_out": [asdict(point) | {"error": point.error} for point in self.fit.left_out],
            "parts_s": {str(n): model.parts_s(n) for n in sorted({point.n_tokens for point in self.times.target})},
            "expert_share_fitted": self.share_fitted,
            "expert_share_measured": self.share_measured,
            "amdahl": [asdict(row) for row in self.amdahl],
            "speed_up": [asdict(row) | {"error": row.error} for row in self.speed_ups],
            "outlook": [asdict(row) for row in self.outlooks],
        }


@dataclass(frozen=True)
class FittedPair:
    """What predicts the speed-up of a pair of models: a fit that was written as JSON."""

    target: str  # file names
    draft: str
    device: str  # that holds experts
    threads: int
    model: StepModel
    acceptance: Acceptance
    max_tokens: int  # of the largest batch that was measured

    def differences(self, config: EngineConfig, device: str) -> list[str]:
        """A sentence for each thing in which a run differs from the one that was fitted; device: the run's label."""
        draft = config.draft.name if isinstance(config.draft, Path) else config.draft or "none"
        threads = config.n_threads or library.physical_cores()
        pairs = (
            ("model", self.target, config.model.name),
            ("draft", self.draft, draft),
            ("device", self.device, device),
            ("number of threads", str(self.threads), str(threads)),
        )
        return [
            f"The fit is of another run: its {name} is {fitted}, here {own}."
            for name, fitted, own in pairs
            if fitted != own
        ]

    def speed_up(self, gamma: int, batch_size: int) -> float | None:
        """Speculative over plain decoding of `batch_size` sequences; None for drafts longer than were counted."""
        if gamma > len(self.acceptance.at_least):
            return None
        return self.model.speed_up(self.acceptance.tokens(gamma), self.acceptance.drafts(gamma), batch_size)

    def exceeds(self, gamma: int, batch_size: int) -> bool:
        """Whether a verification of `batch_size` sequences has more tokens than any batch that was measured."""
        return batch_size * (gamma + 1) > self.max_tokens


def read_fit(path: Path) -> FittedPair:
    """Reads the JSON of `moeedge fit -o json`. Raises InputError for a file that is none."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        times, acceptance = record["times"], record["acceptance"]
        model = StepModel(
            n_experts=int(times["n_experts"]),
            n_used=int(times["n_used"]),
            ridge_point=float(record["ridge_point_tokens"]),
            in_sequence=bool(record["experts_in_sequence"]),
            **{name: float(value) for name, value in record["parameters"].items()},
        )
        return FittedPair(
            str(record["model"]),
            str(record["draft"]),
            str(record["device"]),
            int(record["threads"]),
            model,
            Acceptance(
                tuple(map(float, acceptance["at_least"])),
                tuple(map(float, acceptance["drafted"])),
                int(acceptance["n_steps"]),
            ),
            max(int(point["n_tokens"]) for point in times["target"]),
        )
    except OSError as error:
        raise InputError(f"Cannot read {path}: {error.strerror or 'read error'}.", "Check the path.") from None
    except (ValueError, KeyError, TypeError) as error:
        is_json = not isinstance(error, json.JSONDecodeError | UnicodeDecodeError)
        reason = "a figure is missing or has another form" if is_json else "it is not JSON"
        raise InputError(
            f"{path} is not what moeedge fit -o json writes: {reason}.", "Write one with moeedge fit -o json > FILE."
        ) from None
