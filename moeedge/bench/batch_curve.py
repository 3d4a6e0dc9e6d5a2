"""The batch-size curve: what speculation gains over plain decoding where N texts are decoded together.

MoESD, section 4.1 (Figure 2): the speed-up rises while a larger batch uses more of the experts anyway, and falls where
computing takes longer than loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moeedge.bench.records import BenchRow


@dataclass(frozen=True)
class BatchCurve:
    """Speed-ups of one mode at one draft length, with one expert cache, by N."""

    name: str
    measured: dict[int, float]  # by N
    samples: dict[int, tuple[float, ...]]
    predicted: dict[int, float]  # empty without a fit
    beyond: set[int]  # N whose verifications have more tokens than any batch of the fit

    @property
    def peak(self) -> int:
        """N of the largest measured speed-up."""
        return max(self.measured, key=lambda n: self.measured[n])

    @property
    def errors(self) -> dict[int, float]:
        """Predicted over measured, minus 1, by N."""
        return {n: self.predicted[n] / value - 1 for n, value in self.measured.items() if n in self.predicted}


def batch_curves(rows: Sequence[BenchRow]) -> list[BatchCurve]:
    """Returns the curves of the rows' modes with drafts, in the order of the rows."""
    curves: dict[str, BatchCurve] = {}
    for row in rows:
        figures = row.parallel
        if figures is None or figures.speed_up is None:
            continue
        curve = curves.setdefault(figures.curve, BatchCurve(figures.curve, {}, {}, {}, set()))
        curve.measured[figures.n_parallel] = figures.speed_up
        curve.samples[figures.n_parallel] = figures.speed_up_samples
        if figures.predicted_speed_up is not None:
            curve.predicted[figures.n_parallel] = figures.predicted_speed_up
            if figures.beyond_measured:
                curve.beyond.add(figures.n_parallel)
    return list(curves.values())
