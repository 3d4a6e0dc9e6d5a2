"""Quality and speed of expert budgets, as tables of `moeedge bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from moeedge.ui.tables import NONE, Column, narrow_markdown, text_column

if TYPE_CHECKING:
    from moeedge.bench.budgets import BudgetPoint
    from moeedge.bench.records import BenchRow


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
    Column("/ stock-ar", lambda row: row.figures.total.ratio, ".2f"),
    Column("/ no budget", lambda row: row.figures.total.ratio_unbudgeted, ".2f"),
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
    categories = list(dict.fromkeys(category for own in points.values() for category in own))
    if not categories:
        return ""
    table = [
        (label, *(_score_and_ratio(own[category]) if category in own else NONE for category in categories))
        for label, own in points.items()
    ]
    columns = [text_column("score, / stock-ar", 0)]
    columns += [Column(category, index, str) for index, category in enumerate(categories, start=1)]
    return "\n" + narrow_markdown(columns, table, n_keys=1)


def _score_and_ratio(point: BudgetPoint) -> str:
    parts = [
        NONE if value is None else format(value, form) for value, form in ((point.score, ".2f"), (point.ratio, ".2f"))
    ]
    return ", ".join(parts)
