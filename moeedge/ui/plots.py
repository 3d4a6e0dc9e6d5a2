"""The pictures of `--plot` and `--gantt`, drawn by Matplotlib without a display.

Matplotlib takes half a second to import, so it is imported where a picture is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moeedge.analysis.profile import SMOOTHING_STEPS
from moeedge.errors import InputError
from moeedge.policies.registry import BOUNDS
from moeedge.sim.clock import STREAMS, Span

if TYPE_CHECKING:
    from moeedge.analysis.profile import LayerProfile
    from moeedge.bench.records import BenchRow
    from moeedge.sim.curves import CurvePanel, CurvePoint

_DPI = 130
COLOURS = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f")
MARKERS = "osD^vPX*"
_SD, _AR, _COLD, _OVERLAP = "#1f77b4", "#d62728", "#7f7f7f", "#2ca02c"
_DETAIL_LAYERS = 4
_LEFT_EDGE = 0.05  # uploads, for policies that move less
_BOUND = "offline bound"
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

Point = tuple[float, float]


def new_figure(width: float, height: float) -> Any:
    """A figure of so many inches on a canvas without a display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save_figure(figure: Any, path: Path) -> None:
    """Writes the picture; the suffix selects the format. Raises InputError where the file cannot be written."""
    try:
        figure.savefig(path, dpi=_DPI)
    except OSError as error:
        reason = error.strerror or "write error"
        raise InputError(f"Cannot write the picture {path}: {reason}.", "Choose another path.") from None


def lines_of(rows: Sequence[BenchRow], value: Callable[[BenchRow], float | None]) -> dict[str, list[Point]]:
    """(cache ratio, value) by policy and mode, in order of the ratio; rows without a cache or a value are left out."""
    modes = {row.mode for row in rows if row.cache_ratio is not None}
    lines: dict[str, list[Point]] = {}
    for row in rows:
        number = value(row)
        if row.cache_ratio is None or number is None:
            continue
        name = row.policy if len(modes) == 1 else f"{row.policy}, {row.mode}"
        lines.setdefault(name, []).append((row.cache_ratio, number))
    return {name: sorted(points) for name, points in lines.items()}


def draw_sweep(rows: Sequence[BenchRow], path: Path) -> bool:
    """`bench --plot`: hit rate and speed against the cache ratio, a line per policy, of the first test with a cache.

    Returns False, and writes no file, if no row had an expert cache.

    Raises InputError where the file cannot be written.
    """
    test = next((row.test for row in rows if row.cache_ratio is not None), None)
    shown = [row for row in rows if row.test == test]
    if test is None:
        return False
    figure = new_figure(8, 8)
    setup = next(row.setup for row in shown if row.cache_ratio is not None)
    figure.suptitle(f"{setup['model']}, {test}, device {setup['device']}")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_lines(upper, lines_of(shown, lambda row: row.cache.hit_rate_pairs))
    upper.set_ylim(0, 1)
    upper.set_ylabel("pair hits: share of (token, expert) pairs")
    _draw_lines(lower, lines_of(shown, lambda row: row.ratio))
    drafted = next((row.ratio for row in shown if row.mode == "stock-sd"), None)
    lower.axhline(1, color="0.5", linestyle=":", label="stock-ar")
    if drafted is not None:
        lower.axhline(drafted, color="0.5", linestyle="--", label="stock-sd")
    lower.set_ylim(bottom=0)
    lower.set_xlim(0, 1.1 * max(row.cache_ratio for row in shown if row.cache_ratio is not None) or 1)
    lower.set_ylabel("decoding speed / stock-ar's")
    lower.set_xlabel("cache ratio: share of all experts cached on the device")
    lower.legend(loc="best", fontsize="small")
    save_figure(figure, path)
    return True


def _draw_lines(axes: Any, lines: dict[str, list[Point]]) -> None:
    for index, (name, points) in enumerate(lines.items()):
        ratios, values = zip(*points, strict=True)
        style = {"color": COLOURS[index % len(COLOURS)], "marker": MARKERS[index % len(MARKERS)]}
        axes.plot(ratios, values, label=name, markersize=5, **style)
    axes.grid(alpha=0.3)


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
        [handles[name] for name in (*names, _BOUND)],
        [*names, _BOUND],
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
    (handles[_BOUND],) = axes.plot(*zip(*panel.offline_bound, strict=True), "--", color="black", linewidth=1.0)
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


def draw_profiles(profiles: Sequence[LayerProfile], title: str, path: Path) -> None:
    """`profile --plot`: steps x experts and the accuracy curve of one layer, or layers x experts and accuracies.

    Raises InputError where the file cannot be written.
    """
    figure = new_figure(10, 7.5)
    figure.suptitle(title)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    if len(profiles) == 1:
        _draw_steps(figure, upper, lower, profiles[0])
    else:
        _draw_layers(figure, upper, lower, profiles)
    save_figure(figure, path)


def _draw_steps(figure: Any, upper: Any, lower: Any, profile: LayerProfile) -> None:
    image = upper.imshow(
        profile.counts.T if profile.steps else np.zeros((profile.n_experts, 1)),
        aspect="auto",
        origin="lower",
        interpolation="nearest",
        cmap="magma",
        extent=(0.5, max(profile.steps, 1) + 0.5, -0.5, profile.n_experts - 0.5),
    )
    figure.colorbar(image, ax=upper, label="activations")
    upper.set_ylabel("expert")
    upper.set_title(f"layer {profile.layer}: activations per verification step", fontsize="medium")
    steps = np.arange(1, profile.steps + 1)
    for start in steps[profile.is_first][1:]:  # start of the next text
        for axes in (upper, lower):
            axes.axvline(start - 0.5, color="white" if axes is upper else "0.85", linewidth=0.5)
    curve = profile.smoothed_accuracy
    lower.plot(steps[: curve.size], profile.accuracy_curve, color=_SD, alpha=0.25, linewidth=0.8)
    fed = "verification steps" if profile.speculative else "one token at a time"
    lower.plot(steps[: curve.size], curve, color=_SD, label=f"Alg. 1, fed with {fed} (mean of {SMOOTHING_STEPS})")
    if profile.speculative and profile.ar_accuracy is not None:
        lower.axhline(
            profile.ar_accuracy, color=_AR, linestyle="--", label="Alg. 1, fed with one token at a time (mean)"
        )
    if profile.step_cold_share is not None:
        lower.axhline(profile.step_cold_share, color=_COLD, linestyle=":", label="always cold (mean)")
    lower.set_xlim(0.5, max(profile.steps, 1) + 0.5)
    lower.set_xlabel("verification step" if profile.speculative else "step")
    lower.set_ylabel("hot-or-cold accuracy")
    if np.isfinite(curve).any() or profile.step_cold_share is not None:
        lower.legend(loc="lower right", fontsize="small")


def _draw_layers(figure: Any, upper: Any, lower: Any, profiles: Sequence[LayerProfile]) -> None:
    share = np.stack([profile.counts.sum(axis=0) / max(int(profile.step_tokens.sum()), 1) for profile in profiles])
    image = upper.imshow(share, aspect="auto", origin="lower", interpolation="nearest", cmap="magma")
    figure.colorbar(image, ax=upper, label="share of tokens")
    names = [str(profile.layer) for profile in profiles]
    shown = np.unique(np.linspace(0, len(names) - 1, min(len(names), 16)).astype(int))
    upper.set_yticks(shown, [names[i] for i in shown])
    upper.set_ylabel("layer")
    upper.set_xlabel("expert")
    where = np.arange(len(profiles))
    lines = (
        ("Alg. 1, fed with verification steps", _SD, "o-", [profile.sd_accuracy for profile in profiles]),
        ("Alg. 1, fed with one token at a time", _AR, "s--", [profile.ar_accuracy for profile in profiles]),
        ("always cold", _COLD, ":", [profile.step_cold_share for profile in profiles]),
        ("overlap of adjacent tokens", _OVERLAP, "-", [profile.curves.overlap[1] for profile in profiles]),
    )
    for label, colour, style, values in lines:
        if any(value is not None for value in values):
            lower.plot(
                where, [np.nan if v is None else v for v in values], style, color=colour, label=label, markersize=3
            )
    lower.set_xticks(shown, [names[i] for i in shown])
    lower.set_xlabel("layer")
    lower.set_ylabel("share")
    if lower.lines:
        lower.legend(loc="best", fontsize="small")


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
