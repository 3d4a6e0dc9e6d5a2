"""Quality and speed of expert budgets, as tables of `moeedge bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.bench.best_stock import ALL, MEAN
from moeedge.ui.tables import NONE, WITHHELD, Column, narrow_markdown, ratio_column, text_column

if TYPE_CHECKING:
    from moeedge.bench.best_stock import StockRatio
    from moeedge.bench.budgets import BudgetPoint
    from moeedge.bench.records import BenchRow


def best_stock_markdown(rows: Sequence[BenchRow]) -> str:
    """A line per mode with our backend, and one per category of the prompts; "" where stock had one mode only."""
    lanes = [row for row in rows if row.best_stock]
    if not lanes:
        return ""
    parts = [{part.category: part for part in row.best_stock} for row in lanes]
    is_disturbed = [row.disturbed is not None for row in lanes]
    table = [
        (
            _name(category),
            parts[0][category].fastest or NONE,
            *map(_with_interval, (own.get(category) for own in parts), is_disturbed),
        )
        for category in (*(name for name in parts[0] if name != ALL), ALL)
    ]
    columns = [text_column("prompts", 0), text_column("fastest stock mode", 1)]
    columns += [Column(row.label, index, str) for index, row in enumerate(lanes, start=2)]
    title = "Decoding speed over the fastest stock mode of each category, in hindsight, with 95 % intervals:"
    return "\n".join(["", title, "", narrow_markdown(columns, table, n_keys=2)])


def _name(category: str) -> str:
    return {ALL: "all together", MEAN: "mean of categories"}.get(category, category)


def _with_interval(part: StockRatio | None, is_disturbed: bool) -> str:
    if part is None or is_disturbed:
        return NONE if part is None else WITHHELD
    interval = "" if part.low is None or part.high is None else f" ({part.low:.3f} to {part.high:.3f})"
    return f"{part.ratio:.3f}{interval}"


def _with_error(value: float | None, error: float | None, form: str) -> str:
    if value is None:
        return NONE
    return format(value, form) if error is None else f"{value:{form}} ± {error:{form.lstrip('+')}}"


def _perplexity(row: BenchRow) -> str:
    measured = None if row.figures is None else row.figures.perplexity
    return NONE if measured is None else _with_error(measured.value, measured.stderr, ".3f")


_COLUMNS = (
    text_column("mode", "label"),
    Column("score", lambda row: _with_error(row.figures.total.score, row.figures.total.score_stderr, ".3f"), str),
    Column(
        "change",
        lambda row: _with_error(row.figures.total.score_change, row.figures.total.score_change_stderr, "+.3f"),
        str,
    ),
    Column("quality", lambda row: row.figures.total.quality, ".3f"),
    Column("perplexity", _perplexity, str),
    Column("agreement", lambda row: None if row.output is None else row.output.agreement, ".3f"),
    ratio_column("/ stock-ar", lambda row: row.figures.total.ratio, ".2f"),
    ratio_column("/ no budget", lambda row: row.figures.total.ratio_unbudgeted, ".2f"),
    Column("tokens/step", lambda row: row.figures.total.tokens_per_step, ".2f"),
    Column("natural", lambda row: row.figures.total.experts_natural, ".1f"),
    Column("kept", lambda row: row.figures.total.experts_kept, ".1f"),
    Column("most", lambda row: row.figures.total.experts_max),
    Column("probability", lambda row: row.figures.total.kept_probability, ".3f"),
)
_OPTIONAL = ("score", "change", "quality", "perplexity")


def quality_markdown(rows: Sequence[BenchRow]) -> str:
    """The table of the rows whose expert budgets or draft lengths are compared, and one by category; "" for none."""
    rows = [row for row in rows if row.figures is not None]
    if not rows:
        return ""
    columns = [
        column for column in _COLUMNS if column.title not in _OPTIONAL or any(column.text(row) != NONE for row in rows)
    ]
    lines = [
        "",
        "Experts per MoE layer and verification: natural (chosen by the router), kept, and the most in any",
        "layer; probability: share of the natural choice's that stays. change: score against the answers",
        "without a budget. agreement: share of stock-ar's tokens before the first difference.",
        "",
        narrow_markdown(columns, rows, n_keys=1),
    ]
    return "\n".join(lines) + _by_category(rows)


def _by_category(rows: Sequence[BenchRow]) -> str:
    """Score and speed-up over stock-ar, a column per category of the dataset."""
    points = {row.label: {p.category: p for p in row.figures.by_category} for row in rows if row.figures is not None}
    disturbed = {row.label for row in rows if row.disturbed}
    categories = list(dict.fromkeys(category for own in points.values() for category in own))
    if not categories:
        return ""
    table = [
        (
            label,
            *(
                _score_and_ratio(own[category], label in disturbed) if category in own else NONE
                for category in categories
            ),
        )
        for label, own in points.items()
    ]
    columns = [text_column("score, / stock-ar", 0)]
    columns += [Column(category, index, str) for index, category in enumerate(categories, start=1)]
    return "\n" + narrow_markdown(columns, table, n_keys=1)


def _score_and_ratio(point: BudgetPoint, is_disturbed: bool) -> str:
    score, ratio = (NONE if value is None else format(value, ".2f") for value in (point.score, point.ratio))
    return f"{score}, {WITHHELD if is_disturbed else ratio}"
