"""The plots of `bench --plot`, from the rows of a benchmark."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from moeedge.bench.config import BenchMode
from moeedge.bench.figures import BudgetFigures, BudgetPoint
from moeedge.bench.records import BenchRow
from moeedge.ui.plots import Line, Plot, Point, default_plots, lines_of, save_plots

_N_COLUMNS = 3
_SCORED = "score / stock-ar's, mean of the categories"
_AGREED = "agreement with stock-ar"
_SPEED = "decoding speed / stock-ar's"


def draw(rows: Sequence[BenchRow], path: Path) -> bool:
    """Draws what the run compares. Returns False without figures. Raises InputError for an unwritable file."""
    rows = _trusted(rows)
    plots = next(
        filter(None, (make(rows) for make in (batch_plots, speculation_plots, _plots_of_lists, cache_plots))), []
    )
    drafted = next((row.setup.draft for row in rows if row.setup.gamma), None)
    device = next((row.setup.device for row in rows if row.cache_ratio is not None), None)
    if plots:
        one_test = None if len({row.test for row in rows}) > 1 else rows[0].test
        parts = [rows[0].setup.model, drafted and f"draft {drafted}", one_test, device and f"device {device}"]
        parts.append("expert budgets (lossy), numbers: the budget" if any(row.is_lossy for row in rows) else None)
        save_plots(plots, path, title=", ".join(filter(None, parts)), n_columns=_N_COLUMNS)
    return bool(plots)


def _plots_of_lists(rows: Sequence[BenchRow]) -> list[Plot]:
    return default_plots(rows, lambda row: row.label) if rows else []


def _trusted(rows: Sequence[BenchRow]) -> list[BenchRow]:
    """The rows without the ratios of disturbed ones, which the tables withhold, too."""
    return [_without_ratios(row) if row.disturbed else row for row in rows]


def _without_ratios(row: BenchRow) -> BenchRow:
    parallel = row.parallel and replace(row.parallel, speed_up=None, speed_up_samples=())
    figures = row.figures and replace(
        row.figures,
        total=replace(row.figures.total, ratio=None),
        by_category=tuple(replace(each, ratio=None) for each in row.figures.by_category),
    )
    return replace(row, ratio=None, ratio_pp=None, parallel=parallel, figures=figures)


def cache_plots(rows: Sequence[BenchRow]) -> list[Plot]:
    """Hit rate and speed against the cache ratio, a line per policy, of the first test with a cache; [] without one."""
    test = next((row.test for row in rows if row.cache_ratio is not None), None)
    shown = [row for row in rows if row.test == test]
    cached = [row for row in shown if row.cache_ratio is not None]
    if not cached:
        return []
    is_one = len({row.mode for row in cached}) == 1

    def over_ratio(value: Callable[[BenchRow], float | None]) -> list[Line]:
        names = (row.policy if is_one else f"{row.policy}, {row.mode}" for row in cached)
        return lines_of(Point(name, row.cache_ratio, value(row)) for name, row in zip(names, cached, strict=True))

    drafted = next((row.ratio for row in shown if row.mode == "stock-sd"), None)
    levels = {"stock-ar": 1.0} | ({} if drafted is None else {"stock-sd": drafted})
    x_label, y_label = "cache ratio: share of all experts cached on the device", "pair hits: share of all pairs"
    return [
        Plot("", x_label, y_label, lines=over_ratio(lambda row: row.cache.hit_rate_pairs)),
        Plot("", x_label, _SPEED, lines=over_ratio(lambda row: row.ratio), levels=levels),
    ]


def batch_plots(rows: Sequence[BenchRow]) -> list[Plot]:
    """Throughput and speed-up by the number of texts decoded together, with bars over all pairs; [] without pairs."""
    figures = [(row.parallel, row.tg) for row in rows if row.parallel is not None]
    throughput = lines_of(Point(own.curve, own.n_parallel, tg and tg.mean) for own, tg in figures)
    speed_up = lines_of(
        Point(own.curve, own.n_parallel, mean, mean - min(own.speed_up_samples), max(own.speed_up_samples) - mean)
        for own, _ in figures
        if (mean := own.speed_up) is not None
    )
    over, x_label, plain = "speed-up over plain decoding of as many texts", "texts decoded together", "plain decoding"
    plots = [
        Plot("", x_label, "tokens per second, all texts", lines=throughput, log_base=2),
        Plot("", x_label, over, lines=speed_up, log_base=2, levels={plain: 1.0}),
    ]
    return plots if speed_up else []


def speculation_plots(rows: Sequence[BenchRow]) -> list[Plot]:
    """Expert budgets, quality over speed-up (MoE-Spec, Figures 3, 9 and 10), then draft lengths (Figure 4).

    All categories together, then one by one. The quality is the score, relative to stock-ar's in the first plot, as
    in the paper; without scores, the share of stock-ar's tokens before the first difference. [] without figures.
    """
    compared = [(row, row.figures) for row in rows if row.figures is not None]
    scored = any(own.total.score is not None for _, own in compared)
    total = _SCORED if scored else _AGREED
    points: dict[str, list[Point]] = {total: []}  # by the title of their plot
    for row, own in compared:
        quality, error = (row.output.agreement if row.output is not None else None), 0.0
        if scored:
            quality, error = _mean_of_categories(own.by_category or (own.total,))
        points[total].append(_budget_point(own.mode, own.total.ratio, quality, error))
        for each in own.by_category if scored else ():
            point = _budget_point(own.mode, each.ratio, each.score, each.score_stderr)
            points.setdefault(each.category, []).append(point)
    plots = [
        Plot(title, _SPEED, "quality" if title == total else "score", lines=lines, bottom=None, least_range=0.05)
        for title in points  # the least range: or else rounding would fill the plot
        if (lines := lines_of(points[title]))
    ]
    return plots + _length_plots([(row, own) for row, own in compared if own.mode.drafts])


def _mean_of_categories(points: Sequence[BudgetPoint]) -> tuple[float | None, float]:
    """Returns the quality relative to stock-ar's, mean over categories, with its standard error."""
    scored = [(point, point.quality) for point in points if point.quality is not None]
    if not scored:
        return None, 0.0
    # a category in which every answer is wrong has no error
    errors = [quality / point.score * (point.score_stderr or 0.0) if point.score else 0.0 for point, quality in scored]
    return fmean(quality for _, quality in scored), sum(error**2 for error in errors) ** 0.5 / len(scored)


def _budget_point(mode: BenchMode, ratio: float | None, quality: float | None, error: float | None) -> Point:
    """A point of the curve of modes that differ from this one in the budget only, marked with the budget."""
    curve, mark = replace(mode, budget=None).label, ""
    if mode.budget is not None:
        curve, mark = f"{curve} budgets {mode.budget.ranking} {mode.budget.coverage}", str(mode.budget.budget)
    return Point(curve, ratio, quality, error or 0.0, error or 0.0, mark)


def _length_plots(drafted: Sequence[tuple[BenchRow, BudgetFigures]]) -> list[Plot]:
    """Experts and speed-up over draft length, speed-up over experts, a line per budget; [] for one length."""
    if len({row.setup.gamma for row, _ in drafted}) < 2:
        return []
    length, used = "tokens per draft (gamma)", "experts per layer and verification"
    rows = [
        (
            row.mode if own.mode.budget is None else own.mode.budget.label,
            {length: float(row.setup.gamma), used: own.total.experts_kept, _SPEED: own.total.ratio},
        )
        for row, own in drafted
    ]
    return [
        Plot("", x, y, lines=lines_of(Point(name, values[x], values[y]) for name, values in rows))
        for x, y in ((length, used), (length, _SPEED), (used, _SPEED))
    ]
