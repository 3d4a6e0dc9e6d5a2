"""Pictures of expert budgets: quality over speed-up (MoE-Spec, Figures 3, 9 and 10), and draft lengths (Figure 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from moeedge.ui.plots import COLOURS, MARKERS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.bench.budgets import BudgetPoint
    from moeedge.bench.records import BenchRow

_N_COLUMNS = 3
_LEAST_RANGE = 0.05  # of a panel's qualities
_SCORED = "score / stock-ar's, mean of the categories"
_AGREED = "agreement with stock-ar"


@dataclass(frozen=True)
class Operating:
    """A point of a curve: a mode at one budget, its quality with error and its speed-up."""

    budget: int | None  # experts per layer; None: no budget
    ratio: float  # decoding speed over stock-ar's
    quality: float
    error: float  # of the quality

    @property
    def name(self) -> str:
        """What the point is marked with."""
        return "" if self.budget is None else str(self.budget)


Curves = dict[str, list[Operating]]  # by mode and the choices apart from the budget


def draw_quality(rows: Sequence[BenchRow], path: Path) -> bool:
    """`bench --expert-budget --plot`: all categories together, one by one, then draft lengths if they are compared.

    The quality is the score, relative to stock-ar's in the first panel, as in the paper; without scores, it is the
    share of stock-ar's tokens before the first difference. Returns False, and writes no file, where no row has a
    figure. Raises InputError where the file cannot be written.
    """
    rows = [row for row in rows if row.figures is not None]
    if not rows:
        return False
    panels = quality_panels(rows)
    by_length = length_panels(rows)
    n_panels = len(panels) + len(by_length)
    if n_panels == 0:
        return False
    n_columns = min(n_panels, _N_COLUMNS)
    figure = new_figure(4.6 * n_columns, 3.8 * -(-n_panels // n_columns) + 0.8)
    setup = rows[0].setup
    drafted = next((row.setup for row in rows if row.setup["gamma"]), setup)
    figure.suptitle(
        f"{setup['model']}, draft {drafted['draft']}, {rows[0].test}: expert budgets (lossy), numbers: the budget"
    )
    axes = figure.subplots(-(-n_panels // n_columns), n_columns, squeeze=False).reshape(-1)
    names = list(dict.fromkeys(name for curves in panels.values() for name in curves))
    handles: dict[str, Any] = {}
    for panel, (title, curves) in zip(axes, panels.items(), strict=False):
        handles |= _draw_curves(panel, title, curves, names)
    for panel, lengths in zip(axes[len(panels) :], by_length, strict=False):
        _draw_lengths(panel, lengths)
    for panel in axes[n_panels:]:
        panel.axis("off")
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    save_figure(figure, path)
    return True


def quality_panels(rows: Sequence[BenchRow]) -> dict[str, Curves]:
    """Returns the curves by the title of their panel: the entire dataset, then its categories."""
    scored = any(_scored(row) for row in rows)
    whole: Curves = {}
    panels: dict[str, Curves] = {}
    for row in rows:
        figures = row.figures
        assert figures is not None
        agreement = None if row.output is None else row.output.agreement
        mean = _mean_of_categories(figures.by_category or (figures.total,)) if scored else (agreement, 0.0)
        _add(whole, row, figures.total.ratio, *mean)
        for point in figures.by_category if scored else ():
            _add(panels.setdefault(point.category, {}), row, point.ratio, point.score, point.score_stderr)
    panels = {_SCORED if scored else _AGREED: whole, **panels}
    return {title: curves for title, curves in panels.items() if curves}


def _scored(row: BenchRow) -> bool:
    return row.figures is not None and row.figures.total.score is not None


def _mean_of_categories(points: Sequence[BudgetPoint]) -> tuple[float | None, float]:
    """Returns the quality relative to stock-ar's, mean over categories, with its standard error."""
    known = [(point, point.quality) for point in points if point.quality is not None]
    if not known:
        return None, 0.0
    # a category in which every answer is wrong has no error
    errors = [quality / point.score * (point.score_stderr or 0.0) if point.score else 0.0 for point, quality in known]
    return fmean(quality for _, quality in known), sum(error**2 for error in errors) ** 0.5 / len(known)


def _add(curves: Curves, row: BenchRow, ratio: float | None, quality: float | None, error: float | None) -> None:
    if ratio is None or quality is None or row.figures is None:
        return
    mode = row.figures.mode
    budget = None if mode.budget is None else mode.budget.budget
    curves.setdefault(_family(row), []).append(Operating(budget, ratio, quality, error or 0.0))


def _family(row: BenchRow) -> str:
    """Returns what a row has in common with those that differ in the budget only."""
    assert row.figures is not None
    mode = row.figures.mode
    choices = [replace(mode, budget=None).label]
    if mode.budget is not None:
        choices += ["budgets", mode.budget.ranking, mode.budget.coverage]
    return " ".join(choices)


def _draw_curves(axes: Any, title: str, curves: Curves, names: Sequence[str]) -> dict[str, Any]:
    """Draws one panel; returns what the legend shows of each curve. names: of all panels, which agree in colours."""
    handles = {}
    for name, unsorted in curves.items():
        index = names.index(name)
        points = sorted(unsorted, key=lambda point: -1.0 if point.budget is None else point.budget)
        single = all(point.budget is None for point in points)
        handles[name] = axes.errorbar(
            [point.ratio for point in points],
            [point.quality for point in points],
            yerr=[point.error for point in points],
            color=COLOURS[index % len(COLOURS)],
            marker="D" if single else MARKERS[index % len(MARKERS)],
            linestyle="" if single else "-",
            markersize=5,
            linewidth=1.2,
            elinewidth=0.6,
        )
        for point in points:
            axes.annotate(
                point.name, (point.ratio, point.quality), fontsize=7, xytext=(3, 3), textcoords="offset points"
            )
    axes.set_title(title, fontsize="small")
    axes.set_xlabel("decoding speed / stock-ar's")
    axes.set_ylabel("quality" if title in (_SCORED, _AGREED) else "score")
    values = [point.quality for points in curves.values() for point in points]
    if max(values) - min(values) < _LEAST_RANGE:  # or else rounding would fill the panel
        axes.set_ylim(min(values) - _LEAST_RANGE, max(values) + _LEAST_RANGE)
    axes.grid(alpha=0.3)
    return handles


@dataclass(frozen=True)
class LengthPanel:
    """One panel of Figure 4: a line per budget, a point per draft length."""

    x_label: str
    y_label: str
    lines: dict[str, list[tuple[float, float]]]


def length_panels(rows: Sequence[BenchRow]) -> list[LengthPanel]:
    """Returns Figure 4's panels: experts and speed-up over draft length, speed-up over experts; [] for one length."""
    drafted = [row for row in rows if row.figures is not None and row.figures.mode.drafts]
    if len({row.setup["gamma"] for row in drafted}) < 2:
        return []

    def lines(
        x: Callable[[BenchRow], float | None], y: Callable[[BenchRow], float | None]
    ) -> dict[str, list[tuple[float, float]]]:
        found: dict[str, list[tuple[float, float]]] = {}
        for row in drafted:
            point = (x(row), y(row))
            if point[0] is not None and point[1] is not None:
                budget = row.figures.mode.budget if row.figures is not None else None
                name = row.mode if budget is None else budget.label
                found.setdefault(name, []).append((point[0], point[1]))
        return found

    def gamma(row: BenchRow) -> float:
        return float(row.setup["gamma"])

    def experts(row: BenchRow) -> float | None:
        return None if row.figures is None else row.figures.total.experts_kept

    def ratio(row: BenchRow) -> float | None:
        return None if row.figures is None else row.figures.total.ratio

    length, used, speed = (
        "tokens per draft (gamma)",
        "experts per layer and verification",
        "decoding speed / stock-ar's",
    )
    return [
        LengthPanel(length, used, lines(gamma, experts)),
        LengthPanel(length, speed, lines(gamma, ratio)),
        LengthPanel(used, speed, lines(experts, ratio)),
    ]


def _draw_lengths(axes: Any, panel: LengthPanel) -> None:
    for index, (name, points) in enumerate(panel.lines.items()):
        axes.plot(
            *zip(*sorted(points), strict=True),
            label=name,
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
        )
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    axes.legend(loc="best", fontsize=7)
