"""The JSON of `moeedge profile`: an object per layer (`-o json`), and the complete profile (`--report`).

The keys are those that LayerProfile and ModelProfile declare; docs/lab/traces.md describes them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from moeedge.analysis.model_profile import DETAILED_LAYERS, GAMMAS, UNIQUE_TOKENS, ModelProfile
from moeedge.analysis.profile import LayerProfile
from moeedge.engine.recording import Recording
from moeedge.hardware.provenance import read_provenance
from moeedge.records import as_dict
from moeedge.trace.format import Trace

SCHEMA = "moeedge-profile-1"
_DIGITS = 6  # of figures
# what was counted in each step and of each token, the bulk of a layer
_BULK = (("hot_cold_accuracy", "by_step"), ("hot_cold_accuracy", "by_step_smoothed"), ("activation_counts", "per_step"))


def layer_report(profile: LayerProfile, run: dict[str, Any], *, by_step: bool = True) -> dict[str, Any]:
    """The profile of a layer as one object: first the measurements, then the model and the run (`run_facts`).

    by_step: with what was counted in each step and of each token, the bulk of the object.
    """
    report = as_dict(profile)
    if not by_step:
        del report["token_experts"]
        for group, key in _BULK:
            del report[group][key]
    return {**rounded(report), **run}


def model_report(profile: ModelProfile) -> dict[str, Any]:
    """What concerns more than one layer: curves by layer and their mean, groups, speculation."""
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


def run_facts(trace: Trace, recording: Recording | None = None) -> dict[str, Any]:
    """The model and the run. recording: of this process; None for a trace that was read from a file."""
    facts = as_dict(trace.meta)
    del facts["source"]
    parameters: dict[str, Any] = facts.pop("parameters")
    if recording is not None:
        answered = {"answers": recording.answers, "skipped": recording.skipped}
        facts |= {"acceptance_rate": rounded(recording.acceptance_rate)} | answered
    return facts | parameters | {"provenance": as_dict(read_provenance())}


def rounded(value: Any) -> Any:
    """The value with arrays as lists, its floats rounded, NaN as None and the keys of its dictionaries as strings."""
    if isinstance(value, float):
        return None if math.isnan(value) else round(value, _DIGITS)
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    entries = value.tolist() if isinstance(value, np.ndarray) else value
    return (
        [rounded(each) for each in entries]
        if isinstance(entries, Sequence) and not isinstance(entries, str)
        else entries
    )
