"""`moeedge lab surface`: what drafts gain, by acceptance and draft cost."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli.common import emit
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.records import as_dict, figure, figures
from moeedge.ui.tables import figure_columns, json_text, print_table, text_column
from moeedge.units import read_json

if TYPE_CHECKING:
    from rich.console import Console

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
    points = [point for record in records for point in surface_points(_read_rows(record))]
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


def _read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a record of bench. Raises InputError for anything else."""
    try:
        data = path.read_bytes()
        rows = read_json((gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode())
        if isinstance(rows, list) and all(isinstance(row, dict) and "tg_ts_median" in row for row in rows):
            return rows
        reason = "it holds no rows of moeedge bench -o json"
    except OSError as error:
        reason = error.strerror or "it cannot be read"
    except (EOFError, ValueError) as error:
        reason = str(error)
    raise InputError(f"Cannot use {path}: {reason}.", "Give files that moeedge bench -o json has printed.")


@dataclass(frozen=True, kw_only=True)
class SurfacePoint:
    """One draft at one acceptance; ratios are decoding speeds over that of stock's fastest mode, in hindsight."""

    model: str = figure("File of the target", axis="name")
    n_gen: int = figure("Tokens of an answer", axis="name")
    draft: str = figure("File of the draft, or ngram", title="draft")
    draft_cost: float = figure(
        "Time of one draft over that of decoding one token (T_D / T_T)", title="T_D / T_T", form=".3f", axis="name"
    )
    acceptance: float = figure("Rate at which drafts are accepted", title="acceptance", form="g", axis="x", most=1)
    ratio: float = figure("Speed with drafts as measured (auto). A ratio", title="auto", form=".2f", axis="y")
    low: float | None = figure("Lower end of its 95 % interval", title="low", form=".2f")
    high: float | None = figure("Upper end of its 95 % interval", title="high", form=".2f")
    fastest_stock: str = figure("Stock's fastest mode", title="fastest stock mode")
    fixed_ratio: float | None = figure(
        "Speed with the best fixed draft length. A ratio", title="best fixed", form=".2f", axis="y"
    )
    fixed_gamma: int | None = figure("That length; 0: none", title="at length")
    disturbed: str | None = figure(
        "Why the ratios are not to be trusted; null: nothing disturbed them", title="disturbed"
    )
    stock_ratio: float = figure(
        "Stock's fastest mode over stock without drafts. A ratio", title="stock over plain", form=".2f"
    )


def surface_points(rows: Sequence[dict[str, Any]]) -> list[SurfacePoint]:
    """The points of the rows of one record; only tests with stock-ar, another stock mode and moeedge:auto have one."""
    import numpy as np

    from moeedge.bench.config import REFERENCE

    points = []
    rows = [row for row in rows if row.get("acceptance") is not None and row["tg_ts_median"]]
    plain_ts = [row["tg_ts_median"] for row in rows if row["mode"] == REFERENCE]
    draft_cost = _draft_s(rows) * float(np.median(plain_ts)) if plain_ts else 0.0  # of the same draft everywhere
    for test in dict.fromkeys(row["test"] for row in rows):
        own = [row for row in rows if row["test"] == test]
        auto = next((row for row in own if row["auto_gamma"] and row["ratio_best_stock"]), None)
        plain = next((row for row in own if row["mode"] == REFERENCE), None)
        if auto is None or plain is None:
            continue
        fixed = [row for row in own if row["mode"].startswith("moeedge") and not row["auto_gamma"]]
        best = max(fixed, key=lambda row: float(row["ratio_best_stock"] or 0), default=None)
        stock = max(row["tg_ts_median"] for row in own if row["mode"].startswith("stock"))
        points.append(
            SurfacePoint(
                model=auto["model"],
                n_gen=auto["n_gen"],
                draft=auto["draft"],
                draft_cost=draft_cost,
                acceptance=auto["acceptance"],
                ratio=auto["ratio_best_stock"],
                low=auto["ratio_best_stock_low"],
                high=auto["ratio_best_stock_high"],
                fastest_stock=auto["best_stock"],
                fixed_ratio=None if best is None else best["ratio_best_stock"],
                fixed_gamma=None if best is None else best["gamma"],
                disturbed=auto["disturbed"],
                stock_ratio=stock / plain["tg_ts_median"],
            )
        )
    return points


def _draft_s(rows: Sequence[dict[str, Any]]) -> float:
    """Seconds of a draft, from the rows with a fixed length, which drop none that they have computed."""
    fixed = [row for row in rows if row["gamma"] and not row["auto_gamma"] and not row["draft_p_min"]]
    samples = [sample for row in fixed for sample in row["samples"]]
    n_drafted = sum(sample["drafted"] for sample in samples)
    return float(sum(sample["draft_s"] for sample in samples) / n_drafted) if n_drafted else 0.0


def break_even(points: Sequence[SurfacePoint]) -> dict[float, float | None]:
    """Of one target: by acceptance, the draft cost up to which `auto` beats stock at its best; None: at none.

    Costs between two measured ones are interpolated; where all pay, the largest one is returned.
    """
    import numpy as np

    costs: dict[float, float | None] = {}
    for acceptance in sorted({point.acceptance for point in points}):
        own = sorted((point.draft_cost, point.ratio) for point in points if point.acceptance == acceptance)
        paying = [i for i, (_, ratio) in enumerate(own) if ratio > 1]
        if not paying:
            costs[acceptance] = None
            continue
        last = paying[-1]
        pair = own[last : last + 2]
        cost = pair[0][0]
        if len(pair) == 2:
            (low, above), (high, below) = pair
            cost = float(np.interp(1.0, [below, above], [high, low]))
        costs[acceptance] = cost
    return costs


def surface_json(points: Sequence[SurfacePoint]) -> str:
    """One JSON object: the points, and the break-even cost of each target and acceptance."""
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
