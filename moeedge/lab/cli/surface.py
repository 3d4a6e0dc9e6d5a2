"""`moeedge lab surface`: what drafts gain, by acceptance and draft cost."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli.common import emit
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.records import as_dict, figures
from moeedge.ui.tables import figure_columns, json_text, print_table, text_column

if TYPE_CHECKING:
    from rich.console import Console

    from moeedge.lab.analysis.draft_surface import SurfacePoint

declare("--plot FILE  Draw ratio over acceptance, a line for each draft.", "surface")
Records = Annotated[list[Path], typer.Argument(metavar="RECORD...", help="JSON of moeedge bench --accept; .gz, too.")]


@flatten
def surface(records: Records, plot: Path | None = None, output: Output = Output.TEXT) -> None:
    """Show what drafts gain over stock llama.cpp at its best, by acceptance and draft cost.

    Each record is the JSON of one `moeedge bench --accept ... --modes stock-ar,stock-sd:1-16,moeedge:auto,... -o json`
    with another draft model. The break-even cost of an acceptance is that up to which drafts pay.
    """
    from moeedge.lab.analysis.draft_surface import read_points
    from moeedge.ui.console import check_picture
    from moeedge.ui.plots import default_plots, save_plots

    if plot is not None:
        check_picture(plot)
    points = [point for record in records for point in read_points(record)]
    if not points:
        what = "No record has scripted drafts of the modes stock-ar, another stock mode and moeedge:auto."
        modes = "--modes stock-ar,stock-sd:1-16,moeedge:auto"
        raise InputError(what, f"Measure them with moeedge bench --accept .5,.7,.9 -md FILE {modes} -o json.")
    points.sort(key=lambda point: (point.model, point.n_gen, point.draft_cost, point.acceptance))
    emit(output, surface_json, print_surface, points)
    if plot is not None:
        points = [point for point in points if point.disturbed is None]
        if not points:
            raise InputError("Every row was disturbed: there is nothing to draw.", "Measure on a quiet machine.")
        save_plots(default_plots(points, lambda point: Path(point.draft).stem), plot)


_TARGET = attrgetter("model", "n_gen")  # points come sorted by it


def surface_json(points: Sequence[SurfacePoint]) -> str:
    """One JSON object: the points, and the break-even cost of each target and acceptance."""
    from moeedge.lab.analysis.draft_surface import break_even

    even = [
        {"model": model, "n_gen": n_gen, "acceptance": acceptance, "draft_cost": cost}
        for (model, n_gen), own in groupby(points, _TARGET)
        for acceptance, cost in break_even(list(own)).items()
    ]
    return json_text({"points": [as_dict(point) for point in points], "break_even": even})


def print_surface(points: Sequence[SurfacePoint], console: Console) -> None:
    """A table of the points of each target, and a line with the break-even costs."""
    from moeedge.lab.analysis.draft_surface import SurfacePoint, break_even

    declared, texts = figures(SurfacePoint), ("draft", "fastest_stock", "disturbed")
    columns = [
        text_column(each.title, name) if name in texts else figure_columns(SurfacePoint, name)[0]
        for name, each in declared.items()
        if name not in ("model", "n_gen")
    ]
    for (model, n_gen), group in groupby(points, _TARGET):
        own = list(group)
        print_table(console, columns, own, title=f"{model}, {n_gen} tokens: speed over stock at its best", n_keys=2)
        costs = (
            f"{acceptance:g}: {'none that was measured' if cost is None else f'{cost:.2f}'}"
            for acceptance, cost in break_even(own).items()
        )
        console.print(f"Drafts pay up to a cost T_D / T_T, by acceptance: {', '.join(costs)}.", soft_wrap=True)
