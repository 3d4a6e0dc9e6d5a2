"""The profile of a model: curves of all its layers, groups of texts, and the gain of speculation from them.

`profile_model` is a function of a trace alone. Groups are kinds of text: data sets, categories and languages. The
production study of MoE speculation, "Generalization across data domains", asks whether the overlap of adjacent tokens
is a property of the routing or of the text (13 categories of Spec-Bench, seven languages). The reports are the JSON of
`moeedge profile`, with the keys that LayerProfile and ModelProfile declare (docs/lab/traces.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from moeedge.analysis.profile import LayerProfile, layer_curves, profile_layers
from moeedge.analysis.routing_curves import RoutingCurves, mean_curves
from moeedge.engine.recording import Recording
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.records import as_dict, figure
from moeedge.run import Run
from moeedge.speculation import expected_tokens
from moeedge.trace.format import Trace, TraceMeta
from moeedge.trace.steps import DraftStats, Steps, drafts_of, recorded_steps

SCHEMA = "moeedge-profile-1"
_DIGITS = 6  # of figures
DETAILED_LAYERS = 3  # of those asked for, that a report shows step by step
GAMMAS = tuple(range(13))  # draft lengths of Figure 7
PAPER_ACCEPTANCE = 0.8  # alpha of Figure 7

Kind = Literal["dataset", "category", "language"]
KINDS: tuple[Kind, ...] = ("dataset", "category", "language")
UNIQUE_TOKENS = 4  # B of the distinct experts that groups are compared by


@dataclass(frozen=True)
class SpeculationGain:
    """Whether a verification's tokens outweigh its experts (MoE-SpAc, Appendix A.1, Eq. 16 and Figure 7).

    a/b is the number of distinct experts of gamma + 1 tokens over that of one token. Where experts dominate the time
    and drafting is free, speculation pays if a/b < Omega. Lists are by draft length, GAMMAS; None: no text is so long.
    """

    acceptance: float  # alpha: the chance of a draft after accepted ones
    measured: bool  # whether alpha was measured, not given or the paper's 0.8
    omega: list[float]  # expected tokens per verification
    a_over_b: list[float | None]
    a_over_b_independence: list[float]
    a_over_b_uniform: list[float]


def speculation_gain(curves: RoutingCurves, drafts: DraftStats | None, *, measured: bool) -> SpeculationGain:
    """Figure 7 from the distinct experts of consecutive tokens. measured: the drafts are a model's, not drawn."""
    alpha = PAPER_ACCEPTANCE if drafts is None else drafts.acceptance_chance

    def over_one(unique: Mapping[int, float | None]) -> list[Any]:
        one, values = unique[1], [unique[gamma + 1] for gamma in GAMMAS]
        return [value / one if value is not None and one else None for value in values]

    return SpeculationGain(
        acceptance=alpha,
        measured=measured and drafts is not None,
        omega=[expected_tokens(gamma, alpha) for gamma in GAMMAS],
        a_over_b=over_one(curves.unique),
        a_over_b_independence=over_one(curves.unique_independence),
        a_over_b_uniform=over_one(curves.unique_uniform),
    )


@dataclass(frozen=True)
class GroupProfile:
    """Figures of the texts of one group, means over layers; None: too few tokens, or nothing was drafted."""

    kind: Kind
    name: str
    texts: int
    tokens: int  # accepted ones
    overlap: float | None  # of adjacent tokens
    overlap_independence: float | None  # with the popularity of the group's own tokens
    unique: float | None  # distinct experts of UNIQUE_TOKENS consecutive tokens
    unique_independence: float | None
    acceptance_rate: float | None  # accepted over drafted tokens


def _profile_groups(trace: Trace, steps: Steps, layers: Sequence[int]) -> list[GroupProfile]:
    """The groups of every kind that has several, in order of appearance, by the trace's parameter "texts"."""
    texts = trace.meta.parameters.get("texts")
    groups = []
    for kind in KINDS:
        sequences: dict[str, list[int]] = {}
        for number, text in enumerate(texts if isinstance(texts, list) else ()):
            name = text.get(kind) if isinstance(text, dict) else None
            if name and isinstance(name, str):
                sequences.setdefault(name, []).append(number)
        if len(sequences) > 1:
            groups += [_profile_group(trace, steps, layers, kind, *group) for group in sequences.items()]
    return groups


def _profile_group(
    trace: Trace, steps: Steps, layers: Sequence[int], kind: Kind, name: str, sequences: list[int]
) -> GroupProfile:
    own_steps = np.isin(steps.sequence, sequences)
    steps = Steps(steps.rows[own_steps], steps.sequence[own_steps], steps.n_text[own_steps])
    rows, drafts = steps.text_rows(), drafts_of(steps)
    mean = mean_curves([layer_curves(trace, layer, rows) for layer in layers])
    return GroupProfile(
        kind=kind,
        name=name,
        texts=int(np.unique(trace.sequence[rows]).size),
        tokens=rows.size,
        overlap=None if mean is None else mean.overlap[1],
        overlap_independence=None if mean is None else mean.overlap_independence,
        unique=None if mean is None else mean.unique[UNIQUE_TOKENS],
        unique_independence=None if mean is None else mean.unique_independence[UNIQUE_TOKENS],
        acceptance_rate=None if drafts is None else drafts.acceptance_rate,
    )


@dataclass(frozen=True, eq=False)  # arrays do not compare to one truth value
class ModelProfile:
    """A model's routing on some texts."""

    meta: TraceMeta
    layers: list[LayerProfile]  # those asked for, in detail
    curves: list[RoutingCurves] = figure("All layers with recorded experts", key="by_layer")
    mean: RoutingCurves | None = figure("Over these; null where no token of text was recorded", key="mean_of_layers")
    gain: SpeculationGain | None = figure("What speculation gains", key="speculation")
    drafts: DraftStats | None = figure("Drafts of the steps")
    groups: list[GroupProfile] = figure("Groups of texts")


def profile_model(
    trace: Trace,
    layers: Sequence[int],
    *,
    steps: Steps | None = None,
    gamma: int | None = None,
    run: Run | None = None,
) -> ModelProfile:
    """The profile of a trace; `layers` in detail.

    steps, gamma: other steps than the recorded ones, such as simulated verifications. run: its progress is in layers;
    cancelled it leaves out the layers that are not done yet, but for those in detail.
    """
    run = run or Run()
    is_recorded = steps is None
    steps = recorded_steps(trace) if steps is None else steps
    detailed = profile_layers(trace, layers, steps=steps, gamma=gamma)
    curves_of = {profile.layer: profile.curves for profile in detailed}
    rows, curves = steps.text_rows(), []
    for layer in trace.expert_layers():
        if layer in curves_of or not run.cancelled():
            curves.append(curves_of.get(layer) or layer_curves(trace, layer, rows))
            run.progress.add()
    drafts, mean = drafts_of(steps), mean_curves(curves)
    return ModelProfile(
        meta=trace.meta,
        layers=detailed,
        curves=curves,
        mean=mean,
        gain=None if mean is None else speculation_gain(mean, drafts, measured=is_recorded),
        groups=_profile_groups(trace, steps, [each.layer for each in curves if each.layer is not None]),
        drafts=drafts,
    )


def layer_report(profile: LayerProfile, run: dict[str, Any], *, by_step: bool = True) -> dict[str, Any]:
    """The profile of a layer as one object: first the measurements, then the model and the run (`run_facts`).

    by_step: with what was counted in each step and of each token, the bulk of the object.
    """
    report = as_dict(profile)
    if not by_step:
        del report["token_experts"], report["activation_counts"]["per_step"]
        del report["hot_cold_accuracy"]["by_step"], report["hot_cold_accuracy"]["by_step_smoothed"]
    return {**rounded(report), **run}


def model_report(profile: ModelProfile) -> dict[str, Any]:
    """The figures of more than one layer: curves by layer and their mean, groups, speculation."""
    report = as_dict(profile) | {"group_unique_tokens": UNIQUE_TOKENS}
    if profile.gain is not None:
        report["speculation"] = {"gamma": GAMMAS, **report["speculation"]}
    return dict(rounded(report))


def complete_report(profile: ModelProfile, run: dict[str, Any]) -> dict[str, Any]:
    """Every number of the report: the run, its layers in detail, and the model."""
    layers = enumerate(profile.layers)
    return {
        "schema": SCHEMA,
        "run": run,
        "layers": [layer_report(layer, {}, by_step=place < DETAILED_LAYERS) for place, layer in layers],
        "model_profile": model_report(profile),
    }


def run_facts(trace: Trace, recording: Recording | None = None, provenance: Provenance | None = None) -> dict[str, Any]:
    """The model and the run. recording: of this process; None for a trace that was read from a file."""
    facts = as_dict(trace.meta)
    del facts["source"]
    parameters: dict[str, Any] = facts.pop("parameters")
    if recording is not None:
        answered = {"answers": recording.answers, "skipped": recording.skipped}
        facts |= {"acceptance_rate": rounded(recording.acceptance_rate), **answered}
    return facts | parameters | {"provenance": as_dict(provenance or read_provenance())}


def rounded(value: Any) -> Any:
    """The value with arrays as lists, its floats rounded, NaN as None and the keys of its dictionaries as strings."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, _DIGITS)
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    return [rounded(each) for each in entries] if isinstance(entries, (list, tuple)) else entries
