"""Activations of a model's experts, kept between runs: the experts used most are loaded first at the next start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from moeedge.errors import require
from moeedge.hardware.provenance import HEADER_BYTES, file_sha256
from moeedge.policies.base import CacheShape, Observation
from moeedge.scheduler.measurement import measurement_file, parse_measurement, write_measurement

_KEPT = 0.5  # of earlier runs' counts at each start: what a user does with a model changes


@dataclass(frozen=True)
class EarlierRuns:
    """Activations of earlier runs, for a warm start."""

    n_tokens: float  # that the counts are of; at each start the earlier ones are halved
    kept_at_s: float  # end of the newest of these runs, in seconds since 1970
    n_first: int  # experts that are loaded first
    file: str


@dataclass(frozen=True, eq=False)
class _Counts:
    """The file's content."""

    SCHEMA: ClassVar[int] = 1

    n_tokens: float
    counts: NDArray[np.float64]  # [n_layers, n_experts]

    def __post_init__(self) -> None:
        require(np.isfinite(self.counts).all() and (self.counts >= 0).all() and self.n_tokens >= 0, "no activations")


@dataclass(eq=False)
class KeptActivations:
    """Counts of one model's experts over all runs on this machine."""

    counts: NDArray[np.float64]  # [n_layers, n_experts], activations; those of earlier runs weigh less
    n_tokens: float  # that they are of
    file: Path | None  # None: there is no cache folder
    kept_at_s: float = 0.0  # end of the newest earlier run, in seconds since 1970
    n_first: int = 0  # experts that this run loaded first

    def __post_init__(self) -> None:
        self._earlier_tokens = self.n_tokens

    @classmethod
    def open(cls, model: Path, n_layers: int, n_experts: int) -> KeptActivations:
        """The counts that earlier runs have kept; zeros where there is nothing, or nothing usable."""
        empty, file = np.zeros((n_layers, n_experts)), None
        try:
            identity = {
                "model": model.name,
                "model_bytes": model.stat().st_size,
                "header": file_sha256(model, HEADER_BYTES),
            }
            file = measurement_file(f"{model.name}-activations", {"activations": _Counts.SCHEMA, **identity})
            earlier = parse_measurement(_Counts, file.read_text(encoding="utf-8"))
            require(earlier.counts.shape == empty.shape, "these are not the activations of this model")
            return cls(earlier.counts * _KEPT, earlier.n_tokens * _KEPT, file, file.stat().st_mtime)
        except (OSError, ValueError):
            return cls(empty, 0.0, file)

    def add(self, observation: Observation) -> None:
        self.counts += observation.counts
        self.n_tokens += observation.n_tokens

    def most_used(self, shape: CacheShape) -> NDArray[np.int32]:
        """The experts that should be resident at the start, the most used first: int32 [n, 2] (layer, expert)."""
        chosen = []
        for layers, capacity in shape.pools():
            counts = self.counts[layers].reshape(-1)
            best = np.argsort(-counts, kind="stable")[:capacity]
            best = best[counts[best] > 0]
            layer, expert = np.divmod(best, shape.n_experts)
            chosen.append(np.stack([counts[best], layers[layer], expert], axis=1))
        rows = np.concatenate([np.zeros((0, 3)), *chosen])
        return rows[np.argsort(-rows[:, 0], kind="stable")][:, 1:].astype(np.int32)

    @property
    def earlier_runs(self) -> EarlierRuns | None:
        """The activations that this run began with; None for the first."""
        if self.file is None or not self._earlier_tokens:
            return None
        return EarlierRuns(self._earlier_tokens / _KEPT, self.kept_at_s, self.n_first, str(self.file))

    def save(self) -> None:
        """Keeps the counts for the next run. Raises OSError where they cannot be written."""
        if self.file is not None and self.n_tokens != self._earlier_tokens:  # something was used
            write_measurement(self.file, _Counts(round(self.n_tokens, 1), np.round(self.counts, 1)))
