"""The JSON of `moeedge profile`: an object per layer (`-o json`), and the complete profile (`--report`).

Keys in docs/lab/traces.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moeedge.analysis.model_profile import DETAILED_LAYERS, GAMMAS, UNIQUE_TOKENS, ModelProfile
from moeedge.analysis.profile import HEADLINE, LayerProfile
from moeedge.analysis.routing_curves import DISTANCES, RoutingCurves
from moeedge.engine.recording import Recording
from moeedge.trace.format import Trace

SCHEMA = "moeedge-profile-1"
_DIGITS = 6  # of figures


def layer_report(profile: LayerProfile, run: dict[str, Any], *, by_step: bool = True) -> dict[str, Any]:
    """The profile of a layer as one object: first the measurements, then the model and the run (`run_facts`).

    by_step: with what was counted in each step and of each token, the bulk of the object.
    """
    next_token = profile.score(HEADLINE, "ar", "token")
    curves = profile.curves
    measured: dict[str, Any] = {
        **_layer_curves(curves),
        "steps": profile.steps,
        "hot_cold_accuracy": {
            "sd": profile.sd_accuracy,
            "ar": profile.ar_accuracy,
            "always_cold": profile.step_cold_share,
            "ar_next_token": next_token.accuracy if next_token else None,
            "always_cold_next_token": profile.token_cold_share,
            "predictors": [asdict(score) for score in profile.scores],
        },
        "overlap": curves.overlap[DISTANCES[0]],
        "unique_experts_per_step": profile.unique_per_step,
        "hottest": [asdict(hot) for hot in profile.hottest],
        "utility": [asdict(curve) for curve in profile.utility],
        "persistence": {"sd": profile.persistence_sd, "ar": profile.persistence_ar},
        "activation_counts": {
            "step_tokens": profile.step_tokens.tolist(),
            "total": profile.counts.sum(axis=0, dtype=int).tolist(),
        },
    }
    if by_step:
        measured["hot_cold_accuracy"]["by_step"] = _known(profile.accuracy_curve)
        measured["hot_cold_accuracy"]["by_step_smoothed"] = _known(profile.smoothed_accuracy)
        measured["activation_counts"]["per_step"] = profile.counts.tolist()
        measured["token_experts"] = profile.token_ids.tolist()
    return {**rounded(measured), **run}


def _known(values: NDArray[np.float64]) -> list[float | None]:
    return [None if np.isnan(value) else value for value in values.tolist()]


def _layer_curves(curves: RoutingCurves) -> dict[str, Any]:
    return {
        "layer": curves.layer,
        "tokens": curves.tokens,
        "overlap_independence": curves.overlap_independence,
        "overlap_uniform": curves.overlap_uniform,
        "overlap_by_distance": curves.overlap,
        "unique_experts": {
            "empirical": curves.unique,
            "uniform": curves.unique_uniform,
            "independence": curves.unique_independence,
        },
        "popularity": curves.popularity.tolist(),
        "skew": asdict(curves.skew),
    }


def model_report(profile: ModelProfile) -> dict[str, Any]:
    """What concerns more than one layer: curves by layer and their mean, groups, speculation."""
    report: dict[str, Any] = {
        "by_layer": [_layer_curves(curves) for curves in profile.curves],
        "mean_of_layers": None if profile.mean is None else _layer_curves(profile.mean),
        "speculation": None if profile.gain is None else {"gamma": list(GAMMAS), **asdict(profile.gain)},
        "drafts": None if profile.drafts is None else asdict(profile.drafts),
        "groups": [asdict(group) for group in profile.groups],
        "group_unique_tokens": UNIQUE_TOKENS,
    }
    return dict(rounded(report))


def complete_report(profile: ModelProfile, run: dict[str, Any]) -> dict[str, Any]:
    """Every number of the report: the run, its layers in detail, and the model."""
    return {
        "schema": SCHEMA,
        "run": run,
        "layers": [
            layer_report(layer, {}, by_step=place < DETAILED_LAYERS) for place, layer in enumerate(profile.layers)
        ],
        "model_profile": model_report(profile),
    }


def run_facts(trace: Trace, recording: Recording | None = None) -> dict[str, Any]:
    """The model and the run. recording: of this process; None for a trace that was read from a file."""
    meta = trace.meta
    facts: dict[str, Any] = {
        "model": meta.model,
        "architecture": meta.architecture,
        "n_layers": meta.n_layers,
        "n_experts": meta.n_experts,
        "n_experts_used": meta.n_expert_used,
        "gamma": meta.gamma,
        "draft": meta.draft,
    }
    if recording is not None:
        facts |= {
            "acceptance_rate": rounded(recording.acceptance_rate),
            "answers": recording.answers,
            "skipped": recording.skipped,
        }
    return facts | meta.parameters


def rounded(value: Any) -> Any:
    """The value with all its floats rounded and the keys of its dictionaries as strings."""
    if isinstance(value, float):
        return round(value, _DIGITS)
    if isinstance(value, dict):
        return {str(key): rounded(entry) for key, entry in value.items()}
    return [rounded(entry) for entry in value] if isinstance(value, Sequence) and not isinstance(value, str) else value
