"""The picture of `replay --plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moeedge.policies.registry import BOUNDS
from moeedge.ui.plots import COLOURS, MARKERS, new_figure, save_figure

if TYPE_CHECKING:
    from moeedge.lab.sim.curves import CurvePanel, CurvePoint

_LEFT_EDGE = 0.05  # uploads, for policies that move less
_THICK = ("spac", "lfu")  # with the interval of the bootstrap


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
