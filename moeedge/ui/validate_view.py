"""The tables of `moeedge validate`: predicted against published, simulated against measured."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moeedge.sim.measured import Measured, summary
from moeedge.sim.papers import Compared, Fit, chosen, same_order
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
    variants = {row.name: row for row in rows if row.pageable}
    columns = ["", "published", "predicted", "ratio", *(["pageable", "ratio"] if variants else []), ""]
    cells = []
    for row in chosen(list(rows), pageable=False):
        assert row.published_ts is not None
        line = [row.name, f"{row.published_ts:.2f}", f"{row.predicted_ts:.2f}", f"{row.ratio:.2f}"]
        if variants:
            other = variants.get(row.name)
            line += ["", ""] if other is None else [f"{other.predicted_ts:.2f}", f"{other.ratio:.2f}"]
        cells.append([*line, "fitted" if row.fitted else ""])
    print_table(columns, cells, console)
    for pageable in (False, True) if variants else (False,):
        taken = chosen(list(rows), pageable=pageable)
        right, total = same_order(taken)
        free = [row for row in taken if not row.fitted]
        name = "with pageable host memory: " if pageable else ""
        console.print(
            f"{name}{right} of {total} pairs in the published order, {sum(row.close for row in free)} of {len(free)} "
            "predictions within 25 %",
            soft_wrap=True,
        )


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


def print_measured(rows: Sequence[Measured], console: Console) -> None:
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
