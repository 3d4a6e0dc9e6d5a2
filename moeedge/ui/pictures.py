"""Pictures with their numbers, as files or as SVG inside a page; and the page, the report of `moeedge profile`.

A picture is drawn by Matplotlib without a display. In SVG its colours become CSS variables: text is `currentColor`,
the grid `--grid`, the n-th line `--line-n`; so one picture suits light and dark pages. Text stays text.

The report is one HTML file with its pictures, tables and JSON inside. It loads nothing, has no script that runs,
follows the reader's light or dark setting and fits a phone.
"""

from __future__ import annotations

import html
import io
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.paths import write_file
from moeedge.ui.tables import Column

COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b")  # lines of light pages
DARK_COLOURS = ("#6cb6ff", "#ff7b72", "#56d364", "#d2a8ff", "#ffa657", "#56d4dd", "#d8a28f")
_TEXT, _GRID = "#0a0b0c", "#d0d1d2"  # in SVG replaced by the page's; legible on white
_SIZE = (4.8, 3.5)  # inches: a phone shows 1 point as 0.9 pixels
_DPI = 150
_MAX_ROWS = 200  # of a table in the report: longer ones are in the JSON alone
_FONT_SIZE = 10.5
_LEGEND_SIZE = 9
_WIDE_LABEL = 27  # characters, of which two columns of the legend have room


@dataclass(frozen=True)
class Picture:
    """A picture and the numbers in it.

    key: unique in a report, and the name of its file. draw: draws on a Matplotlib figure. columns, rows: the numbers as
    a table; no rows: they are in the report's JSON alone, as those of a map.
    """

    key: str
    section: str
    title: str
    caption: str = ""
    draw: Callable[[Any], None] = lambda _figure: None
    columns: Sequence[Column] = ()
    rows: Sequence[Any] = ()


@dataclass(frozen=True)
class Line:
    """One line of a picture: a value or None per x."""

    label: str
    values: Sequence[float | None]
    style: str = "-"  # of Matplotlib: line and marker
    colour: int = -1  # index of COLOURS; -1: by its place

    @property
    def known(self) -> list[float]:
        """The values that are there."""
        return [value for value in self.values if value is not None]


def line_picture(
    picture: Picture,
    x_label: str,
    x: Sequence[float],
    y_label: str,
    lines: Sequence[Line],
    *,
    form: str = ".3f",
    log_x: bool = False,
    bottom: float | None = None,
) -> Picture:
    """The picture with lines over one x axis. form: of the values in the table. bottom: of the y axis."""
    shown = [line for line in lines if line.known]

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        for place, line in enumerate(shown):
            colour = COLOURS[(place if line.colour < 0 else line.colour) % len(COLOURS)]
            values = [np.nan if value is None else value for value in line.values]
            axes.plot(x, values, line.style, color=colour, markersize=3.5, linewidth=1.4)
        if log_x:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:g}")
        if bottom is not None:
            high = max((value for line in shown for value in line.known), default=1.0)
            axes.set_ylim(bottom, bottom + max(1.05 * (high - bottom), 1e-9))
        if all(float(value).is_integer() for value in x) and not log_x:
            axes.locator_params(axis="x", integer=True)
        _label(axes, x_label, y_label)
        _legend(figure, axes, shown)

    columns = [Column(x_label, 0, "g", left=True)]
    columns += [Column(line.label, index, form) for index, line in enumerate(shown, start=1)]
    rows = list(zip(x, *(line.values for line in shown), strict=True))
    return replace(picture, draw=draw, columns=columns, rows=rows)


def map_picture(
    picture: Picture,
    x_label: str,
    y_label: str,
    values: NDArray[Any],
    value_label: str,
    *,
    y: Sequence[int] | None = None,
) -> Picture:
    """The picture with a map of `values` [n_y, n_x]; y: labels of the rows, by default their numbers."""

    def draw(figure: Any) -> None:
        axes = figure.add_subplot()
        drawn = values if values.size else np.zeros((max(len(values), 1), 1))
        image = axes.imshow(drawn, aspect="auto", origin="lower", interpolation="nearest", cmap="magma")
        figure.colorbar(image, ax=axes, label=value_label)
        if y is not None:
            shown = np.unique(np.linspace(0, len(y) - 1, min(len(y), 9)).astype(int))
            axes.set_yticks(shown, [str(y[place]) for place in shown])
        _label(axes, x_label, y_label, grid=False)

    return replace(picture, draw=draw)


def _legend(figure: Any, axes: Any, lines: Sequence[Line]) -> None:
    """The labels of several lines below the picture, which grows for the rows that they take."""
    if len(lines) < 2:
        return
    labels = [line.label for line in lines]
    n_columns = 1 if max(map(len, labels)) > _WIDE_LABEL else 2
    n_rows = -(-len(labels) // n_columns)
    if hasattr(figure, "set_figheight"):  # a picture alone
        figure.set_figheight(figure.get_figheight() + 0.18 * max(n_rows - 2, 0))
    place = "outside lower center"
    figure.legend(axes.lines, labels, loc=place, ncols=n_columns, fontsize=_LEGEND_SIZE, frameon=False)


def _label(axes: Any, x_label: str, y_label: str, *, grid: bool = True) -> None:
    axes.set_xlabel(x_label)
    axes.set_ylabel(y_label)
    for side in ("top", "right"):
        axes.spines[side].set_visible(not grid)
    if grid:
        axes.grid(color=_GRID, linewidth=0.6)
        axes.set_axisbelow(True)


def svg_of(picture: Picture) -> str:
    """The picture as an <svg> element whose ids begin with its key, without size."""
    stream = io.StringIO()
    _render(picture, stream, "svg", transparent=True)
    text = stream.getvalue()
    text = text[text.index("<svg") :]
    head, _, body = text.partition(">")
    view = re.search(r'viewBox="[^"]*"', head)
    assert view is not None
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{picture.key}-', body)
    body = re.sub(r'((?:xlink:)?href="#|url\(#)', rf"\g<1>{picture.key}-", body)
    for place, colour in enumerate(COLOURS, start=1):
        body = body.replace(colour, f"var(--line-{place})")
    body = body.replace(_TEXT, "currentColor").replace(_GRID, "var(--grid)")
    namespaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    return f'<svg {namespaces} {view[0]} role="img">{body.strip()}'


def save_picture(picture: Picture, path: Path) -> None:
    """Writes a file; the suffix selects the format. Raises InputError where it cannot be written."""
    with write_file(path, "picture") as temporary:
        _render(picture, temporary, path.suffix.removeprefix("."), transparent=False)


def save_stacked(pictures: Sequence[Picture], title: str, path: Path) -> None:
    """Writes several pictures, one below the other, to a file. Raises InputError where it cannot be written."""

    def draw(figure: Any) -> None:
        figure.set_size_inches(10, 4.2 * len(pictures))
        parts = figure.subfigures(len(pictures), 1, squeeze=False)[:, 0]
        for part, picture in zip(parts, pictures, strict=True):
            part.suptitle(picture.title, fontsize=_FONT_SIZE)
            picture.draw(part)

    save_picture(Picture("stacked", "", title, "", draw), path)


def _render(picture: Picture, target: io.StringIO | Path, form: str, *, transparent: bool) -> None:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = {
        **{f"{part}.color": _TEXT for part in ("text", "xtick", "ytick")},
        **{f"axes.{part}": _TEXT for part in ("edgecolor", "labelcolor", "titlecolor")},
        "font.size": _FONT_SIZE,
        "svg.fonttype": "none",
        "svg.hashsalt": picture.key,  # the same picture gives the same ids
    }
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=_SIZE, layout="constrained")
        FigureCanvasAgg(figure)
        picture.draw(figure)
        if not transparent:  # a page has its own title
            figure.suptitle(picture.title, fontsize=_FONT_SIZE)
        metadata = {"Date": None} if form == "svg" else None
        figure.savefig(target, format=form, dpi=_DPI, transparent=transparent, metadata=metadata)


def _variables(colours: Sequence[str], **others: str) -> str:
    named = {f"line-{place}": colour for place, colour in enumerate(colours, start=1)} | others
    return " ".join(f"--{name}: {value};" for name, value in named.items())


_LIGHT = _variables(COLOURS, text="#1c1e21", faint="#5b6168", paper="#ffffff", card="#f6f7f8", grid="#d9dce0")
_DARK = _variables(DARK_COLOURS, text="#e6e8ea", faint="#a3a9b0", paper="#14171a", card="#1d2125", grid="#3a4047")

_STYLE = f"""
:root {{ color-scheme: light dark; {_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .75rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .25rem; }}
pre {{ overflow-x: auto; padding: .75rem; background: var(--card); border-radius: .5rem; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption, .faint {{ color: var(--faint); font-size: .875rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; }}
details {{ margin-top: .5rem; font-size: .875rem; }}
summary {{ cursor: pointer; color: var(--faint); }}
.scroll {{ overflow-x: auto; max-height: 24rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .1rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ position: sticky; top: 0; background: var(--card); font-weight: 600; }}
@media print {{ figure {{ break-inside: avoid; }} }}
"""


def report_html(
    title: str, facts: Sequence[tuple[str, str]], text: str, pictures: Iterable[Picture], numbers: dict[str, Any]
) -> str:
    """The page. facts: labels and values of the run; text: main figures; numbers: the JSON that the page carries."""
    escaped = html.escape(title)
    listed = "".join(f"<dt>{html.escape(label)}</dt><dd>{html.escape(value)}</dd>" for label, value in facts)
    sections = "".join(
        f'<section><h2>{html.escape(name)}</h2><div class="grid">{"".join(map(_figure_html, members))}</div></section>'
        for name, members in groupby(pictures, key=lambda picture: picture.section)
    )
    # "<" cannot end the element inside a JSON string if it is written as an escape
    data = json.dumps(numbers, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<title>{escaped}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escaped}</h1>
<dl>{listed}</dl>
<pre>{html.escape(text)}</pre>
{sections}
<p class="faint">Every number of this page is in its source as JSON: the element with the id "numbers".</p>
<script type="application/json" id="numbers">{data}</script>
</body>
</html>
"""


def _figure_html(picture: Picture) -> str:
    title = html.escape(picture.title)
    drawn = svg_of(picture).replace("<svg ", f'<svg aria-label="{title}" ', 1)
    caption = f"<figcaption>{html.escape(picture.caption)}</figcaption>"
    return f"<figure><h3>{title}</h3>{drawn}{caption}{_table_html(picture)}</figure>"


def _table_html(picture: Picture) -> str:
    if not picture.rows or len(picture.rows) > _MAX_ROWS:
        return ""
    head = "".join(f"<th>{html.escape(column.title)}</th>" for column in picture.columns)
    rows = "".join(
        "<tr>" + "".join(f"<td>{html.escape(column.text(row))}</td>" for column in picture.columns) + "</tr>"
        for row in picture.rows
    )
    return (
        f'<details><summary>Numbers</summary><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def write_report(path: Path, text: str) -> None:
    """Replaces the file at `path`. Raises InputError where it cannot be written."""
    with write_file(path, "report") as temporary:
        temporary.write_text(text, encoding="utf-8")
