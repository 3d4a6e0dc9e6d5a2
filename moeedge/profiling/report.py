"""A layer's profile as a JSON object: `moeedge profile -o json` (docs/traces.md lists the keys)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from moeedge.profiling.analysis import LayerProfile

if TYPE_CHECKING:
    from moeedge.profiling.run import Recording

_DIGITS = 6


def layer_report(profile: LayerProfile, recording: Recording) -> dict[str, Any]:
    """One flat object per layer: what was measured first, then the model and the run."""
    meta = recording.trace.meta
    return {
        "layer": profile.layer,
        "steps": profile.steps,
        "tokens": profile.tokens,
        "hot_cold_accuracy": _accuracy(profile),
        "overlap": _round(profile.overlap),
        "overlap_uniform": _round(profile.overlap_uniform),
        "overlap_independence": _round(profile.overlap_independence),
        "unique_experts": {
            "empirical": _by_batch(profile.unique_empirical),
            "uniform": _by_batch(profile.unique_uniform),
            "independence": _by_batch(profile.unique_independence),
        },
        "unique_experts_per_step": _round(profile.unique_per_step),
        "hottest": [
            {
                "expert": hot.expert,
                "activations": hot.activations,
                "share": _round(hot.share),
                "mean_weight": _round(hot.mean_weight),
            }
            for hot in profile.hottest
        ],
        "activation_counts": {
            "step_tokens": profile.step_tokens.tolist(),
            "total": profile.counts.sum(axis=0, dtype=int).tolist(),
            "per_step": profile.counts.tolist(),
        },
        "model": meta.model,
        "architecture": meta.architecture,
        "n_layers": meta.n_layers,
        "n_experts": meta.n_experts,
        "n_experts_used": meta.n_experts_used,
        "gamma": meta.gamma,
        "draft": meta.draft,
        "acceptance_rate": _round(recording.acceptance_rate),
        "answers": recording.answers,
        "skipped": recording.skipped,
        **meta.parameters,
    }


def _accuracy(profile: LayerProfile) -> dict[str, Any]:
    own = profile.score("alg1-printed", "ar", "token")
    return {
        "sd": _round(profile.sd_accuracy),
        "ar": _round(profile.ar_accuracy),
        "always_cold": _round(profile.step_cold_share),
        "ar_next_token": _round(own.accuracy if own else None),
        "always_cold_next_token": _round(profile.token_cold_share),
        "predictors": [
            {
                "predictor": score.predictor,
                "sensor": score.sensor,
                "predicts": score.predicts,
                "accuracy": _round(score.accuracy),
                "balanced_accuracy": _round(score.balanced_accuracy),
                "accuracy_carried": _round(score.accuracy_carried),
            }
            for score in profile.scores
        ],
    }


def _by_batch(values: dict[int, float] | dict[int, float | None]) -> dict[str, float | None]:
    return {str(batch): _round(value) for batch, value in values.items()}


def _round(value: float | None) -> float | None:
    return None if value is None else round(value, _DIGITS)
