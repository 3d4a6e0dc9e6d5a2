"""Activations of a model's experts, kept between runs: the experts used most are loaded first at the next start."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.policies.base import CacheShape, Observation
from moeedge.scheduler.measurement import measurement_file, parse_measurement, write_measurement

SCHEMA = 1
_HEADER_BYTES = 1 << 16  # of the file, that its hash covers: metadata and the first tensors' names
_KEPT = 0.5  # of earlier runs' counts at each start: what a user does with a model changes


class KeptActivations:
    """Counts of one model's experts over all runs on this machine.

    counts: float64 [n_layers, n_experts], activations; those of earlier runs weigh less. n_tokens: that they are of.
    """

    def __init__(self, counts: NDArray[np.float64], n_tokens: float, file: Path | None) -> None:
        self.counts = counts
        self.n_tokens = n_tokens
        self._file = file  # None: there is no cache folder

    @classmethod
    def open(cls, model: Path, n_layers: int, n_experts: int) -> KeptActivations:
        """What earlier runs have kept; zeros where there is nothing, or nothing usable."""
        empty = np.zeros((n_layers, n_experts))
        try:
            file = _file(model)
        except OSError:
            return cls(empty, 0.0, None)

        def make(fields: dict[str, Any]) -> KeptActivations:
            counts = np.asarray(fields["counts"], dtype=np.float64)
            n_tokens = float(fields["n_tokens"])
            if counts.shape != empty.shape or not np.isfinite(counts).all() or counts.min() < 0 or not n_tokens >= 0:
                raise ValueError("these are not the activations of this model")
            return cls(counts * _KEPT, n_tokens * _KEPT, file)

        try:
            return parse_measurement(file.read_text(encoding="utf-8"), SCHEMA, make)
        except (OSError, ValueError):
            return cls(empty, 0.0, file)

    def add(self, observation: Observation) -> None:
        """Counts a step or a prompt."""
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
        rows = np.concatenate(chosen) if chosen else np.zeros((0, 3))
        return rows[np.argsort(-rows[:, 0], kind="stable")][:, 1:].astype(np.int32)

    def save(self) -> None:
        """Keeps the counts for the next run. Raises OSError where they cannot be written."""
        if self._file is None or self.n_tokens == 0:
            return
        counts = np.round(self.counts, 1).tolist()
        text = json.dumps({"schema": SCHEMA, "n_tokens": round(self.n_tokens, 1), "counts": counts})
        write_measurement(self._file, text)


def _file(model: Path) -> Path:
    """Where the counts of the model are kept. Raises OSError."""
    with model.open("rb") as opened:
        header = hashlib.sha256(opened.read(_HEADER_BYTES)).hexdigest()
    conditions = {"activations": SCHEMA, "model": model.name, "model_bytes": model.stat().st_size, "header": header}
    return measurement_file(f"{model.name}-activations", conditions)
