"""The result of `moeedge bench --parallel`: texts that were decoded together, and the batch-size curve."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from moeedge.ui.tables import Column, narrow_markdown, ratio_column, text_column

if TYPE_CHECKING:
    from moeedge.bench.records import BenchRow


@dataclass(frozen=True)
class BatchCurve:
    """Speed-ups of one mode at one draft length, with one expert cache, by N."""

    name: str
    measured: dict[int, float]  # by N
    samples: dict[int, tuple[float, ...]]

    @property
    def peak(self) -> int:
        """N of the largest measured speed-up."""
        return max(self.measured, key=lambda n: self.measured[n])


def batch_curves(rows: Sequence[BenchRow]) -> list[BatchCurve]:
    """Returns the curves of the rows' modes with drafts, in the order of the rows."""
    curves: dict[str, BatchCurve] = {}
    for row in rows:
        figures = row.parallel
        if figures is None or figures.speed_up is None:
            continue
        curve = curves.setdefault(figures.curve, BatchCurve(figures.curve, {}, {}))
        curve.measured[figures.n_parallel] = figures.speed_up
        curve.samples[figures.n_parallel] = figures.speed_up_samples
    return list(curves.values())


def _output(row: BenchRow) -> str | None:
    return None if row.output is None else row.output.summary


_COLUMNS = (
    text_column("test", "test"),
    Column("parallel", lambda row: row.parallel.n_parallel),
    text_column("mode", "mode"),
    Column("gamma", lambda row: row.setup["gamma"] or None),
    text_column("policy", lambda row: "" if row.policy == "none" else row.policy),
    Column("cache", "cache_ratio", "g"),
    Column("pp t/s", lambda row: row.pp and row.pp.mean, ".1f"),
    Column("t/s", lambda row: row.tg and row.tg.mean, ".2f"),
    Column("+-", lambda row: row.tg and row.tg.stddev, ".2f"),
    Column("t/s each", lambda row: row.parallel.sequence_ts, ".2f"),
    Column("partial", lambda row: f"{len(row.samples)} of {row.n_planned}" if row.is_partial else None),
    Column("accepted", "acceptance_rate", ".2f"),
    Column("tokens/step", "tokens_per_step", ".2f"),
    Column("experts/step", "experts_per_verification", ".1f"),
    Column("pair hits", lambda row: row.cache.hit_rate_pairs, ".3f"),
    Column("output", _output),
    ratio_column("/ stock-ar", "ratio"),
    ratio_column("speed-up", lambda row: row.parallel.speed_up),
)
_OF_CACHE = {"policy", "cache", "pair hits"}


def parallel_markdown(rows: Sequence[BenchRow]) -> str:
    """A row per mode, draft length and number of texts."""
    left_out = set() if any(row.cache_ratio is not None for row in rows) else _OF_CACHE
    return narrow_markdown([column for column in _COLUMNS if column.title not in left_out], rows, n_keys=4)


def curve_lines(rows: Sequence[BenchRow]) -> list[str]:
    """How the columns are to be read, and each curve in one line."""
    curves = batch_curves(rows)
    return [
        "t/s: of all texts, in steps of as many texts as asked for. speed-up: over plain decoding of as many texts.",
        *(_curve_line(curve) for curve in curves),
    ]


def _curve_line(curve: BatchCurve) -> str:
    numbers = ", ".join(f"{value:.2f}" for value in curve.measured.values())
    sizes = ", ".join(map(str, curve.measured))
    return f"{curve.name}: {numbers} for N = {sizes}; the most with N = {curve.peak}."
