"""The output of `moeedge replay`: a table per rejected-token model and cache ratio, or JSON rows; and its progress."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from rich import box, progress
from rich.console import Console
from rich.table import Table

from moeedge.policies.registry import foresees, reads_hidden_states, reads_tokens, takes_profile
from moeedge.sim.bounds import BOUNDS
from moeedge.sim.replay import ReplayRow
from moeedge.ui.console import visible
from moeedge.ui.progress import Bar

_MIB = 1024 * 1024
_NONE = "-"
_NAME, _COLUMN = 22, 12  # characters of a policy and of a figure, with what lies between
_ENDLESS = 1000


def rows_json(rows: Sequence[ReplayRow]) -> str:
    """One array, a line per row; the same rows give the same bytes."""
    return "[\n" + ",\n".join(json.dumps(row.as_dict(), ensure_ascii=False) for row in rows) + "\n]\n"


def print_rows(rows: Sequence[ReplayRow], console: Console) -> None:
    """Tables with the best policy on top of each, the bounds below."""
    for (model, ratio), group in groupby(rows, key=lambda row: (row.rejected_token_model, row.cache_ratio)):
        same = list(group)
        console.print(_title(same[0], model, ratio), style="bold", soft_wrap=not console.is_terminal)
        for table in _tables(same, console):
            console.print(table)
    if rows:
        console.print(_legend(rows), style="dim")


def _title(row: ReplayRow, model: str, ratio: float) -> str:
    acceptance = "" if row.acceptance is None else f", acceptance {row.acceptance:.2f}"
    how = "as recorded" if model == "recorded" else f"{model} rejected tokens" if row.gamma else "one token at a time"
    return (
        f"{visible(row.model)}: {row.texts} texts, {row.steps:,} steps of {row.gamma + 1} tokens{acceptance}, {how}; "
        f"slots for {100 * ratio:g} % of the experts ({row.slots})"
    )


def _tables(rows: Sequence[ReplayRow], console: Console) -> list[Table]:
    """One, or where that is too wide several, with the policies in front of each."""
    has_bytes = any(row.bytes_per_step is not None for row in rows)
    columns = ["pairs", "experts", "uploads", *(["MiB/step"] if has_bytes else []), "hot/cold", "of oracle"]
    whole = _table(rows, columns)
    if console.measure(whole, options=console.options.update(width=_ENDLESS)).maximum <= console.width:
        return [whole]
    n_each = max((console.width - _NAME) // _COLUMN, 1)
    return [_table(rows, columns[first : first + n_each]) for first in range(0, len(columns), n_each)]


def _table(rows: Sequence[ReplayRow], columns: Sequence[str]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    ranked = sorted((row for row in rows if row.policy not in BOUNDS), key=lambda row: -row.hit_rate_pairs)
    for row in ranked + [row for row in rows if row.policy in BOUNDS]:
        cells = _cells(row)
        name = row.policy + ("" if row.prediction_source is None else " *")
        table.add_row(name, *(cells[column] for column in columns), style="dim" if row.policy in BOUNDS else None)
    return table


def _cells(row: ReplayRow) -> dict[str, str]:
    """By the heads of the columns."""
    return {
        "pairs": _number(row.hit_rate_pairs, 3),
        "experts": _number(row.hit_rate_unique, 3),
        "uploads": _number(row.uploads_per_layer_step, 2),
        "MiB/step": _NONE if row.bytes_per_step is None else f"{row.bytes_per_step / _MIB:.1f}",
        "hot/cold": _number(row.hot_cold_accuracy, 3),
        "of oracle": _number(row.share_of_oracle, 3),
    }


def _legend(rows: Sequence[ReplayRow]) -> str:
    lines = [
        "pairs, experts: share of (token, expert) pairs, of distinct experts, resident when their step begins. "
        "uploads: per layer and step, loads on demand included. hot/cold: share of experts rightly called used or "
        "unused before the step. oracle knows each next step; belady: what a cache of used experts could keep."
    ]
    told = {(row.prediction_source, row.predictor_accuracy) for row in rows if row.prediction_source is not None}
    if told:
        names = ", ".join(f"{source} {accuracy:g}" for source, accuracy in sorted(told, key=str))
        lines.append(
            f"* needs the inputs of layers, which a trace lacks: a predictor of stated accuracy stands in ({names})."
        )
    return "\n".join(lines + shortcomings(rows))


def shortcomings(rows: Sequence[ReplayRow]) -> list[str]:
    """A sentence for each thing that policies go without in this replay."""
    lines = []
    blind = dict.fromkeys(row.policy for row in rows if row.prediction_source is None and foresees(row.policy))
    if blind:
        lines.append(
            f"{', '.join(blind)}: without {'its predictor' if len(blind) == 1 else 'their predictors'}, by the cache "
            "alone, since a trace holds no inputs of layers; --predictor-accuracy lets a stated accuracy stand in."
        )
    unread = dict.fromkeys(row.policy for row in rows if not row.token_ids and reads_tokens(row.policy))
    if unread:
        lines.append(f"{', '.join(unread)}: without lookahead, since this trace holds no vocabulary ids.")
    contextless = [
        name
        for name in dict.fromkeys(row.policy for row in rows if row.token_ids and not row.draft_hidden_states)
        if reads_hidden_states(name)
    ]
    if contextless:
        lines.append(
            f"{', '.join(contextless)}: lookahead by words alone, since this trace holds none of the draft's hidden "
            "states, by which the engine foretells more; bench --policy spac --trace-out records them."
        )
    unguided = dict.fromkeys(row.policy for row in rows if not row.profile and takes_profile(row.policy))
    if unguided:
        lines.append(f"{', '.join(unguided)}: by the first steps, since no text was held out for a profile.")
    return lines


def _number(value: float | None, digits: int) -> str:
    return _NONE if value is None else f"{value:.{digits}f}"


class ReplayProgress(Bar):
    """`advance` is told the batches done of this schedule."""

    def __init__(self, total: int, console: Console) -> None:
        steps = progress.TextColumn("{task.completed:,.0f} of {task.total:,.0f} steps")
        super().__init__("replaying", (steps, progress.TimeElapsedColumn()), console, total)
        self._before = 0
        self._now = 0

    def advance(self, n_batches: int) -> None:
        """So many batches of the present schedule are done."""
        self._now = n_batches
        self._update(completed=self._before + n_batches)

    def next_schedule(self) -> None:
        """The next one begins."""
        self._before += self._now
        self._now = 0
