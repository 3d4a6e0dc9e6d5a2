"""What `moeedge lab replay` does: the hit rates and uploads of every policy on a recorded trace, without a model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import typer

from moeedge.cli.common import names, numbers
from moeedge.cli.declare import Output
from moeedge.errors import InputError
from moeedge.lab.cli import trace_options
from moeedge.lab.cli.trace_budgets import TraceBudgets
from moeedge.lab.sim.curves import LIMITS, PAIR_BOUNDS, CurveConfig, CurveInput, trace_curves
from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
from moeedge.lab.sim.replay import ReplayConfig, ReplayRow, profile_of
from moeedge.lab.sim.replay import replay as replay_schedule
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import Schedule, cut_schedule, schedules, texts_of
from moeedge.lab.views.sim_views import draw_curves, print_curves, print_replay, replay_json, shortcomings
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED, expand_names
from moeedge.trace.format import Trace
from moeedge.ui.console import check_picture, say, stderr_console, stdout_console
from moeedge.ui.progress import count_bar

_MAX_PROFILE_TEXTS = 30  # of a tenth


def run(
    traces: Sequence[Path],
    given: trace_options.ReplayOptions,
    expert_budgets: TraceBudgets,
    *,
    curve: bool,
    plot: Path | None,
    threads: int,
    output: Output,
) -> None:
    """Replays the traces and shows the result. Raises InputError."""
    policies, ratios = _policies(given.policy), tuple(numbers(given.cache_ratio, "--cache-ratio"))
    if given.seed < 0 or given.limit < 0:
        raise ValueError(f"{'--seed' if given.seed < 0 else '--limit'} must be 0 or more")
    if plot is not None:
        if not curve:
            raise InputError("--plot draws the curves of --curve.", "Add --curve.")
        check_picture(plot)
    limits = None if given.max_uploads is None else numbers(given.max_uploads, "--max-uploads")
    if limits is not None and len(limits) > 1 and not curve:
        raise InputError("Several values of --max-uploads are for --curve.", "Add --curve, or give one value.")
    if curve and expert_budgets.expert_budget is not None:
        raise InputError("--curve has no expert budgets.", "Leave out one of them.")
    ranges = _ranges(given.texts, len(traces))
    jobs = []
    for path, chosen in zip(traces, ranges, strict=True):
        recorded = read_trace(path, given.n_experts)
        expert_bytes = recorded.expert_bytes()
        if given.expert_bytes is not None:
            trace_options.check_expert_bytes(given.expert_bytes)
            expert_bytes = np.full(recorded.meta.n_layers, given.expert_bytes, dtype=np.int64)
        profiled, replayed, about = _split(recorded, chosen, given.limit, given.profile_texts)
        profile = None
        if profiled is not None and profiled.text_rows().size:
            profile = profile_of(cut_schedule(profiled, gamma=0))
        for schedule in schedules(
            replayed,
            gamma=given.draft_max,
            acceptance_chance=given.acceptance_chance,
            rejected_token_models=None if given.rejected_token_model is None else given.rejected_token_model.models,
            seed=given.seed,
        ):
            budgets = expert_budgets.budgets(profile)
            jobs.append(_Job(path.name, about, schedule, profile, expert_bytes, budgets))
    accuracy = _accuracy(given.predictor_accuracy)
    if curve:
        config = CurveConfig(
            policies=policies,
            limits=LIMITS if limits is None else tuple(limits),
            accuracy=accuracy,
            fresh_memory=given.fresh_memory,
            seed=given.seed,
        )
        inputs = [
            CurveInput(job.trace, job.schedule, ratio, job.texts, job.profile) for job in jobs for ratio in ratios
        ]
        _show_curves(inputs, config, threads, output, plot)
        return
    rows = _run(
        jobs,
        ReplayConfig(
            policies=policies,
            ratios=ratios,
            seed=given.seed,
            max_uploads=limits[0] if limits else None,
            fresh_memory=given.fresh_memory,
            accuracy=accuracy,
        ),
    )
    if output is Output.TEXT:
        print_replay(rows, stdout_console())
        return
    typer.echo(replay_json(rows), nl=False)
    for line in shortcomings(rows):  # the tables include them
        say(stderr_console(), line)


@dataclass(frozen=True, eq=False)
class _Job:
    """One schedule of one trace."""

    trace: str
    texts: str
    schedule: Schedule
    profile: np.ndarray | None
    expert_bytes: np.ndarray | None
    budgets: tuple[ExpertBudget | None, ...] | None


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


def _ranges(text: str | None, n_traces: int) -> list[slice]:
    """The texts to replay of each trace. Raises InputError."""
    if text is None:
        return [slice(0, None)] * n_traces
    found = []
    for part in text.split(","):
        first, colon, last = part.strip().partition(":")
        if not colon or not (first.isdigit() or not first) or not (last.isdigit() or not last):
            raise InputError(
                f"--texts cannot use '{part.strip()}'.", "Give A:B, from text A up to B, for instance 153:."
            )
        found.append(slice(int(first or 0), int(last) if last else None))
    if len(found) == 1:
        return found * n_traces
    if len(found) != n_traces:
        raise InputError(f"--texts names {len(found)} ranges for {n_traces} traces.", "Give one, or one for each.")
    return found


def _split(trace: Trace, chosen: slice, limit: int, profile_texts: int | None) -> tuple[Trace | None, Trace, str]:
    """The texts that make the profile (None: no profile), those that are replayed, and which these are."""
    n_texts = int(np.unique(trace.sequence).size)
    first, last = chosen.start, n_texts if chosen.stop is None else min(chosen.stop, n_texts)
    last = min(first + limit, last) if limit else last
    if first >= last:
        raise InputError(f"--texts chooses none of the {n_texts} texts.", f"They are numbered from 0 to {n_texts - 1}.")
    n_profile = min((last - first) // 10, _MAX_PROFILE_TEXTS) if profile_texts is None else profile_texts
    if first:  # earlier texts are there for the profile
        n_profile = min(_MAX_PROFILE_TEXTS if profile_texts is None else profile_texts, first)
        profiled = texts_of(trace, 0, n_profile)
    else:
        if not 0 <= n_profile < last:
            raise InputError(
                f"--profile-texts {n_profile} leaves no text to replay.",
                f"The trace has {last} texts to choose from.",
            )
        profiled, first = texts_of(trace, 0, n_profile), n_profile
    return (profiled if n_profile else None), texts_of(trace, first, last), f"{first}:{last} of {n_texts}"


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


def _run(jobs: list[_Job], config: ReplayConfig) -> list[ReplayRow]:
    rows = []
    n_steps = sum(job.schedule.prefill.size for job in jobs)
    with count_bar(stderr_console(), "replaying", "steps", n_steps) as bar:
        for job in jobs:
            own = replace(config, profile=job.profile, expert_bytes=job.expert_bytes, budgets=job.budgets)
            rows += replay_schedule(job.schedule, own, on_batches=bar.part(), on_phase=bar.phase)
    return rows


def _show_curves(
    inputs: list[CurveInput], config: CurveConfig, n_processes: int, output: Output, plot: Path | None
) -> None:
    if n_processes < 0:
        raise ValueError(f"-t must be 0 (one per core) or more, not {n_processes}")
    n_tasks = len(inputs) * (len(config.policies) + len(PAIR_BOUNDS))
    n_processes = n_processes or len(os.sched_getaffinity(0))
    with count_bar(stderr_console(), "replaying", "curves", n_tasks) as bar:
        panels = trace_curves(inputs, config, n_processes=n_processes, on_done=bar.part())
    if output is Output.TEXT:
        print_curves(panels, stdout_console())
    else:
        typer.echo(replay_json(panels), nl=False)
    if plot is not None:
        draw_curves(panels, plot)
