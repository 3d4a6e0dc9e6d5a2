"""The picture of `moeedge bench --parallel`: throughput and speed-up by the number of texts decoded together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.ui.parallel_views import batch_curves
from moeedge.ui.plots import COLOURS, MARKERS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.bench.records import BenchRow


def draw_batch_curves(rows: Sequence[BenchRow], path: Path) -> bool:
    """Throughput by N on the left; on the right speed-ups.

    A mode at a draft length has one colour in both. Bars go from the smallest to the largest pair. Returns False, and
    writes no file, where no mode with drafts was measured next to plain decoding. Raises InputError
    where the file cannot be written.
    """
    curves = batch_curves(rows)
    if not curves:
        return False
    figure = new_figure(12, 5)
    setup = next(row.setup for row in rows if row.setup["gamma"])
    figure.suptitle(f"{setup['model']}, draft {setup['draft']}, {rows[0].test}, {setup['threads']} threads")
    throughput, speed_up = figure.subplots(1, 2)
    names = dict.fromkeys(row.parallel.curve for row in rows if row.parallel is not None)
    styles = {
        name: {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        for index, name in enumerate(names)
    }
    _draw_throughput(throughput, rows, styles)
    for curve in curves:
        style = styles[curve.name]
        sizes, values = list(curve.measured), list(curve.measured.values())
        low = [value - min(curve.samples[n]) for n, value in curve.measured.items()]
        high = [max(curve.samples[n]) - value for n, value in curve.measured.items()]
        speed_up.errorbar(sizes, values, yerr=(low, high), label=curve.name, markersize=5, capsize=2, **style)
    speed_up.axhline(1, color="0.5", linewidth=0.8)
    speed_up.set_ylabel("speed-up over plain decoding of as many texts")
    speed_up.set_ylim(bottom=0)
    for axes in (throughput, speed_up):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sorted({n for curve in curves for n in curve.measured}))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("texts decoded together")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    save_figure(figure, path)
    return True


def _draw_throughput(axes: Any, rows: Sequence[BenchRow], styles: Mapping[str, dict[str, Any]]) -> None:
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row.parallel is not None and row.tg is not None:
            lines.setdefault(row.parallel.curve, []).append((row.parallel.n_parallel, row.tg.mean))
    for name, points in lines.items():
        axes.plot(*zip(*points, strict=True), label=name, markersize=4, **styles[name])
    axes.set_ylabel("tokens per second, all texts")
    axes.set_ylim(bottom=0)
