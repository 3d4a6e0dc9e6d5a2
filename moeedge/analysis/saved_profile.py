"""Reads a profile that was saved as JSON: by `profile -o json` of one layer or of several, or by `--report`.

What the JSON keeps of every layer and of the model is read; single steps and tokens are not.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from moeedge.analysis.groups import GroupProfile
from moeedge.analysis.model_profile import ModelProfile, SpeculationGain
from moeedge.analysis.profile_json import LAYER_KEYS, SCHEMA, model_report
from moeedge.analysis.routing_curves import BATCHES, DISTANCES, Curve, RoutingCurves, Skew, mean_curves
from moeedge.engine.pair_similarity import PairSimilarity
from moeedge.errors import InputError
from moeedge.trace.format import TraceMeta
from moeedge.trace.steps import DraftStats

_META = ("model", "architecture", "n_layers", "n_experts", "n_experts_used", "gamma", "draft")


def read_profile(path: Path) -> tuple[ModelProfile, dict[str, Any]]:
    """The profile without its layers in detail, and its complete JSON (`complete_report`).

    An array of layers has the curves of these layers and their mean alone. Raises InputError for another file.
    """
    try:
        saved = json.loads(path.read_text(encoding="utf-8"), parse_constant=_no_number)
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.", "Check the path.") from None
    except (ValueError, RecursionError):
        raise _unusable(path) from None
    try:
        report = _complete(saved)
        profile = _profile(report)
        if report["model_profile"] is None:
            report["model_profile"] = model_report(profile)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise _unusable(path) from None
    return profile, report


def _unusable(path: Path) -> InputError:
    return InputError(
        f"{path} is not a saved profile.",
        "Write one by moeedge profile -o json or --report FILE.json, or name a trace.",
    )


def _no_number(text: str) -> NoReturn:
    raise ValueError(text)


def _complete(saved: Any) -> dict[str, Any]:
    """The complete JSON without what it was compared with; model_profile None: the file has layers alone."""
    if isinstance(saved, dict) and "layer" not in saved:
        if saved["schema"] != SCHEMA:
            raise ValueError(saved["schema"])
        return {key: saved[key] for key in ("schema", "run", "layers", "model_profile")}
    layers = [saved] if isinstance(saved, dict) else saved
    apart = {*LAYER_KEYS, "model_profile", "compared_with", "routing_agreement", "popularity_shared"}
    return {
        "schema": SCHEMA,
        "run": {key: value for key, value in layers[0].items() if key not in apart},
        "layers": [{key: value for key, value in layer.items() if key in LAYER_KEYS} for layer in layers],
        "model_profile": layers[0].get("model_profile"),
    }


def _profile(report: dict[str, Any]) -> ModelProfile:
    run, model = report["run"], report["model_profile"]
    values = {name: run[name] for name in _META}
    meta = TraceMeta(
        n_expert_used=values.pop("n_experts_used"),
        parameters={key: value for key, value in run.items() if key not in _META},
        **values,
    )
    if model is None:
        curves = [_curves(layer, meta.n_experts) for layer in report["layers"]]
        return ModelProfile(meta, [], curves, mean_curves(curves), None, [], None)
    gain, drafts, pair, mean = (model[key] for key in ("speculation", "drafts", "pair", "mean_of_layers"))
    return ModelProfile(
        meta=meta,
        layers=[],
        curves=[_curves(layer, meta.n_experts) for layer in model["by_layer"]],
        mean=None if mean is None else _curves(mean, meta.n_experts),
        gain=None if gain is None else SpeculationGain(**{key: gain[key] for key in gain if key != "gamma"}),
        groups=[GroupProfile(**group) for group in model["groups"]],
        drafts=None if drafts is None else DraftStats(**drafts),
        pair=None if pair is None else PairSimilarity(**pair),
    )


def _curves(layer: dict[str, Any], n_experts: int) -> RoutingCurves:
    unique = layer["unique_experts"]
    popularity = np.array(layer["popularity"], dtype=np.float64)
    if popularity.shape != (n_experts,):
        raise ValueError(f"popularity of {popularity.size} experts, not {n_experts}")
    return RoutingCurves(
        layer=layer["layer"],
        tokens=int(layer["tokens"]),
        popularity=popularity,
        skew=Skew(**layer["skew"]),
        overlap=_curve(layer["overlap_by_distance"], DISTANCES),
        overlap_independence=float(layer["overlap_independence"]),
        overlap_uniform=float(layer["overlap_uniform"]),
        unique=_curve(unique["empirical"], BATCHES),
        unique_independence={b: float(unique["independence"][str(b)]) for b in BATCHES},
        unique_uniform={b: float(unique["uniform"][str(b)]) for b in BATCHES},
    )


def _curve(values: dict[str, float | None], points: tuple[int, ...]) -> Curve:
    known = {point: values[str(point)] for point in points}
    return {point: None if value is None else float(value) for point, value in known.items()}
