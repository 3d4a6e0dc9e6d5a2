"""The picture of `moeedge profile --plot`: activations and prediction accuracy, step by step or layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.profiling.analysis import LayerProfile
from moeedge.ui.output_file import save_picture

_SMOOTHING_STEPS = 16
_SD, _AR, _COLD = "#1f77b4", "#d62728", "#7f7f7f"


def draw_profiles(profiles: Sequence[LayerProfile], title: str, path: Path) -> None:
    """Write the picture: steps x experts and the accuracy curve of one layer, or layers x experts and accuracies.

    Raises InputError where the file cannot be written.
    """
    # half a second to import; only who asks for a picture pays it
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    upper, lower = figure.subplots(2, 1, height_ratios=(3, 2))
    if len(profiles) == 1:
        _draw_steps(figure, upper, lower, profiles[0])
    else:
        _draw_layers(figure, upper, lower, profiles)
    save_picture(figure, path)


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
    for start in steps[profile.fresh][1:]:  # where the next text begins
        for axes in (upper, lower):
            axes.axvline(start - 0.5, color="white" if axes is upper else "0.85", linewidth=0.5)
    curve = smoothed(profile.accuracy_curve, _SMOOTHING_STEPS)
    lower.plot(steps[: curve.size], profile.accuracy_curve, color=_SD, alpha=0.25, linewidth=0.8)
    fed = "verification steps" if profile.speculative else "one token at a time"
    lower.plot(steps[: curve.size], curve, color=_SD, label=f"Alg. 1, fed with {fed} (mean of {_SMOOTHING_STEPS})")
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
        ("overlap of adjacent tokens", "#2ca02c", "-", [profile.overlap for profile in profiles]),
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


def smoothed(curve: NDArray[np.float64], width: int) -> NDArray[np.float64]:
    """Mean of the last `width` known values up to each step; NaN before the first."""
    known = np.isfinite(curve)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, curve, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    ends = np.arange(1, curve.size + 1)
    starts = np.maximum(ends - width, 0)
    n_known = counts[ends] - counts[starts]
    return np.where(n_known > 0, (sums[ends] - sums[starts]) / np.maximum(n_known, 1), np.nan)
