"""The tables of `moeedge validate`: predicted against published, simulated against measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeedge.bench.validation import Comparison, summary
from moeedge.sim.papers import Compared, Fit, same_order
from moeedge.ui.simulate_view import print_table

_TITLES = {
    "table2": "MoE-SpAc, Table 2: Qwen3-30B-A3B, tokens/s",
    "table3": "MoE-SpAc, Table 3: DeepSeek-V2-Lite, tokens/s",
    "table4": "MoE-SpAc, Table 4: without one of its parts, tokens/s",
}


def print_fit(fit: Fit, console: Console) -> None:
    """What the first two rows of Table 2 gave."""
    console.print(
        f"Fitted on two rows of Table 2: experts on the CPU at {fit.cpu_bytes_per_s / 1e9:.1f} GB/s, acceptance "
        f"{fit.acceptance:.3f}",
        soft_wrap=True,
    )


def print_compared(rows: Sequence[Compared], console: Console) -> None:
    """One table of the paper: every row, its ratio, and how many pairs come in the published order."""
    console.print(f"\n{_TITLES[rows[0].table]}", style="bold", soft_wrap=True)
    cells = []
    for row in rows:
        assert row.published_ts is not None
        fitted = "fitted" if row.fitted else ""
        cells.append([row.name, f"{row.published_ts:.2f}", f"{row.predicted_ts:.2f}", f"{row.ratio:.2f}", fitted])
    print_table(["", "published", "predicted", "ratio", ""], cells, console)
    right, total = same_order(list(rows))
    free = [row for row in rows if not row.fitted]
    console.print(
        f"{right} of {total} pairs in the published order, {sum(row.close for row in free)} of {len(free)} "
        "predictions within 25 %",
        soft_wrap=True,
    )


def print_elsewhere(rows: Sequence[Compared], console: Console) -> None:
    """The same programs in other publications: ms per token, and what is predicted over what is published."""
    console.print("\nThe same programs in other publications, ms per token", style="bold", soft_wrap=True)
    cells = []
    for row in rows:
        assert row.published_ts is not None and row.ratio is not None
        cells.append(
            [row.name, f"{1e3 / row.published_ts:.0f}", f"{1e3 / row.predicted_ts:.0f}", f"{1 / row.ratio:.2f}"]
        )
    print_table(["", "published", "predicted", "ratio"], cells, console)


def print_ratios(rows: Sequence[Compared], console: Console) -> None:
    """Figure 5: a line per system, a column per cache ratio."""
    console.print("\nMoE-SpAc, Figure 5 (left): tokens/s by cache ratio", style="bold")
    ratios = list(dict.fromkeys(row.result.setup.cache_ratio for row in rows))
    names = list(dict.fromkeys(row.name for row in rows))
    speed = {(row.name, row.result.setup.cache_ratio): row.predicted_ts for row in rows}
    cells = [[name, *(f"{speed[name, ratio]:.1f}" for ratio in ratios)] for name in names]
    print_table(["", *(f"{ratio:.0%}" for ratio in ratios)], cells, console)


def print_cutoff(rows: Sequence[Compared], console: Console) -> None:
    """SP-MoE's Figure 14: ms per token by cutoff layer."""
    console.print("\nSP-MoE, Figure 14: ms per token by cutoff layer", style="bold")
    models: dict[str, list[tuple[str, float]]] = {}
    for row in rows:
        model, layer = row.name.split(", layer ")
        models.setdefault(model, []).append((layer, row.result.tpot_s * 1e3))
    for model, points in models.items():
        print_table([model, *(layer for layer, _ in points)], [["", *(f"{ms:.1f}" for _, ms in points)]], console)
        best = min(points, key=lambda point: point[1])[0]
        console.print(f"best at layer {best}", soft_wrap=True)


def print_measured(rows: Sequence[Comparison], console: Console) -> None:
    """ms per token, measured and simulated, and the errors."""
    columns = ["policy", "ratio", "gamma", "measured", "simulated", "error", "hit measured", "simulated", "steps"]
    cells = [
        [
            row.combination.policy,
            f"{row.combination.cache_ratio:g}",
            str(row.combination.gamma),
            f"{row.measured_s * 1e3:.2f}",
            f"{row.simulated_s * 1e3:.2f}",
            f"{row.error:+.1%}",
            "" if row.hit_measured is None else f"{row.hit_measured:.3f}",
            f"{row.hit_simulated:.3f}",
            str(row.steps),
        ]
        for row in rows
    ]
    print_table(columns, cells, console)
    middle, worst = summary(rows)
    console.print(f"ms per token; absolute error: median {middle:.1%}, worst {worst:.1%}", soft_wrap=True)
