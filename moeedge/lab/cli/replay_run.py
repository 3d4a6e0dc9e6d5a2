"""`moeedge lab replay` once its options are read."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from moeedge.cli.common import emit
from moeedge.cli.options import Output
from moeedge.errors import InputError
from moeedge.hardware.provenance import Provenance, read_provenance
from moeedge.lab.cli.trace_options import ReplayOptions, TraceBudgetOptions
from moeedge.lab.sim import curves, replay
from moeedge.lab.sim.model_shape import find_model
from moeedge.lab.sim.noisy_predictor import NO_PREDICTOR, PredictorAccuracy
from moeedge.lab.sim.step_costs import find_hardware, program_of, roofline_costs
from moeedge.lab.traces.importers import read_trace
from moeedge.lab.traces.schedule import Schedule, cut_schedule, schedules, texts_of
from moeedge.lab.views.sim_views import draw_curves, print_curves, print_replay, replay_json, shortcomings
from moeedge.policies.base import PolicyConfig
from moeedge.policies.expert_budget import ExpertBudget
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED, expand_names
from moeedge.trace.format import Trace
from moeedge.ui.console import check_picture, say, stderr_console
from moeedge.ui.progress import count_bar

_MAX_PROFILE_TEXTS = 30  # of a tenth


@dataclass(frozen=True, eq=False)
class _Job:
    """One schedule of one trace."""

    trace: str  # name
    source: Provenance  # without a time: the same trace gives the same bytes
    texts: str  # which of the trace
    schedule: Schedule
    profile: np.ndarray | None
    expert_bytes: np.ndarray | None
    budgets: tuple[ExpertBudget | None, ...] | None


def run_replay(
    traces: Sequence[Path],
    options: ReplayOptions,
    expert_budgets: TraceBudgetOptions,
    *,
    curve: bool,
    plot: Path | None,
    threads: int,
    output: Output,
) -> None:
    """Replays the traces, and prints or draws the rows. Raises InputError."""
    policies, ratios, limits = _policies(options.policy), tuple(options.cache_ratio), options.max_uploads
    if plot is not None:
        if not curve:
            raise InputError("--plot draws the curves of --curve.", "Add --curve.")
        check_picture(plot)
    if limits is not None and len(limits) > 1 and not curve:
        raise InputError("Several values of --max-uploads are for --curve.", "Add --curve, or give one value.")
    if curve and expert_budgets.expert_budget is not None:
        raise InputError("--curve has no expert budgets.", "Leave out one of them.")
    chosen = zip(traces, _ranges(options.texts, len(traces)), strict=True)
    jobs = [job for path, texts in chosen for job in _jobs(path, texts, options, expert_budgets)]
    shared: dict[str, Any] = {"policies": policies, "accuracy": _accuracy(options.predictor_accuracy)}
    shared |= {"fresh_memory": options.fresh_memory, "seed": options.seed}
    if options.hardware is not None:
        machine, shape = find_hardware(options.hardware), find_model(options.model)
        metas = [job.schedule.trace.meta for job in jobs]
        if {(each.n_layers, each.n_experts, each.n_expert_used) for each in metas} != {
            (shape.n_layers, shape.n_experts, shape.k)
        }:
            what = "layers, experts or experts per token"
            say(stderr_console(), f"The times are those of {shape.name} (--model), whose {what} are not the trace's.")
        shared["cost_model"] = roofline_costs(machine, shape, program_of("spac-paper")).cost_model(PolicyConfig.cap)
    if curve:
        config = curves.CurveConfig(limits=curves.LIMITS if limits is None else tuple(limits), **shared)
        inputs = [
            curves.CurveInput(job.trace, job.schedule, each, job.texts, job.profile, job.source)
            for job in jobs
            for each in ratios
        ]
        _show_curves(inputs, config, threads, output, plot)
        return
    hardware = None if options.hardware is None else f"{options.hardware}, {options.model}"
    limit = limits[0] if limits else None
    settings = replay.ReplayConfig(ratios=ratios, max_uploads=limit, hardware=hardware, **shared)
    rows: list[replay.ReplayRow] = []
    with count_bar(stderr_console(), "replaying", "steps", sum(job.schedule.prefill.size for job in jobs)) as bar:
        for job in jobs:
            own = replace(settings, profile=job.profile, expert_bytes=job.expert_bytes, budgets=job.budgets)
            rows += [replace(row, provenance=job.source) for row in replay.replay(job.schedule, own, bar)]
    emit(output, replay_json, print_replay, rows)
    for line in shortcomings(rows) if output is not Output.TEXT else ():  # the tables include them
        say(stderr_console(), line)


def _jobs(path: Path, chosen: slice, options: ReplayOptions, expert_budgets: TraceBudgetOptions) -> Iterator[_Job]:
    """What is replayed of a trace. Raises InputError."""
    recorded = read_trace(path, options.n_experts)
    source = read_provenance(trace=path, timed=False)
    expert_bytes = recorded.expert_bytes()
    if options.expert_bytes is not None:
        expert_bytes = np.full(recorded.meta.n_layers, options.expert_bytes, dtype=np.int64)
    profiled, replayed, about = _split(recorded, chosen, options.limit, options.profile_texts)
    profile = None
    if profiled is not None and profiled.text_rows().size:
        profile = replay.profile_of(cut_schedule(profiled, gamma=0))
    for schedule in schedules(
        replayed,
        gamma=options.draft_max,
        acceptance_chance=options.acceptance_chance,
        rejected_token_models=None if options.rejected_token_model is None else options.rejected_token_model.models,
        seed=options.seed,
    ):
        yield _Job(path.name, source, about, schedule, profile, expert_bytes, expert_budgets.budgets(profile))


def _policies(asked: Sequence[str]) -> tuple[str, ...]:
    """The names, without the bounds. Raises InputError."""
    if "all" in asked:
        return tuple(expand_names(asked))
    usable = [name for name in POLICIES | SIMULATED if name not in BOUNDS]
    unknown = [name for name in asked if name not in usable and name not in BOUNDS]
    if unknown:
        raise InputError(f"Unknown policy {unknown[0]!r}.", f"Choose from: {', '.join(usable)}, or all.")
    return tuple(name for name in asked if name not in BOUNDS)


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
    elif not 0 <= n_profile < last:
        raise InputError(
            f"--profile-texts {n_profile} leaves no text to replay.", f"The trace has {last} texts to choose from."
        )
    profiled = texts_of(trace, 0, n_profile) if n_profile else None
    first = first or n_profile
    return profiled, texts_of(trace, first, last), f"{first}:{last} of {n_texts}"


def _accuracy(text: str | None) -> PredictorAccuracy:
    """The accuracies in NAME=SHARE,... or the default ones. Raises InputError."""
    if text is None:
        return NO_PREDICTOR
    if text.strip() == "default":
        return PredictorAccuracy()
    accuracies: dict[str, float | None] = {"draft-router": None, "next-gate": None}
    for part in text.split(","):
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
    return PredictorAccuracy(**{name.replace("-", "_"): accuracy for name, accuracy in accuracies.items()})  # type: ignore[arg-type]


def _show_curves(
    inputs: list[curves.CurveInput], config: curves.CurveConfig, n_processes: int, output: Output, plot: Path | None
) -> None:
    n_tasks = len(inputs) * (len(config.policies) + len(curves.PAIR_BOUNDS))
    n_processes = n_processes or len(os.sched_getaffinity(0))
    with count_bar(stderr_console(), "replaying", "curves", n_tasks) as bar:
        panels = curves.trace_curves(inputs, config, n_processes=n_processes, progress=bar)
    emit(output, replay_json, print_curves, panels)
    if plot is not None:
        draw_curves(panels, plot)
