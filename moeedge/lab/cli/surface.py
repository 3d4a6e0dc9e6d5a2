"""`moeedge lab surface`: what drafts gain, by acceptance and draft cost."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli.common import emit
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.paths import unpacked
from moeedge.records import as_dict, figures
from moeedge.schemas import read_json
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
    from moeedge.ui.console import check_picture
    from moeedge.ui.plots import default_plots, save_plots

    if plot is not None:
        check_picture(plot)
    points = [point for record in records for point in _points_of(record)]
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


def _points_of(path: Path) -> list[SurfacePoint]:
    from moeedge.lab.analysis.draft_surface import surface_points

    rows = _read_rows(path)
    try:
        return surface_points(rows)
    except (KeyError, TypeError) as error:  # a row without a key, or with a value of another type
        hint = "Give files that moeedge bench -o json has printed."
        raise InputError(f"Cannot use {path}: its rows are not those of moeedge bench ({error}).", hint) from None


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a record of bench. Raises InputError for anything else."""
    try:
        rows = read_json(unpacked(path.read_bytes()).decode())
        if isinstance(rows, list) and all(isinstance(row, dict) and "tg_ts_median" in row for row in rows):
            return rows
        reason = "it holds no rows of moeedge bench -o json"
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except ValueError as error:
        reason = str(error)
    raise InputError(f"Cannot use {path}: {reason}.", "Give files that moeedge bench -o json has printed.")


def surface_json(points: Sequence[SurfacePoint]) -> str:
    """One JSON object: the points, and the break-even cost of each target and acceptance."""
    from moeedge.lab.analysis.draft_surface import break_even

    even = [
        {"model": model, "n_gen": n_gen, "acceptance": acceptance, "draft_cost": cost}
        for (model, n_gen), own in _by_target(points).items()
        for acceptance, cost in break_even(own).items()
    ]
    return json_text({"points": [as_dict(point) for point in points], "break_even": even})


def _by_target(points: Sequence[SurfacePoint]) -> dict[tuple[str, int], list[SurfacePoint]]:
    """The points by target and length of the answers."""
    keys = dict.fromkeys((point.model, point.n_gen) for point in points)
    return {key: [point for point in points if (point.model, point.n_gen) == key] for key in keys}


def print_surface(points: Sequence[SurfacePoint], console: Console) -> None:
    """A table of the points of each target, and a line with the break-even costs."""
    from moeedge.lab.analysis.draft_surface import SurfacePoint, break_even

    declared, texts = figures(SurfacePoint), ("draft", "fastest_stock", "disturbed")
    columns = [
        text_column(each.title, name) if name in texts else figure_columns(SurfacePoint, name)[0]
        for name, each in declared.items()
        if name not in ("model", "n_gen")
    ]
    for (model, n_gen), own in _by_target(points).items():
        print_table(console, columns, own, title=f"{model}, {n_gen} tokens: speed over stock at its best", n_keys=2)
        costs = (
            f"{acceptance:g}: {'none that was measured' if cost is None else f'{cost:.2f}'}"
            for acceptance, cost in break_even(own).items()
        )
        console.print(f"Drafts pay up to a cost T_D / T_T, by acceptance: {', '.join(costs)}.", soft_wrap=True)
