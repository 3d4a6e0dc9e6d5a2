"""`moeedge replay`: the hit rates and uploads of every policy on a recorded trace, without a model."""

from __future__ import annotations

from typing import Annotated

import numpy as np
import typer

from moeedge.cli import options
from moeedge.cli.common import names, numbers
from moeedge.cli.declare import Output, derive, option
from moeedge.errors import InputError
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED, expand_names
from moeedge.sim.noisy_predictor import PredictorAccuracy
from moeedge.sim.replay import ReplayConfig, ReplayRow, profile_of
from moeedge.sim.replay import replay as replay_schedule
from moeedge.trace.format import Trace
from moeedge.trace.importers import read_trace
from moeedge.trace.schedule import Schedule, cut_schedule, schedules, texts_of
from moeedge.ui.console import say, stderr_console, stdout_console
from moeedge.ui.progress import count_bar
from moeedge.ui.sim_views import print_replay, replay_json, shortcomings

_MAX_PROFILE_TEXTS = 30  # of a tenth

DraftMax = Annotated[
    int | None,
    derive(options.DraftMax, help="Tokens per draft (gamma); 0: no speculation. Default: the trace's own, or 8."),
]
MaxUploads = Annotated[
    float | None,
    option(
        options.PLACEMENT,
        "--max-uploads X",
        "Experts that a plan may load per layer and step. Loads on demand are counted, but not limited.",
    ),
]
AccuracyList = Annotated[
    str | None,
    option(
        options.PLACEMENT,
        "--predictor-accuracy LIST",
        "Replace predictions from the hidden states of layers, which a trace lacks, by noisy ones of these "
        "accuracies: draft-router=0.88,next-gate=0.8, or default for these. Without it systems that need them use "
        "their caches alone.",
    ),
]
ProfileTexts = Annotated[
    int | None,
    option(
        options.PLACEMENT,
        "--profile-texts N",
        "Do not replay the first N texts: policies that need a profile get it from them. Default: a tenth, 30 at most.",
    ),
]


def replay(
    trace: options.TraceFile,
    cache_ratio: options.CacheRatioList = "0.17",
    policy: options.SystemList = "all",
    max_uploads: MaxUploads = None,
    predictor_accuracy: AccuracyList = None,
    profile_texts: ProfileTexts = None,
    draft_max: DraftMax = None,
    acceptance: options.Acceptance = None,
    rejected_token_model: options.RejectedTokens = None,
    limit: options.Limit = 0,
    n_experts: options.NExperts = None,
    expert_bytes: options.ExpertBytes = None,
    seed: options.Seed = 0,
    output: options.TextOrJson = Output.TEXT,
) -> None:
    """Replay a routing trace under many policies: hit rates, uploads and bounds.

    A trace with verification steps is replayed as it was recorded, unless --draft-max, --acceptance or
    --rejected-token-model asks for windows over its text. The one-step oracle and Belady's bound are always included.
    Transfers take no time here; moeedge simulate has a clock. The same seed gives the same output, byte for byte.
    """
    policies, ratios = _policies(policy), tuple(numbers(cache_ratio, "--cache-ratio"))
    if seed < 0 or limit < 0:
        raise ValueError(f"{'--seed' if seed < 0 else '--limit'} must be >= 0")
    recorded = read_trace(trace, n_experts)
    profiled, replayed = _split(recorded, limit, profile_texts)
    profile = None
    if profiled is not None and profiled.text_rows().size:
        profile = profile_of(cut_schedule(profiled, gamma=0))
    config = ReplayConfig(
        policies=policies,
        ratios=ratios,
        seed=seed,
        max_uploads=max_uploads,
        expert_bytes=_expert_bytes(recorded, expert_bytes),
        profile=profile,
        accuracy=_accuracy(predictor_accuracy),
    )
    plan = schedules(
        replayed,
        gamma=draft_max,
        acceptance=acceptance,
        rejected_token_models=None if rejected_token_model is None else rejected_token_model.models,
        seed=seed,
    )
    rows = _run(plan, config)
    if output is Output.TEXT:
        print_replay(rows, stdout_console())
        return
    typer.echo(replay_json(rows), nl=False)
    for line in shortcomings(rows):  # the tables include them
        say(stderr_console(), line)


def _policies(text: str) -> tuple[str, ...]:
    """The names of the list, each once and in its order, without the bounds. Raises InputError."""
    found = names(text, "--policy")
    if "all" in found:
        return tuple(expand_names(found))
    known = [name for name in POLICIES | SIMULATED if name not in BOUNDS]
    unknown = [name for name in found if name not in known and name not in BOUNDS]
    if unknown:
        raise InputError(f"Unknown policy {unknown[0]!r}.", f"Choose from: {', '.join(known)}, or all.")
    return tuple(name for name in found if name not in BOUNDS)


def _split(trace: Trace, limit: int, profile_texts: int | None) -> tuple[Trace | None, Trace]:
    """The texts that make the profile (None: no profile) and those that are replayed."""
    n_texts = int(np.unique(trace.sequence).size)
    n_texts = min(limit, n_texts) if limit else n_texts
    n_profile = min(n_texts // 10, _MAX_PROFILE_TEXTS) if profile_texts is None else profile_texts
    if not 0 <= n_profile < n_texts:
        raise InputError(
            f"--profile-texts {n_profile} leaves no text to replay.", f"The trace has {n_texts} texts to choose from."
        )
    replayed = texts_of(trace, n_profile, n_texts)
    return (texts_of(trace, 0, n_profile) if n_profile else None), replayed


def _expert_bytes(trace: Trace, given: int | None) -> np.ndarray | None:
    """Bytes of an expert by layer [n_layers]; None where neither the option nor the trace says."""
    if given is None:
        return trace.expert_bytes()
    options.check_expert_bytes(given)
    return np.full(trace.meta.n_layers, given, dtype=np.int64)


def _accuracy(text: str | None) -> PredictorAccuracy:
    """The accuracies in NAME=SHARE,... or the default ones. Raises InputError."""
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
    rows = []
    n_steps = sum(schedule.prefill.size for schedule in plan)
    with count_bar(stderr_console(), "replaying", "steps", n_steps) as bar:
        for schedule in plan:
            rows += replay_schedule(schedule, config, on_batches=bar.part())
    return rows
