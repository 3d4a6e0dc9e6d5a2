"""The plots of a profile, each after a figure of one of the papers, and the page of `moeedge profile --report`.

The page is one HTML file with its plots, tables and JSON inside. It loads nothing, has no script that runs, follows the
reader's light or dark setting and fits a phone.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.analysis import routing_curves
from moeedge.analysis.predictors import UtilityCurves
from moeedge.analysis.profile import (
    DETAILED_LAYERS,
    GAMMAS,
    SMOOTHING_STEPS,
    UNIQUE_TOKENS,
    LayerProfile,
    ModelProfile,
    SpeculationGain,
)
from moeedge.analysis.routing_curves import BATCHES, DISTANCES, RoutingCurves
from moeedge.ui.figures import FigureRow
from moeedge.ui.plots import PAGE_DARK, PAGE_LIGHT, Line, Plot, save_plots, svg_of
from moeedge.ui.profile_views import PREDICTOR_NAMES
from moeedge.ui.tables import Column, value_columns

_MAX_ROWS = 200  # of a table in the page: longer ones are in the JSON alone
_SHOWN_STEPS = 1000  # of the first ones: more are finer than a pixel
_STEP_SIZE = (10, 4.2)  # inches
_CAPTIONS = {  # by a title up to its first comma
    "Popularity of experts": "Share of the tokens of text that use each expert, from the most to the least popular. "
    "The steeper the line, the fewer experts serve most tokens.",
    "Popularity by layer and expert": "Multiples of k/N: 1 is an expert as popular as the average one.",
    "Skew by layer": "As many equally popular experts would have the same entropy; and how much more popular than the "
    "average the hottest expert is.",
    "Overlap of tokens j apart": "Share of a token's experts that the j-th next token uses too. Independence: with "
    "this popularity and no order; uniform: k/N (the production study of MoE speculation).",
    "Distinct experts of B tokens": "Experts that B consecutive tokens of text use together in a layer: what a "
    "verification of B tokens reads. Independence and uniform as before (the production study; MoESD, Eq. 8; SP-MoE, "
    "Figure 2(a)).",
    "Overlap of adjacent tokens by layer": "What is above independence comes from the order of the tokens.",
    "Distinct experts of a verification by layer": f"{UNIQUE_TOKENS} tokens: one and {UNIQUE_TOKENS - 1} drafts.",
    "Tokens gained against experts used": "Omega: expected tokens of a verification of gamma drafts. a/b: its "
    "distinct experts over those of one token. Where experts take all the time and drafting none, speculation pays "
    "while a/b is below Omega (MoE-SpAc, Figure 7). ",
    "Experts of single tokens": "Without speculation: one token per step, each expert used or not. ",
    "Activations of verifications": "Tokens of each verification step that use the expert, rejected drafts included "
    "(MoE-SpAc, Figure 8). ",
    "Hot-or-cold accuracy": "Share of the experts that Algorithm 1 as printed predicts correctly as used or unused, "
    "before the step (MoE-SpAc, Figure 4, tau = 1). An answer that is always cold has the dotted line's accuracy. ",
    "Utility against frequency": "Tokens of the next verification step that use an expert of each utility score "
    "(MoE-SpAc, Figure 9(b)).",
    "Work on either side of tau": "r_c: share of the (token, expert) pairs whose expert has a utility below tau, the "
    "CPU's. r_g: share of the step's distinct experts with tau or more, the GPU's (MoE-SpAc, Eq. 7 and 8, Figure "
    "9(a)). The deviation is between steps: a small one lets a warm-up tell the ratio.",
}


def profile_plots(profile: ModelProfile) -> list[Plot]:
    """All plots of the profile, by section of its page."""
    if profile.mean is None:
        return []
    by_name = {f"layer {layer.layer}": layer.curves for layer in profile.layers[:DETAILED_LAYERS]}
    by_name[f"mean of {len(profile.curves)} layers"] = profile.mean
    sections = {
        "Popularity of experts": _popularity(profile, by_name),
        "Experts shared by tokens": _sharing(profile, profile.mean, by_name),
        "What speculation gains": [] if profile.gain is None else [_gain(profile.gain)],
    }
    for layer in profile.layers[:DETAILED_LAYERS]:
        if layer.steps and layer.tokens:
            utility = [plot for curves in layer.utility for plot in _utility(layer, curves)]
            sections[f"Layer {layer.layer}, step by step"] = [*_activations(layer), _accuracy(layer), *utility]
    return [
        replace(plot, section=section, caption=_CAPTIONS[plot.title.partition(",")[0]] + plot.caption)
        for section, plots in sections.items()
        for plot in plots
    ]


def plot_profiles(profiles: Sequence[LayerProfile], title: str, path: Path) -> None:
    """Draws one layer step by step, or several in one map, with the accuracy below. Raises InputError."""
    if len(profiles) == 1:
        save_plots([_activations(profiles[0])[0], _accuracy(profiles[0])], path, title=title, size=_STEP_SIZE)
        return
    layers = [profile.layer for profile in profiles]
    share = np.stack([profile.counts.sum(axis=0) / max(int(profile.step_tokens.sum()), 1) for profile in profiles])
    lines = [
        Line("Algorithm 1, fed with verification steps", [profile.sd_accuracy for profile in profiles], "o-"),
        Line("Algorithm 1, fed with single tokens", [profile.ar_accuracy for profile in profiles], "s--"),
        Line("always cold", [profile.step_cold_share for profile in profiles], ":"),
        Line("overlap of adjacent tokens", [profile.curves.overlap[1] for profile in profiles], "-"),
    ]
    heading = "Share of the tokens that use each expert"
    shares = Plot(heading, "expert", "layer", values=share, value_label="share of tokens", y=layers)
    predictions = Plot("Predictions and overlap by layer", "layer", "share of experts or tokens", layers, lines)
    save_plots([shares, predictions], path, title=title, size=_STEP_SIZE)


def _popularity(profile: ModelProfile, by_name: Mapping[str, RoutingCurves]) -> list[Plot]:
    chance, curves, layers = profile.meta.n_expert_used / profile.meta.n_experts, profile.curves, _layers(profile)
    lines = [Line(name, np.sort(each.popularity)[::-1].tolist()) for name, each in by_name.items()]
    ranks = range(1, profile.meta.n_experts + 1)
    lines.append(Line("uniform, k/N", [chance] * len(ranks), ":", colour=5))
    by_layer = np.stack([each.popularity for each in curves]) / chance
    skews = [
        Line("effective experts, 2^entropy", [each.skew.effective_experts for each in curves], "o-"),
        Line("hottest expert, multiple of k/N", [each.skew.top_ratio for each in curves], "s-"),
    ]
    title, multiple = "Popularity by layer and expert", "multiple of k/N"
    return [
        Plot("Popularity of experts", "rank of the expert", "share of tokens", ranks, lines),
        Plot(title, "expert", "layer", values=by_layer, value_label=multiple, y=layers),
        Plot("Skew by layer", "layer", "experts; multiple", layers, skews),
    ]


def _layers(profile: ModelProfile) -> list[int]:
    return [curves.layer for curves in profile.curves if curves.layer is not None]


def _sharing(profile: ModelProfile, mean: RoutingCurves, by_name: Mapping[str, RoutingCurves]) -> list[Plot]:
    n, distances, curves, layers = UNIQUE_TOKENS, len(DISTANCES), profile.curves, _layers(profile)
    overlap = _against_chance(
        {name: each.overlap.values() for name, each in by_name.items()},
        [mean.overlap_independence] * distances,
        [mean.overlap_uniform] * distances,
    )
    unique = _against_chance(
        {name: each.unique.values() for name, each in by_name.items()},
        mean.unique_independence.values(),
        mean.unique_uniform.values(),
    )
    overlaps = [(each.overlap[1], each.overlap_independence, each.overlap_uniform) for each in curves]
    uniques = [(each.unique[n], each.unique_independence[n], each.unique_uniform[n]) for each in curves]
    overlap_by_layer, unique_by_layer = (
        _against_chance({"measured": measured}, independence, uniform)
        for measured, independence, uniform in (zip(*overlaps, strict=True), zip(*uniques, strict=True))
    )
    distinct = "distinct experts"
    return [
        Plot("Overlap of tokens j apart", "distance j in tokens", "overlap", DISTANCES, overlap),
        Plot("Distinct experts of B tokens", "tokens B", distinct, BATCHES, unique, log_base=2),
        Plot("Overlap of adjacent tokens by layer", "layer", "overlap", layers, overlap_by_layer),
        Plot("Distinct experts of a verification by layer", "layer", distinct, layers, unique_by_layer),
    ]


def _against_chance(
    measured: Mapping[str, Iterable[float | None]], independence: Iterable[float], uniform: Iterable[float]
) -> list[Line]:
    """Measured lines, and what there would be without any order of the tokens."""
    lines = [Line(name, list(values), ".-") for name, values in measured.items()]
    chance = Line("independence", list(independence), "--", colour=4), Line("uniform", list(uniform), ":", colour=5)
    return [*lines, *chance]


def _gain(gain: SpeculationGain) -> Plot:
    lines = [
        Line("Omega", gain.omega, "o-"),
        Line("a/b, measured", gain.a_over_b, "s-"),
        Line("a/b, independence", gain.a_over_b_independence, "--"),
        Line("a/b, uniform", gain.a_over_b_uniform, ":"),
    ]
    source = "measured" if gain.measured else "assumed"
    caption = f"Each draft is accepted with a chance of {gain.acceptance:.3f} ({source})."
    x_label, y_label = "draft length gamma", "multiple of one token"
    return Plot("Tokens gained against experts used", x_label, y_label, GAMMAS, lines, caption=caption)


def _activations(profile: LayerProfile) -> list[Plot]:
    members = routing_curves.membership(profile.token_ids[:_SHOWN_STEPS], profile.n_experts).T.astype(float)
    maps = [("Experts of single tokens", "token of text", "used", members, profile.tokens, profile.persistence_ar)]
    if profile.speculative:
        about, counts = ("Activations of verifications", "verification step", "activations"), profile.counts.T
        maps.insert(0, (*about, counts[:, :_SHOWN_STEPS], profile.steps, profile.persistence_sd))
    plots = []
    for title, x_label, value_label, values, n_steps, correlation in maps:
        caption = _shown(n_steps)
        if correlation is not None:
            caption += f"Correlation of an expert's activations in consecutive steps: {correlation:.2f}."
        title = f"{title}, layer {profile.layer}"
        plots.append(Plot(title, x_label, "expert", values=values, value_label=value_label, caption=caption))
    return plots


def _shown(n_steps: int) -> str:
    return f"The first {_SHOWN_STEPS:,} of {n_steps:,}. " if n_steps > _SHOWN_STEPS else ""


def _accuracy(profile: LayerProfile) -> Plot:
    smoothed, accuracy = (
        [None if np.isnan(value) else value for value in curve[:_SHOWN_STEPS].tolist()]
        for curve in (profile.smoothed_accuracy, profile.accuracy_curve)
    )
    fed = "verification steps" if profile.speculative else "single tokens"
    lines = [
        Line(f"mean of {SMOOTHING_STEPS} steps, fed with {fed}", smoothed),
        Line("of the step", accuracy, ".", colour=5),
        Line("always cold, mean", [profile.step_cold_share] * len(accuracy), ":"),
    ]
    if profile.speculative:
        lines.insert(1, Line("fed with single tokens, mean", [profile.ar_accuracy] * len(accuracy), "--"))
    title, caption = f"Hot-or-cold accuracy, layer {profile.layer}", _shown(profile.accuracy_curve.size).strip()
    return Plot(title, "step", "accuracy", range(1, len(accuracy) + 1), lines, bottom=None, caption=caption)


def _utility(profile: LayerProfile, curves: UtilityCurves) -> list[Plot]:
    by_score = [
        Line("mean", [each.mean for each in curves.frequency], "o-"),
        Line("median", [each.median for each in curves.frequency], "s:"),
        Line("share used", [each.used for each in curves.frequency], "^--"),
    ]
    by_tau = [
        Line("1 - r_c", [None if value is None else 1 - value for value in curves.r_c], "o:"),
        Line("r_g", curves.r_g, "s-"),
        Line("deviation of r_c", curves.r_c_stddev, "--", colour=0),
        Line("deviation of r_g", curves.r_g_stddev, "--", colour=1),
    ]
    scores, thresholds = range(len(curves.frequency)), range(1, len(curves.r_c) + 1)
    whose = f"{PREDICTOR_NAMES[curves.predictor]}, layer {profile.layer}"
    return [
        Plot(f"Utility against frequency, {whose}", "utility score", "activations", scores, by_score),
        Plot(f"Work on either side of tau, {whose}", "threshold tau", "share", thresholds, by_tau),
    ]


_STYLE = f"""
:root {{ color-scheme: light dark; {PAGE_LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {PAGE_DARK} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0 auto; max-width: 76rem; padding: 1rem; background: var(--paper); color: var(--text);
  font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: anywhere; }}
h1 {{ font-size: 1.6rem; line-height: 1.25; margin: .5rem 0; }}
h2 {{ font-size: 1.2rem; margin: 2rem 0 .75rem; }}
h3 {{ font-size: 1rem; margin: 0 0 .25rem; }}
pre {{ overflow-x: auto; padding: .75rem; background: var(--card); border-radius: .5rem; }}
.grid {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 26rem), 1fr)); gap: 1rem; }}
figure {{ margin: 0; padding: .75rem; background: var(--card); border-radius: .5rem; min-width: 0; }}
figure svg {{ display: block; width: 100%; height: auto; }}
figcaption, .faint {{ color: var(--faint); font-size: .875rem; }}
dl {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1rem; margin: 1rem 0; }}
dt {{ color: var(--faint); }}
dd {{ margin: 0; }}
details {{ margin-top: .5rem; font-size: .875rem; }}
summary {{ cursor: pointer; color: var(--faint); }}
.scroll {{ overflow-x: auto; max-height: 24rem; }}
table {{ border-collapse: collapse; font-variant-numeric: tabular-nums; }}
th, td {{ padding: .1rem .6rem; text-align: right; white-space: nowrap; border-bottom: 1px solid var(--grid); }}
th:first-child, td:first-child {{ text-align: left; }}
th {{ position: sticky; top: 0; background: var(--card); font-weight: 600; }}
@media print {{ figure {{ break-inside: avoid; }} }}
"""


def report_html(
    title: str, facts: Sequence[FigureRow], text: str, plots: Iterable[Plot], numbers: dict[str, Any]
) -> str:
    """The page. facts: labels and values of the run; text: main figures; numbers: the JSON that the page carries."""
    escaped = html.escape(title)
    listed = "".join(f"<dt>{html.escape(each.label)}</dt><dd>{html.escape(each.value)}</dd>" for each in facts)
    sections = "".join(
        f'<section><h2>{html.escape(name)}</h2><div class="grid">{"".join(map(_figure_html, members))}</div></section>'
        for name, members in groupby(plots, key=lambda plot: plot.section)
    )
    # "<" cannot end the element inside a JSON string if it is written as an escape
    data = json.dumps(numbers, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8" />
<meta name="viewport" content="width=device-width, initial-scale=1" />
<meta name="referrer" content="no-referrer" />
<title>{escaped}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{escaped}</h1>
<dl>{listed}</dl>
<pre>{html.escape(text)}</pre>
{sections}
<p class="faint">Every number of this page is in its source as JSON: the element with the id "numbers".</p>
<script type="application/json" id="numbers">{data}</script>
</body>
</html>
"""


def _figure_html(plot: Plot) -> str:
    title = html.escape(plot.title)
    drawn = svg_of(plot).replace("<svg ", f'<svg aria-label="{title}" ', 1)
    caption = f"<figcaption>{html.escape(plot.caption)}</figcaption>"
    return f"<figure><h3>{title}</h3>{drawn}{caption}{_table_html(plot)}</figure>"


def _table_html(plot: Plot) -> str:
    if not 0 < len(plot.x) <= _MAX_ROWS:
        return ""
    columns = [Column(plot.x_label, 0, "g"), *value_columns([line.label for line in plot.shown], ".4g")]
    values = zip(plot.x, *(line.values for line in plot.shown), strict=True)
    rows = "".join(_row_html("td", [column.text(row) for column in columns]) for row in values)
    head = _row_html("th", [column.title for column in columns])
    return (
        f'<details><summary>Numbers</summary><div class="scroll"><table><thead>{head}</thead>'
        f"<tbody>{rows}</tbody></table></div></details>"
    )


def _row_html(tag: str, texts: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(text)}</{tag}>' for text in texts)}</tr>"
