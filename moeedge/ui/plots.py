"""The pictures of `bench --plot`, drawn by Matplotlib without a display.

Matplotlib takes half a second to import, so it is imported where a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from moeedge.errors import InputError
from moeedge.ui.bench_views import batch_curves

if TYPE_CHECKING:
    from moeedge.bench.figures import BudgetPoint
    from moeedge.bench.records import BenchRow

_DPI = 130
_N_COLUMNS = 3
_LEAST_RANGE = 0.05  # of a panel's qualities: or else rounding would fill the panel
_SCORED = "score / stock-ar's, mean of the categories"
_AGREED = "agreement with stock-ar"
_SPEED = "decoding speed / stock-ar's"
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
MARKERS = "osD^vPX*"


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches on a canvas without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes the picture; the suffix selects the format. Raises InputError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the picture {path}: {reason}.", "Choose another path.") from None


@dataclass(frozen=True)
class Point:
    """A point of a curve; bars go from y - below to y + above."""

    x: float
    y: float
    below: float = 0.0
    above: float = 0.0
    name: str = field(default="", kw_only=True)  # what it is marked with


Curves = dict[str, list[Point]]


@dataclass(frozen=True, kw_only=True)
class Panel:
    """One diagram of a picture. A curve's name has the same colour in all of them."""

    x_label: str
    y_label: str
    curves: Curves
    title: str = ""
    levels: Mapping[str, float] = field(default_factory=dict)  # horizontal lines
    is_log: bool = False  # the x axis, with a mark at each x
    least_range: float | None = None  # of y; None: from 0


def draw(rows: Sequence[BenchRow], path: Path) -> bool:
    """`bench --plot`: what the run compares, texts together, expert budgets and draft lengths, or expert caches.

    Returns False, and writes no file, where no row has such figures. Raises InputError where the file cannot be
    written.
    """
    panels = next(filter(None, (make(rows) for make in (batch_panels, speculation_panels, cache_panels))), [])
    if not panels:
        return False
    n_columns = min(len(panels), _N_COLUMNS)
    n_rows = -(-len(panels) // n_columns)
    figure = new_figure(4.6 * n_columns, 3.8 * n_rows + 0.8)
    figure.suptitle(_title(rows))
    names = list(dict.fromkeys(name for panel in panels for name in panel.curves))
    handles: dict[str, Any] = {}
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).reshape(-1)
    for axes, panel in zip(all_axes, panels, strict=False):
        handles |= _draw_panel(axes, panel, names)
    for axes in all_axes[len(panels) :]:
        axes.axis("off")
    figure.legend(
        list(handles.values()), list(handles), loc="outside lower center", ncols=3, fontsize="small", frameon=False
    )
    save_figure(figure, path)
    return True


def _title(rows: Sequence[BenchRow]) -> str:
    drafted = next((row.setup["draft"] for row in rows if row.setup["gamma"]), None)
    device = next((row.setup["device"] for row in rows if row.cache_ratio is not None), None)
    parts = [rows[0].setup["model"], drafted and f"draft {drafted}", rows[0].test, device and f"device {device}"]
    parts.append("expert budgets (lossy), numbers: the budget" if any(row.is_lossy for row in rows) else None)
    return ", ".join(part for part in parts if part)


def _draw_panel(axes: Any, panel: Panel, names: Sequence[str]) -> dict[str, Any]:
    """Draws one panel; returns what the legend shows of each curve. names: of all panels."""
    handles = {}
    for name, points in panel.curves.items():
        index = names.index(name)
        handles[name] = axes.errorbar(
            [point.x for point in points],
            [point.y for point in points],
            yerr=([point.below for point in points], [point.above for point in points]),
            color=COLOURS[index % len(COLOURS)],
            marker=MARKERS[index % len(MARKERS)],
            markersize=5,
            linewidth=1.2,
            elinewidth=0.6,
        )
        for point in points:
            axes.annotate(point.name, (point.x, point.y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    for index, (name, level) in enumerate(panel.levels.items()):
        handles[name] = axes.axhline(level, color="0.5", linestyle=":-"[index % 2], linewidth=0.8)
    values = [point.y for points in panel.curves.values() for point in points]
    if panel.least_range is None:
        axes.set_ylim(bottom=0)
    elif max(values) - min(values) < panel.least_range:
        axes.set_ylim(min(values) - panel.least_range, max(values) + panel.least_range)
    if panel.is_log:
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({point.x for points in panel.curves.values() for point in points}))
        axes.xaxis.set_major_formatter("{x:g}")
    axes.set_title(panel.title, fontsize="small")
    axes.set_xlabel(panel.x_label)
    axes.set_ylabel(panel.y_label)
    axes.grid(alpha=0.3)
    return handles


def _curves(
    rows: Iterable[BenchRow],
    name: Callable[[BenchRow], str],
    x: Callable[[BenchRow], float | None],
    y: Callable[[BenchRow], float | None],
) -> Curves:
    """A curve per name, in order of x; rows without an x or a y are left out."""
    curves: Curves = {}
    for row in rows:
        at, value = x(row), y(row)
        if at is not None and value is not None:
            curves.setdefault(name(row), []).append(Point(at, value))
    return {name: sorted(points, key=lambda point: (point.x, point.y)) for name, points in curves.items()}


def cache_panels(rows: Sequence[BenchRow]) -> list[Panel]:
    """Hit rate and speed against the cache ratio, a line per policy, of the first test with a cache; [] without one."""
    test = next((row.test for row in rows if row.cache_ratio is not None), None)
    shown = [row for row in rows if row.test == test]
    cached = [row for row in shown if row.cache_ratio is not None]
    if not cached:
        return []
    is_one = len({row.mode for row in cached}) == 1

    def over_ratio(value: Callable[[BenchRow], float | None]) -> Curves:
        return _curves(
            cached,
            lambda row: row.policy if is_one else f"{row.policy}, {row.mode}",
            lambda row: row.cache_ratio,
            value,
        )

    drafted = next((row.ratio for row in shown if row.mode == "stock-sd"), None)
    levels = {"stock-ar": 1.0} | ({} if drafted is None else {"stock-sd": drafted})
    x_label = "cache ratio: share of all experts cached on the device"
    hits, speed = over_ratio(lambda row: row.cache.hit_rate_pairs), over_ratio(lambda row: row.ratio)
    return [
        Panel(x_label=x_label, y_label="pair hits: share of (token, expert) pairs", curves=hits),
        Panel(x_label=x_label, y_label=_SPEED, curves=speed, levels=levels),
    ]


def batch_panels(rows: Sequence[BenchRow]) -> list[Panel]:
    """Throughput and speed-up by the number of texts decoded together; bars from the smallest to the largest pair.

    [] where no mode with drafts was measured next to plain decoding.
    """
    throughput = _curves(
        rows,
        lambda row: row.parallel.curve if row.parallel is not None else "",
        lambda row: None if row.parallel is None else row.parallel.n_parallel,
        lambda row: None if row.tg is None else row.tg.mean,
    )
    speed_up: Curves = {}
    for name, points in batch_curves(rows).items():
        for n, figures in points.items():
            value, pairs = figures.speed_up or 0.0, figures.speed_up_samples
            speed_up.setdefault(name, []).append(Point(n, value, value - min(pairs), max(pairs) - value))
    over, x_label = "speed-up over plain decoding of as many texts", "texts decoded together"
    panels = [
        Panel(x_label=x_label, y_label="tokens per second, all texts", curves=throughput, is_log=True),
        Panel(x_label=x_label, y_label=over, curves=speed_up, is_log=True, levels={"plain decoding": 1.0}),
    ]
    return panels if speed_up else []


def speculation_panels(rows: Sequence[BenchRow]) -> list[Panel]:
    """Expert budgets, quality over speed-up (MoE-Spec, Figures 3, 9 and 10), then draft lengths (Figure 4).

    All categories together, then one by one. The quality is the score, relative to stock-ar's in the first panel, as
    in the paper; without scores, it is the share of stock-ar's tokens before the first difference. [] where no row
    has a figure.
    """
    rows = [row for row in rows if row.figures is not None]
    scored = any(row.figures is not None and row.figures.total.score is not None for row in rows)
    panels: dict[str, Curves] = {_SCORED if scored else _AGREED: {}}
    for row in rows:
        assert row.figures is not None
        points = row.figures.by_category
        quality = row.output.agreement if row.output is not None else None
        mean = _mean_of_categories(points or (row.figures.total,)) if scored else (quality, 0.0)
        _add(panels[_SCORED if scored else _AGREED], row, row.figures.total.ratio, *mean)
        for point in points if scored else ():
            _add(panels.setdefault(point.category, {}), row, point.ratio, point.score, point.score_stderr)
    shown = [
        Panel(
            title=title,
            x_label=_SPEED,
            y_label="quality" if title in (_SCORED, _AGREED) else "score",
            curves={name: sorted(points, key=lambda point: int(point.name or 0)) for name, points in curves.items()},
            least_range=_LEAST_RANGE,
        )
        for title, curves in panels.items()
        if curves
    ]
    return shown + _length_panels(rows)


def _mean_of_categories(points: Sequence[BudgetPoint]) -> tuple[float | None, float]:
    """Returns the quality relative to stock-ar's, mean over categories, with its standard error."""
    known = [(point, point.quality) for point in points if point.quality is not None]
    if not known:
        return None, 0.0
    # a category in which every answer is wrong has no error
    errors = [quality / point.score * (point.score_stderr or 0.0) if point.score else 0.0 for point, quality in known]
    return fmean(quality for _, quality in known), sum(error**2 for error in errors) ** 0.5 / len(known)


def _add(curves: Curves, row: BenchRow, ratio: float | None, quality: float | None, error: float | None) -> None:
    """Adds a row's point to the curve of those that differ from it in the budget only."""
    assert row.figures is not None
    mode = row.figures.mode
    if ratio is None or quality is None:
        return
    choices = [replace(mode, budget=None).label]
    if mode.budget is not None:
        choices += ["budgets", mode.budget.ranking, mode.budget.coverage]
    name = "" if mode.budget is None else str(mode.budget.budget)
    curves.setdefault(" ".join(choices), []).append(Point(ratio, quality, error or 0.0, error or 0.0, name=name))


def _length_panels(rows: Sequence[BenchRow]) -> list[Panel]:
    """Experts and speed-up over draft length, speed-up over experts, a line per budget; [] for one length."""
    drafted = [row for row in rows if row.figures is not None and row.figures.mode.drafts]
    if len({row.setup["gamma"] for row in drafted}) < 2:
        return []
    length, used = "tokens per draft (gamma)", "experts per layer and verification"
    quantities: dict[str, Callable[[BenchRow], float | None]] = {
        length: lambda row: float(row.setup["gamma"]),
        used: lambda row: None if row.figures is None else row.figures.total.experts_kept,
        _SPEED: lambda row: None if row.figures is None else row.figures.total.ratio,
    }

    def name(row: BenchRow) -> str:
        budget = row.figures.mode.budget if row.figures is not None else None
        return row.mode if budget is None else budget.label

    return [
        Panel(x_label=x, y_label=y, curves=_curves(drafted, name, quantities[x], quantities[y]))
        for x, y in ((length, used), (length, _SPEED), (used, _SPEED))
    ]
