"""The result of `moeedge bench --parallel`: texts that were decoded together, and the batch-size curve."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.bench.batch_curve import BatchCurve, batch_curves
from moeedge.ui.tables import Column, narrow_markdown, text_column

if TYPE_CHECKING:
    from moeedge.bench.records import BenchRow


def _output(row: BenchRow) -> str | None:
    return None if row.output is None else row.output.summary


def _prediction(row: BenchRow, value: float | None) -> str | None:
    if row.parallel is None or value is None:
        return None
    return f"{'~' if row.parallel.beyond_measured else ''}{value:.3f}"


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
    Column("/ stock-ar", "ratio", ".3f"),
    Column("speed-up", lambda row: row.parallel.speed_up, ".3f"),
    Column("predicted", lambda row: _prediction(row, row.parallel.predicted_speed_up)),
    Column("by tokens/step", lambda row: _prediction(row, row.parallel.predicted_by_tokens)),
)
_OF_CACHE = {"policy", "cache", "pair hits"}
_OF_FIT = {"predicted", "by tokens/step"}


def parallel_markdown(rows: Sequence[BenchRow]) -> str:
    """A row per mode, draft length and number of texts."""
    left_out = set() if any(row.cache_ratio is not None for row in rows) else _OF_CACHE
    if all(row.parallel is None or row.parallel.predicted_by_tokens is None for row in rows):
        left_out = left_out | _OF_FIT
    return narrow_markdown([column for column in _COLUMNS if column.title not in left_out], rows, n_keys=4)


def curve_lines(rows: Sequence[BenchRow]) -> list[str]:
    """How the columns are to be read, and each curve in one line."""
    curves = batch_curves(rows)
    return [
        "t/s: of all texts, in steps of as many texts as asked for. speed-up: over plain decoding of as many texts.",
        *(
            ["~: more tokens in a batch than the fit was measured with."]
            if any(curve.beyond for curve in curves)
            else []
        ),
        *(_curve_line(curve) for curve in curves),
    ]


def _curve_line(curve: BatchCurve) -> str:
    numbers = ", ".join(f"{value:.2f}" for value in curve.measured.values())
    sizes = ", ".join(map(str, curve.measured))
    line = f"{curve.name}: {numbers} for N = {sizes}; the most with N = {curve.peak}"
    if not curve.errors:
        return f"{line}."
    predicted = ", ".join(f"{value:.2f}" for value in curve.predicted.values())
    worst = max(curve.errors.values(), key=abs)
    return f"{line}. Predicted {predicted}: largest error {worst:+.1%}."
