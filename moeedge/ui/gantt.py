"""The picture of one simulated step: what every stream works on, one row each (like MoE-SpAc, Figures 3 and 12, and
SP-MoE, Figure 5), and below it the first layers of the verification in detail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moeedge.sim.events import STREAMS, Span
from moeedge.ui.output_file import save_picture

COLOURS = {
    "draft": "#9467bd",
    "dense": "#7f7f7f",
    "experts": "#1f77b4",
    "upload": "#2ca02c",
    "demand": "#d62728",
    "plan": "#ff7f0e",
}
LABELS = {
    "draft": "draft token",
    "dense": "attention and the rest",
    "experts": "experts",
    "upload": "expert ahead of time",
    "demand": "expert on demand",
    "plan": "synchronise, plan",
}
_NAMES = {"draft": "draft", "gpu": "GPU", "cpu": "CPU", "link": "link", "host": "host"}
_DETAIL_LAYERS = 4


@dataclass(frozen=True)
class Chart:
    """One step of one policy."""

    title: str
    spans: Sequence[Span]


def draw_gantt(charts: Sequence[Chart], path: Path) -> None:
    """Writes the picture, two panels per chart. Raises InputError where the file cannot be written."""
    # half a second to import; only who asks for a picture pays it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(12, 3.2 * len(charts) + 0.8), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(charts), 2, squeeze=False, width_ratios=(3, 2))
    longest_ms = max((_length_ms(chart.spans) for chart in charts), default=0.0)
    for (whole, detail), chart in zip(panels, charts, strict=True):
        begin_ns = min((span.start_ns for span in chart.spans), default=0)
        _draw(whole, chart.spans, begin_ns)
        whole.set_xlim(0, longest_ms)
        whole.set_title(chart.title, fontsize=10)
        _draw(detail, chart.spans, begin_ns)
        detail.set_xlim(*_detail_ms(chart.spans, begin_ns))
        detail.set_title(f"its first {_DETAIL_LAYERS} layers", fontsize=10)
    used = {span.kind for chart in charts for span in chart.spans}
    patches = [Patch(color=COLOURS[kind], label=LABELS[kind]) for kind in COLOURS if kind in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), fontsize=9, frameon=False)
    save_picture(figure, path)


def _draw(panel: Any, spans: Sequence[Span], begin_ns: int) -> None:
    rows = [name for name in STREAMS if any(span.stream == name for span in spans)]
    for row, name in enumerate(rows):
        for kind, colour in COLOURS.items():
            bars = [
                ((span.start_ns - begin_ns) * 1e-6, span.ns * 1e-6)
                for span in spans
                if span.stream == name and span.kind == kind
            ]
            panel.broken_barh(bars, (row - 0.4, 0.8), facecolors=colour, linewidth=0)
    panel.set_yticks(range(len(rows)), [_NAMES[name] for name in rows])
    panel.invert_yaxis()
    panel.set_xlabel("ms")


def _length_ms(spans: Sequence[Span]) -> float:
    if not spans:
        return 0.0
    return (max(span.end_ns for span in spans) - min(span.start_ns for span in spans)) * 1e-6


def _detail_ms(spans: Sequence[Span], begin_ns: int) -> tuple[float, float]:
    """From where the verification begins to the end of its first layers."""
    of_layers = [span for span in spans if span.stream != "link" and 0 <= span.layer < _DETAIL_LAYERS]
    if not of_layers:
        return 0.0, max(_length_ms(spans), 1e-6)
    start_ns, end_ns = min(span.start_ns for span in of_layers), max(span.end_ns for span in of_layers)
    return (start_ns - begin_ns) * 1e-6, (end_ns - begin_ns) * 1e-6
