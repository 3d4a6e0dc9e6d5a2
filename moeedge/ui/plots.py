"""Plots: a `Plot` is data; all are drawn by one renderer, as a file or as SVG inside a page.

Matplotlib draws without a display. In SVG its colours become CSS variables: text is `currentColor`, the grid `--grid`,
the n-th line `--line-n`; so one plot suits light and dark pages. Text stays text.
"""

from __future__ import annotations

import io
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from moeedge.paths import write_file
from moeedge.records import as_dict, keys

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")  # of light pages
DARK_COLOURS = ("#6cb6ff", "#ff7b72", "#56d364", "#d2a8ff", "#ffa657", "#56d4dd", "#d8a28f", "#a8a8a8")
_MARKERS = "sD^vPX*"  # of lines for which no colour is left
_TEXT, _GRID = "#0a0b0c", "#d0d1d2"  # in SVG replaced by the page's; legible on white
SIZE = (4.8, 3.5)  # inches of a plot: a phone shows 1 point as 0.9 pixels
_LEGEND_ROW = 0.18  # inches
_LABEL = 36  # characters in a line of an axis
_WIDE_LABEL = 27  # characters, of which two columns of the legend have room
_STYLE = {
    **{f"{part}.color": _TEXT for part in ("text", "xtick", "ytick")},
    **{f"axes.{part}": _TEXT for part in ("edgecolor", "labelcolor", "titlecolor")},
    **{"axes.grid": True, "axes.axisbelow": True, "grid.color": _GRID, "grid.linewidth": 0.6},
    **{"axes.spines.top": False, "axes.spines.right": False, "axes.titlesize": 10.5, "legend.fontsize": 9},
    **{"font.size": 10.5, "lines.markersize": 4, "savefig.dpi": 150, "svg.fonttype": "none"},
}


def _variables(colours: Sequence[str], **others: str) -> str:
    values = {f"line-{place}": colour for place, colour in enumerate(colours, start=1)} | others
    return " ".join(f"--{name}: {value};" for name, value in values.items())


# CSS variables of a page with plots
PAGE_LIGHT = _variables(COLOURS, text="#1c1e21", faint="#5b6168", paper="#ffffff", card="#f6f7f8", grid="#d9dce0")
PAGE_DARK = _variables(DARK_COLOURS, text="#e6e8ea", faint="#a3a9b0", paper="#14171a", card="#1d2125", grid="#3a4047")


@dataclass(frozen=True)
class Line:
    """One line of a plot: a value or None per x."""

    label: str  # in several plots of a picture, a label has one colour
    values: Sequence[float | None]
    style: str = "-"  # of Matplotlib: line and marker
    colour: int | str | None = None  # index of COLOURS, or a name; None: by its place
    x: Sequence[float] = field(default=(), kw_only=True)  # (): the plot's
    errors: Sequence[tuple[float, float]] = field(default=(), kw_only=True)  # below and above each value
    marks: Sequence[str] = field(default=(), kw_only=True)  # text at each value
    width: float = field(default=1.4, kw_only=True)
    hollow: bool = field(default=False, kw_only=True)  # its markers


@dataclass(frozen=True)
class Plot:
    """One plot with its numbers: lines over an x axis, or a map of values [n_y, n_x]."""

    title: str
    x_label: str
    y_label: str
    x: Sequence[float] = ()
    lines: Sequence[Line] = ()
    levels: Mapping[str, float] = field(default_factory=dict, kw_only=True)  # labels of horizontal lines
    bottom: float | None = field(default=0.0, kw_only=True)  # of the y axis; None: by the values
    least_range: float = field(default=0.0, kw_only=True)  # of the y axis
    log_base: int = field(default=0, kw_only=True)  # of the x axis; 0: a linear one
    values: NDArray[Any] | None = field(default=None, kw_only=True)
    value_label: str = field(default="", kw_only=True)
    y: Sequence[int] = field(default=(), kw_only=True)  # names of the map's rows; (): their numbers
    section: str = field(default="", kw_only=True)  # of a page, on which its title is unique
    caption: str = field(default="", kw_only=True)

    @property
    def shown(self) -> list[Line]:
        return [line for line in self.lines if any(value is not None for value in line.values)]


class Point(NamedTuple):
    """A point of one of several lines; without x or y it is left out."""

    line: str
    x: Any
    y: Any
    below: float = 0.0  # length of the bar
    above: float = 0.0
    mark: str = ""


def lines_of(points: Iterable[Point]) -> list[Line]:
    """A line per name, in order of the numbers that mark its points, and of x."""
    by_name: dict[str, list[Point]] = {}
    for point in points:
        if point.x is not None and point.y is not None:
            by_name.setdefault(point.line, []).append(point)
    lines = []
    for name, own in by_name.items():
        _, x, y, below, above, marks = zip(*sorted(own, key=lambda point: (int(point.mark or 0), *point)), strict=True)
        errors = list(zip(below, above, strict=True)) if any(below + above) else ()
        lines.append(Line(name, y, "o-", x=x, errors=errors, marks=marks if any(marks) else ()))
    return lines


def default_plots(records: Sequence[Any], name: Callable[[Any], str]) -> list[Plot]:
    """A plot of each figure declared as y over the first declared as x that differs; name: of a record's line.

    Lines of records that differ in further figures declared as x, or as name, are named by these, too. [] where no x
    differs.
    """
    kind: Any = type(records[0])
    declared, plots = keys(kind), list[Plot]()
    rows = [(name(record), as_dict(record)) for record in records]
    for y in (key for key, each in declared.items() if each.axis == "y"):
        own = [(name, row) for name, row in rows if row[y] is not None]
        differ = [key for key, each in declared.items() if each.axis and len({row[key] for _, row in own}) > 1]
        x = next((key for key in differ if declared[key].axis == "x"), "")
        others = [key for key in differ if key != x and declared[key].axis != "y"]
        points = []
        for name_of_row, row in own if x else ():
            forms = {key: "" if row[key] is None else declared[key].form for key in others}
            line = ", ".join([name_of_row, *(f"{key} {format(row[key], form)}" for key, form in forms.items())])
            points.append(Point(line, row[x], row[y]))
        lines = [line for line in lines_of(points) if len(line.values) > 1]
        x_label, y_label = (textwrap.fill(declared[key].label, _LABEL) for key in (x, y)) if lines else ("", "")
        plots += [Plot("", x_label, y_label, lines=lines)] if lines else []
    return plots


def svg_of(plot: Plot) -> str:
    """The plot as an <svg> element whose ids begin with words of its title, without size and title."""
    key, stream = re.sub(r"\W+", "-", plot.title).lower(), io.StringIO()
    _render([plot], stream, "svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    head, _, body = text.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{key}-', body)
    body = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{key}-", body)
    for place, colour in enumerate(COLOURS, start=1):
        body = body.replace(colour, f"var(--line-{place})")
    body = body.replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {namespaces} {view[0]} role="img">{body.strip()}'


def save_plots(
    plots: Sequence[Plot], path: Path, *, title: str = "", n_columns: int = 1, size: tuple[float, float] = SIZE
) -> None:
    """Writes the plots, each of `size` inches, as one picture; the suffix is the format. Raises InputError."""
    with write_file(path, "picture") as temporary:
        form = path.suffix.removeprefix(".")
        _render(plots, temporary, form, title=title, n_columns=min(n_columns, len(plots)), size=size)


def _render(
    plots: Sequence[Plot],
    target: io.StringIO | Path,
    form: str,
    *,
    title: str = "",
    n_columns: int = 1,
    size: tuple[float, float] = SIZE,
    transparent: bool = False,
) -> None:
    """Draws the plots in rows, with one legend below them."""
    import matplotlib  # takes half a second
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    n_rows = -(-len(plots) // n_columns)
    labels = list(dict.fromkeys(line.label for plot in plots for line in plot.shown))
    labels += dict.fromkeys(label for plot in plots for label in plot.levels)
    with matplotlib.rc_context(_STYLE | {"svg.hashsalt": title}):  # the same plots give the same ids
        figure = Figure(figsize=(size[0] * n_columns, size[1] * n_rows), layout="constrained")
        FigureCanvasAgg(figure)
        all_axes = figure.subplots(n_rows, n_columns, squeeze=False).reshape(-1)
        handles: dict[str, Any] = {}
        for axes, plot in zip(all_axes, plots, strict=False):
            handles |= _draw_lines(axes, plot, labels) if plot.values is None else _draw_map(axes, plot)
            axes.set(xlabel=plot.x_label, ylabel=plot.y_label, title="" if transparent else plot.title)
        for axes in all_axes[len(plots) :]:
            axes.axis("off")
        if len(handles) > 1 or len(plots) > 1:
            n = (2 if max(map(len, labels), default=0) <= _WIDE_LABEL else 1) * max(round(figure.get_figwidth() / 5), 1)
            figure.set_figheight(figure.get_figheight() + _LEGEND_ROW * max(-(-len(labels) // n) - 2, 0))
            shown = [handles[label] for label in labels]
            figure.legend(shown, labels, loc="outside lower center", ncols=n, frameon=False)
        figure.suptitle(title)
        figure.savefig(target, format=form, transparent=transparent, metadata={"Date": None} if form == "svg" else None)


def _draw_lines(axes: Any, plot: Plot, labels: Sequence[str]) -> dict[str, Any]:
    """Draws lines and levels; returns what the legend shows of each. labels: of all plots."""
    handles: dict[str, Any] = {}
    for line in plot.shown:
        place = labels.index(line.label) if line.colour is None else line.colour
        colour = place if isinstance(place, str) else COLOURS[place % len(COLOURS)]
        x, values = line.x or plot.x, [np.nan if value is None else value for value in line.values]
        (handle,) = axes.plot(x, values, line.style, color=colour, linewidth=line.width)
        if isinstance(place, int) and place >= len(COLOURS):
            handle.set_marker(_MARKERS[(place // len(COLOURS) - 1) % len(_MARKERS)])
        if line.hollow:
            handle.set_markerfacecolor("white")
        if line.errors:
            axes.errorbar(x, values, np.transpose(line.errors), color=colour, fmt="none", elinewidth=0.6)
        for mark, *point in zip(line.marks, x, values, strict=False):
            axes.annotate(mark, point, fontsize=7, xytext=(3, 3), textcoords="offset points")
        handles[line.label] = handle
    for place, (label, level) in enumerate(plot.levels.items()):
        handles[label] = axes.axhline(level, color="0.5", linestyle=":-"[place % 2], linewidth=0.8)
    axes.set_ylim(bottom=plot.bottom)
    low, high = axes.get_ylim()
    if high - low < plot.least_range:
        axes.set_ylim(low - plot.least_range, high + plot.least_range)
    x_values = {value for line in plot.shown for value in (line.x or plot.x)}
    if plot.log_base:
        axes.set_xscale("log", base=plot.log_base)
        axes.xaxis.set_major_formatter("{x:g}")
    elif all(float(value).is_integer() for value in x_values):
        axes.locator_params(axis="x", integer=True)
    return handles


def _draw_map(axes: Any, plot: Plot) -> dict[str, Any]:
    assert plot.values is not None
    drawn = plot.values if plot.values.size else np.zeros((max(len(plot.values), 1), 1))
    image = axes.imshow(drawn, aspect="auto", origin="lower", interpolation="nearest", cmap="magma")
    axes.figure.colorbar(image, ax=axes, label=plot.value_label)
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    if plot.y:
        shown = np.unique(np.linspace(0, len(plot.y) - 1, min(len(plot.y), 9)).astype(int))
        axes.set_yticks(shown, [str(plot.y[place]) for place in shown])
    return {}
