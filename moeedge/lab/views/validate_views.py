"""The results of `moeedge lab validate`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from moeedge.lab.sim.papers import Compared, Figure, Fit, same_order
from moeedge.trace.steps import RejectedTokenModel
from moeedge.ui.tables import Column, print_table, text_column, value_columns

if TYPE_CHECKING:
    from moeedge.lab.experiments.validation import Comparison

_MS, _US = 1e3, 1e6  # from seconds

_PAPER_TITLES = {
    "table2": "MoE-SpAc, Table 2, calibrated: Qwen3-30B-A3B, tokens/s",
    "table3": "MoE-SpAc, Table 3: DeepSeek-V2-Lite, tokens/s",
    "table4": "MoE-SpAc, Table 4: without one of its parts, tokens/s",
}
_FIGURES = {
    "without overheads": "(a) Table 2, without overheads of programs",
    "calibrated": "(b) Table 2, calibrated",
    "fed no constant": "(c) other publications, rows that fed no constant",
}
_COMPARED_COLUMNS = (
    text_column("", "name"),
    Column("published", "published_ts", ".2f"),
    Column("predicted", "predicted_ts", ".2f"),
    text_column("range", lambda row: f"{row.range.low_ts:.2f} to {row.range.high_ts:.2f}"),
    Column("ratio", "ratio", ".2f"),
    text_column("", lambda row: "fitted" if row.fitted else "" if row.close else "not within 25 %"),
)
_BARE_COLUMNS = (
    Column("no overheads", "without_overheads_ts", ".2f"),
    Column("ratio", "without_overheads_ratio", ".2f"),
)
_ELSEWHERE_COLUMNS = (
    text_column("", "name"),
    Column("published", lambda row: _MS / row.published_ts, ".0f"),
    Column("predicted", lambda row: _MS / row.predicted_ts, ".0f"),
    text_column("range", lambda row: f"{_MS / row.range.high_ts:.0f} to {_MS / row.range.low_ts:.0f}"),
    Column("ratio", lambda row: 1 / row.ratio, ".2f"),
    text_column("", lambda row: "fed a constant" if row.fitted else "" if row.close else "not within 25 %"),
)
_MEASURED_COLUMNS = (
    text_column("policy", "policy"),
    Column("ratio", "cache_ratio", "g"),
    Column("gamma", "gamma"),
    Column("measured", "measured_tpot_s", ".2f", _MS),
    Column("simulated", "tpot_s", ".2f", _MS),
    Column("error", "error", "+.1%"),
    Column("pair hits measured", "hit_rate_pairs_measured", ".3f", none=""),
    Column("simulated", "hit_rate_pairs", ".3f"),
    Column("steps", "steps"),
    Column("rejected tokens", "rejected_token_model", str, none="none"),
)


def print_fit(fit: Fit, model: RejectedTokenModel, console: Console) -> None:
    """The constants fitted on two rows of Table 2."""
    console.print(
        f"\nRejected tokens: {model}. Fitted on two rows of Table 2: experts on the CPU at "
        f"{fit.cpu_bytes_per_s / 1e9:.1f} GB/s, acceptance {fit.acceptance:.3f}",
        soft_wrap=True,
    )


def print_part(rows: Sequence[Compared], console: Console) -> None:
    """One table or figure of a paper, or the same programs in other publications."""
    views = {"figure5": _print_ratios, "cutoff": _print_cutoff, "elsewhere": _print_elsewhere}
    views.get(rows[0].table, _print_compared)(rows, console)


def _print_compared(rows: Sequence[Compared], console: Console) -> None:
    """One table of the paper: every row, its range and ratio, and how many pairs come in the published order."""
    table, has_bare = rows[0].table, rows[0].without_overheads_ts is not None
    columns = [*_COMPARED_COLUMNS[:2], *_BARE_COLUMNS, *_COMPARED_COLUMNS[2:]] if has_bare else _COMPARED_COLUMNS
    console.print()
    print_table(console, columns, rows, title=f"{_PAPER_TITLES[table]} ({_rejected(rows[0])})")
    right, total = same_order([row.predicted_ts for row in rows], rows)
    free = [row for row in rows if not row.fitted]
    console.print(
        f"{right} of {total} pairs in the published order, {sum(row.close for row in free)} of {len(free)} "
        "predictions within 25 %",
        soft_wrap=True,
    )


def _print_elsewhere(rows: Sequence[Compared], console: Console) -> None:
    """The same programs in other publications: ms per token, and predicted over published."""
    console.print()
    title = f"The same programs in other publications, ms per token (SP-MoE: {_rejected(rows[0])}; others: no drafts)"
    print_table(console, _ELSEWHERE_COLUMNS, rows, title=title)


def print_figures(figures: Sequence[Figure], console: Console) -> None:
    """The three figures side by side."""
    if figures:
        columns = [
            text_column("", lambda figure: _FIGURES[figure.figure]),
            text_column("rejected tokens", lambda figure: figure.rejected_token_model or "none"),
            text_column("within 25 %", lambda figure: f"{figure.within_25_percent} of {figure.rows}"),
            text_column(
                "in order", lambda figure: "" if figure.pairs is None else f"{figure.pairs_in_order} of {figure.pairs}"
            ),
            Column("whatever the constants", "pairs_in_order_anyway", none=""),
        ]
        console.print()
        print_table(console, columns, figures, title="What the calibration is worth")


def _print_ratios(rows: Sequence[Compared], console: Console) -> None:
    """Figure 5: a line per system, a column per cache ratio."""
    ratios = list(dict.fromkeys(row.result.config.cache_ratio for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    speed = {(row.name, row.result.config.cache_ratio): row for row in rows}
    columns = [text_column("", 0), *(text_column(f"{ratio:.0%}", 1 + index) for index, ratio in enumerate(ratios))]
    lines = [(name, *(_with_range(speed[name, ratio]) for ratio in ratios)) for name in names]
    console.print()
    title = f"MoE-SpAc, Figure 5 (left): tokens/s by cache ratio, and their range ({_rejected(rows[0])})"
    print_table(console, columns, lines, title=title)


def _print_cutoff(rows: Sequence[Compared], console: Console) -> None:
    """SP-MoE's Figure 14: ms per token by cutoff layer."""
    console.print(f"\nSP-MoE, Figure 14: ms per token by cutoff layer ({_rejected(rows[0])})", style="bold")
    models: dict[str, dict[str, Compared]] = {}
    for row in rows:
        model, layer = row.name.split(", layer ")
        models.setdefault(model, {})[layer] = row
    for model, by_layer in models.items():
        columns = [text_column(model, 0), *value_columns(list(by_layer), ".1f", scale=_MS)]
        lines = [
            (name, *(getattr(row.range, side).tpot_s for row in by_layer.values()))
            for name, side in (("fast", "fast"), ("chosen", "chosen"), ("slow", "slow"))
        ]
        print_table(console, columns, lines)
        best = {min(zip(line[1:], by_layer, strict=True))[1]: line[0] for line in lines}
        console.print("best at layer " + ", ".join(f"{layer} ({name})" for layer, name in best.items()), soft_wrap=True)


def print_measured(rows: Sequence[Comparison], median_and_worst: tuple[float, float], console: Console) -> None:
    """ms per token, measured and simulated; `median_and_worst` are the absolute errors of all rows."""
    print_table(console, _MEASURED_COLUMNS, rows)
    median, worst = median_and_worst
    console.print(f"ms per token; absolute error: median {median:.1%}, worst {worst:.1%}", soft_wrap=True)


def _with_range(row: Compared) -> str:
    return f"{row.predicted_ts:.1f} ({row.range.low_ts:.1f} to {row.range.high_ts:.1f})"


def _rejected(row: Compared) -> str:
    return f"rejected tokens: {row.rejected_token_model}"
