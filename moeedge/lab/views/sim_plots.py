"""The pictures of `replay --plot` and `simulate --gantt`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.lab.sim.clock import STREAMS, Span
from moeedge.policies.registry import BOUNDS
from moeedge.ui.plots import COLOURS, MARKERS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.lab.sim.curves import CurvePanel, CurvePoint

_DETAIL_LAYERS = 4
_LEFT_EDGE = 0.05  # uploads, for policies that move less
_THICK = ("spac", "lfu")  # with the interval of the bootstrap
_STREAM_NAMES = {"draft": "draft", "gpu": "GPU", "cpu": "CPU", "link": "link", "host": "host"}
_KINDS = {  # of spans: colour and label
    "draft": ("#9467bd", "draft token"),
    "dense": ("#7f7f7f", "attention and the rest"),
    "experts": ("#1f77b4", "experts"),
    "upload": ("#2ca02c", "prefetched expert"),
    "demand": ("#d62728", "expert on demand"),
    "plan": ("#ff7f0e", "synchronise, plan"),
}


def draw_curves(panels: Sequence[CurvePanel], path: Path) -> None:
    """`replay --curve --plot`: hits over uploads, a panel per trace and model of rejected tokens, a line per policy.

    A line is what a policy reaches with at most so many uploads; a policy of one point, whose loads on demand cannot be
    limited, is a marker; those without their predictor are hollow. Raises InputError where the file cannot be written.
    """
    n_columns = min(len(panels), 2 if len(panels) < 5 else 4)
    n_rows = -(-len(panels) // n_columns)
    figure = new_figure(5.2 * n_columns, 4.2 * n_rows + 0.9)
    all_axes = figure.subplots(n_rows, n_columns, squeeze=False).reshape(-1)
    names = list(dict.fromkeys(point.policy for panel in panels for point in panel.points))
    styles = {name: _curve_style(index, name) for index, name in enumerate(names)}
    handles: dict[str, Any] = {}
    for axes, panel in zip(all_axes, panels, strict=False):
        handles |= _draw_curve_panel(axes, panel, styles)
    for axes in all_axes[len(panels) :]:
        axes.axis("off")
    for index, axes in enumerate(all_axes[: len(panels)]):
        if index % n_columns == 0:
            axes.set_ylabel("pair hits: share of (token, expert) pairs")
        if index + n_columns >= len(panels):
            axes.set_xlabel("uploads per layer and step, at most")
    figure.legend(
        [handles[name] for name in names],
        names,
        loc="outside lower center",
        ncols=min(len(handles), 10),
        fontsize="small",
        frameon=False,
    )
    save_figure(figure, path)


def _curve_style(index: int, name: str) -> dict[str, Any]:
    style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index // len(COLOURS) % len(MARKERS)]}
    if name in BOUNDS:
        return {"color": "black", "marker": "*" if name == "oracle" else "+"}
    return style


def _draw_curve_panel(axes: Any, panel: CurvePanel, styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Draws one panel; returns what the legend shows of each policy."""
    handles = {}
    points: dict[str, list[CurvePoint]] = {}
    for point in panel.points:
        points.setdefault(point.policy, []).append(point)
    for name, own in points.items():
        style = styles[name]
        face = "white" if name in panel.apart else style["color"]
        if len(own) == 1:
            x, y = max(own[0].uploads_per_layer_step, _LEFT_EDGE), own[0].hit_rate_pairs.value
            (handles[name],) = axes.plot(x, y, linestyle="", markersize=7, markerfacecolor=face, **style)
            continue
        reached = [each for each in panel.at_most if each.policy == name and each.uploads is not None]
        x_values = [each.uploads for each in reached]
        middle, low, high = (
            [getattr(each.hit_rate_pairs, part) for each in reached] for part in ("value", "low", "high")
        )
        dashes = ":" if name in panel.apart else "-"
        width = 2.2 if name in _THICK else 1.0
        (handles[name],) = axes.plot(
            x_values, middle, dashes, linewidth=width, markersize=4, markerfacecolor=face, **style
        )
        if name in _THICK:
            axes.fill_between(x_values, low, high, color=style["color"], alpha=0.15, linewidth=0)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.grid(alpha=0.3)
    model = "" if panel.rejected_token_model == "recorded" else f", {panel.rejected_token_model}"
    memory = ", memory emptied" if panel.fresh_memory else ""
    axes.set_title(
        f"{panel.trace}{model}{memory}\n{panel.n_texts} texts, {panel.steps:,} steps, {100 * panel.cache_ratio:g} % of "
        "the experts",
        fontsize="small",
    )
    return handles


@dataclass(frozen=True)
class Chart:
    """One step of one policy."""

    title: str
    spans: Sequence[Span]


def draw_gantt(charts: Sequence[Chart], path: Path) -> None:
    """`simulate --gantt`: the work of every stream over time, and the first layers in detail; two panels per chart.

    Like MoE-SpAc, Figures 3 and 12, and SP-MoE, Figure 5. Raises InputError where the file cannot be written.
    """
    from matplotlib.patches import Patch

    figure = new_figure(12, 3.2 * len(charts) + 0.8)
    panels = figure.subplots(len(charts), 2, squeeze=False, width_ratios=(3, 2))
    longest_ms = max((_length_ms(chart.spans) for chart in charts), default=0.0)
    for (entire, detail), chart in zip(panels, charts, strict=True):
        begin_ns = min((span.start_ns for span in chart.spans), default=0)
        _draw_spans(entire, chart.spans, begin_ns)
        entire.set_xlim(0, longest_ms)
        entire.set_title(chart.title, fontsize=10)
        _draw_spans(detail, chart.spans, begin_ns)
        detail.set_xlim(*_detail_ms(chart.spans, begin_ns))
        detail.set_title(f"its first {_DETAIL_LAYERS} layers", fontsize=10)
    used = {span.kind for chart in charts for span in chart.spans}
    patches = [Patch(color=colour, label=label) for kind, (colour, label) in _KINDS.items() if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9, frameon=False)
    save_figure(figure, path)


def _draw_spans(panel: Any, spans: Sequence[Span], begin_ns: int) -> None:
    rows = [name for name in STREAMS if any(span.stream == name for span in spans)]
    for row, name in enumerate(rows):
        for kind, (colour, _) in _KINDS.items():
            bars = [
                ((span.start_ns - begin_ns) * 1e-6, span.ns * 1e-6)
                for span in spans
                if span.stream == name and span.kind == kind
            ]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    panel.set_yticks(range(len(rows)), [_STREAM_NAMES[name] for name in rows])
    panel.invert_yaxis()
    panel.set_xlabel("ms")


def _length_ms(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) * 1e-6


def _detail_ms(spans: Sequence[Span], begin_ns: int) -> tuple[float, float]:
    """Start of the verification and end of its first layers, in ms."""
    of_layers = [span for span in spans if span.stream != "link" and 0 <= span.layer < _DETAIL_LAYERS]
    if not of_layers:
        return 0.0, max(_length_ms(spans), 1e-6)
    start_ns, end_ns = min(span.start_ns for span in of_layers), max(span.end_ns for span in of_layers)
    return (start_ns - begin_ns) * 1e-6, (end_ns - begin_ns) * 1e-6
