"""`moeedge replay`: what every policy would have had in its slots, on a recorded trace and without a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import typer

from moeedge.cli import replay_options
from moeedge.cli.common import Output, cli_errors
from moeedge.cli.trace import NExperts, TraceFile
from moeedge.errors import InputError

if TYPE_CHECKING:
    from moeedge.sim.noisy_predictor import PredictorAccuracy
    from moeedge.sim.replay import ReplayConfig, ReplayRow
    from moeedge.trace.format import Trace
    from moeedge.trace.schedule import Schedule
    from moeedge.trace.steps import RejectedTokenModel


_PROFILE_TEXTS_AT_MOST = 30  # of a tenth


def replay(
    trace: TraceFile,
    cache_ratio: replay_options.CacheRatio = "0.17",
    policy: replay_options.Policy = "all",
    max_uploads: replay_options.MaxUploads = None,
    predictor_accuracy: replay_options.PredictorAccuracy = None,
    hint_accuracy: replay_options.HintAccuracy = None,
    profile_texts: replay_options.ProfileTexts = None,
    gamma: replay_options.Gamma = None,
    acceptance: replay_options.Acceptance = None,
    rejected_token_model: replay_options.RejectedTokenModel = None,
    tail: replay_options.Tail = None,
    limit: replay_options.Limit = 0,
    n_experts: NExperts = None,
    expert_bytes: replay_options.ExpertBytes = None,
    seed: replay_options.Seed = 0,
    output: replay_options.OutputFormat = Output.TABLE,
) -> None:
    """Replay a routing trace under many policies: what they would have had in their slots, and what they moved for it.

    A trace with verification steps is replayed as it was recorded, unless --gamma, --acceptance or
    --rejected-token-model asks for windows over its text. Transfers take no time here; moeedge simulate has a clock.
    The same seed gives the same output, byte for byte.
    """
    with cli_errors():
        from moeedge.bench.config import parse_ratios
        from moeedge.trace.importers import read_trace
        from moeedge.trace.schedule import schedules

        policies, ratios = _policies(policy), parse_ratios(cache_ratio)
        if seed < 0 or limit < 0:
            raise ValueError(f"{'--seed' if seed < 0 else '--limit'} must be >= 0")
        whole = read_trace(trace, n_experts)
        profiled, replayed = _split(whole, limit, profile_texts)
        chosen = rejected_token_model or tail
        models: tuple[RejectedTokenModel, ...] | None = None
        if chosen is not None:
            both = chosen is replay_options.RejectedTokenModelChoice.BOTH
            models = ("optimistic", "pessimistic") if both else (cast("RejectedTokenModel", chosen.value),)
        config = _config(
            whole, profiled, policies, ratios, seed, max_uploads, expert_bytes, predictor_accuracy or hint_accuracy
        )
        plan = schedules(replayed, gamma=gamma, acceptance=acceptance, rejected_token_models=models, seed=seed)
        _print(_run(plan, config), as_json=output is Output.JSON)


def _policies(text: str) -> tuple[str, ...]:
    """The names of the list, each once and in its order, the bounds left out. Raises InputError."""
    from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED, expand_names

    known = [name for name in POLICIES | SIMULATED if name not in BOUNDS]
    names = list(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if "all" in names:
        return tuple(expand_names(names))
    unknown = [name for name in names if name not in known and name not in BOUNDS]
    if unknown or not names:
        wrong = f'There is no policy "{unknown[0]}".' if unknown else "--policy names no policy."
        raise InputError(wrong, f"Choose from {', '.join(known)}, separated by commas, or all.")
    return tuple(name for name in names if name not in BOUNDS)


def _split(whole: Trace, limit: int, profile_texts: int | None) -> tuple[Trace | None, Trace]:
    """The texts that make the profile, None for none, and those that are replayed."""
    import numpy as np

    from moeedge.trace.schedule import texts_of

    n_texts = int(np.unique(whole.sequence).size)
    n_texts = min(limit, n_texts) if limit else n_texts
    n_profile = min(n_texts // 10, _PROFILE_TEXTS_AT_MOST) if profile_texts is None else profile_texts
    if not 0 <= n_profile < n_texts:
        raise InputError(
            f"--profile-texts {n_profile} leaves nothing to replay.", f"The trace has {n_texts} texts to choose from."
        )
    replayed = texts_of(whole, n_profile, n_texts)
    return (texts_of(whole, 0, n_profile) if n_profile else None), replayed


def _config(
    whole: Trace,
    profiled: Trace | None,
    policies: tuple[str, ...],
    ratios: tuple[float, ...],
    seed: int,
    max_uploads: float | None,
    expert_bytes: int | None,
    predictor_accuracy: str | None,
) -> ReplayConfig:
    import numpy as np

    from moeedge.sim.replay import ReplayConfig, profile_of
    from moeedge.trace.schedule import cut_schedule

    if expert_bytes is not None and not 0 < expert_bytes < 1 << 48:
        raise ValueError(f"--expert-bytes must be > 0, not {expert_bytes}")
    sizes = whole.expert_bytes() if expert_bytes is None else np.full(whole.meta.n_layers, expert_bytes, dtype=np.int64)
    profile = None
    if profiled is not None and profiled.text_rows().size:
        profile = profile_of(cut_schedule(profiled, gamma=0))
    return ReplayConfig(
        policies=policies,
        ratios=ratios,
        seed=seed,
        max_uploads=max_uploads,
        expert_bytes=sizes,
        profile=profile,
        accuracy=_accuracy(predictor_accuracy),
    )


def _accuracy(text: str | None) -> PredictorAccuracy:
    """The accuracies in NAME=SHARE,... or the default ones. Raises InputError."""
    from moeedge.sim.noisy_predictor import PredictorAccuracy

    if text is not None and text.strip() == "default":
        return PredictorAccuracy()
    accuracies: dict[str, float | None] = {"draft-router": None, "next-gate": None}
    for part in (text or "").split(","):
        name, _, value = part.strip().partition("=")
        if not name:
            continue
        try:
            accuracy = float(value)
        except ValueError:
            accuracy = -1.0
        if name not in accuracies or not 0 <= accuracy <= 1:
            raise InputError(
                f"--predictor-accuracy cannot use '{part.strip()}'.",
                f"Give NAME=SHARE, separated by commas; the names are {', '.join(accuracies)}.",
            )
        accuracies[name] = accuracy
    return PredictorAccuracy(draft_router=accuracies["draft-router"], next_gate=accuracies["next-gate"])


def _run(plan: list[Schedule], config: ReplayConfig) -> list[ReplayRow]:
    from moeedge.sim.replay import replay as replay_schedule
    from moeedge.ui.console import stderr_console
    from moeedge.ui.progress import count_bar

    rows = []
    n_steps = sum(schedule.prefill.size for schedule in plan)
    with count_bar(stderr_console(), "replaying", "steps", n_steps) as bar:
        for schedule in plan:
            rows += replay_schedule(schedule, config, on_batches=bar.part())
    return rows


def _print(rows: list[ReplayRow], *, as_json: bool) -> None:
    from moeedge.ui.console import say, stderr_console, stdout_console
    from moeedge.ui.sim_views import print_replay, replay_json, shortcomings

    if as_json:
        typer.echo(replay_json(rows), nl=False)
        for line in shortcomings(rows):  # the tables say it themselves
            say(stderr_console(), line)
    else:
        print_replay(rows, stdout_console())
