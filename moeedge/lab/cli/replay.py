"""`moeedge lab replay`: the hit rates and uploads of every policy on a recorded trace, without a model."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moeedge.cli.common import emit, numbers
from moeedge.cli.options import Output, declare, flatten
from moeedge.errors import InputError
from moeedge.lab.cli.simulate import hardware, simulated_models
from moeedge.lab.cli.trace_options import ReplayOptions, TraceBudgetOptions
from moeedge.policies.registry import BOUNDS, POLICIES, SIMULATED, expand_names

if TYPE_CHECKING:
    from moeedge.lab.sim.noisy_predictor import PredictorAccuracy
    from moeedge.lab.sim.replay import ReplayInput
    from moeedge.trace.format import Trace

_MAX_PROFILE_TEXTS = 30  # of a tenth

Traces = Annotated[
    list[Path],
    typer.Argument(
        metavar="TRACE...",
        help="Traces of moeedge (.npz), csv files with pos,layer,id0,... or route_trace v1, or arrays of ids by token, "
        "layer and slot (.npz or .npy).",
        show_default=False,
    ),
]
declare(
    """
    --seed N  ...
    --draft-max N  Tokens per draft (gamma); 0: no speculation. Default: the trace's own, or 8.
    --limit N  Replay the first N texts; 0: all.
    --plot FILE  Draw the curves (.png, .svg or .pdf); with --curve.
    --threads N  Processes for --curve; 0: one per core.
    [Expert placement]
    --max-uploads LIST  Limit uploads: at most X experts per layer and step, which policies know. Loads of experts that
        are missing right now are counted, but not limited. Several, separated by commas, are the points of --curve.
    --fresh-memory  Policies forget each text before the next; the experts on the device stay there.
    --predictor-accuracy LIST  Some systems predict experts from hidden states, which a trace lacks. Give them
        predictions that are right with this chance: draft-router=0.88,next-gate=0.8, or default for these. Without it
        they use their caches alone, and are listed apart.
        also: --hint-accuracy
    --profile-texts N  Count the popularity of experts, which some policies start from, in N texts that are not
        replayed: the first ones, with --texts those before A. Default: a tenth, 30 at most.
    --hardware NAME|FILE  Policies know the times of experts on this machine, one of moeedge lab simulate, with the
        sizes of --model: they balance CPU and GPU by them (spac-paper: Eq. 9 and 10). Default: no times.
    --model NAME  Model whose sizes --hardware takes.
    [Trace]
    --texts A:B  Replay the texts from number A up to, but not including, B; several, separated by commas: one for each
        trace. Profiles are made from the first texts before A.
    [Output]
    --curve  Hits over uploads: every policy at several limits of uploads (--max-uploads; default:
        0.1,0.2,0.5,1,2,5,10) and without one, with 95 % intervals over the choice of texts.
    """,
    "replay",
    read={numbers: "max_uploads"},
    profile_texts={"min": 0},
    seed={"least": 0},
    hardware={"names": hardware},
    model={"names": simulated_models, "envvar": None},
    threads={"least": 0},
)


@flatten
def replay(
    traces: Traces,
    *,
    options: ReplayOptions,
    expert_budgets: TraceBudgetOptions,
    curve: bool = False,
    plot: Path | None = None,
    threads: int = 0,
    output: Output = Output.TEXT,
) -> None:
    """Replay routing traces: how many of a text's experts each policy would have had on the device.

    A trace (profile --trace-out) holds the experts that every token used; a policy decides which experts are on the
    device. pair hits: share of (token, expert) pairs whose expert was there; uploads: experts moved, per layer and
    step. No model runs and transfers take no time; moeedge lab simulate has a clock.

    Recorded drafts are replayed as they were, unless --draft-max, --acceptance-chance or --rejected-token-model cuts
    the text into windows. Two bounds that know the future come last: oracle and belady. The same seed gives the same
    output, byte for byte.
    """
    from moeedge.lab.sim import curves
    from moeedge.lab.sim import replay as replays
    from moeedge.lab.sim.model_shape import find_model
    from moeedge.lab.sim.step_costs import find_hardware, program_of, roofline_costs
    from moeedge.lab.views import draw_curves, print_curves, print_replay, replay_json, shortcomings
    from moeedge.policies.base import PolicyConfig
    from moeedge.ui.console import check_picture, count_bar, say, stderr_console

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
    inputs = [given for path, texts in chosen for given in _inputs(path, texts, options, expert_budgets)]
    config = replays.ReplayConfig(
        policies=policies,
        ratios=ratios,
        seed=options.seed,
        fresh_memory=options.fresh_memory,
        accuracy=_accuracy(options.predictor_accuracy),
        max_uploads=limits[0] if limits and not curve else None,
    )
    if options.hardware is not None:
        machine, shape = find_hardware(options.hardware), find_model(options.model)
        metas = [given.schedule.trace.meta for given in inputs]
        if {(each.n_layers, each.n_experts, each.n_expert_used) for each in metas} != {
            (shape.n_layers, shape.n_experts, shape.k)
        }:
            what = "layers, experts or experts per token"
            say(stderr_console(), f"The times are those of {shape.name} (--model), whose {what} are not the trace's.")
        cost_model = roofline_costs(machine, shape, program_of("spac-paper")).cost_model(PolicyConfig.cap)
        config = replace(config, cost_model=cost_model, hardware=f"{options.hardware}, {options.model}")
    if curve:
        n_tasks = len(inputs) * len(ratios) * (len(policies) + len(curves.PAIR_BOUNDS))
        n_processes = threads or len(os.sched_getaffinity(0))
        with count_bar(stderr_console(), "replaying", "curves", n_tasks) as bar:
            panels = curves.trace_curves(inputs, config, limits or curves.LIMITS, n_processes=n_processes, progress=bar)
        emit(output, replay_json, print_curves, panels)
        if plot is not None:
            draw_curves(panels, plot)
        return
    rows: list[replays.ReplayRow] = []
    n_batches = sum(given.schedule.prefill.size for given in inputs)
    with count_bar(stderr_console(), "replaying", "steps", n_batches) as bar:
        for given in inputs:
            rows += replays.replay(given, config, bar)
    emit(output, replay_json, print_replay, rows)
    for line in shortcomings(rows) if output is not Output.TEXT else ():  # the tables include them
        say(stderr_console(), line)


def _inputs(
    path: Path, chosen: slice, options: ReplayOptions, expert_budgets: TraceBudgetOptions
) -> Iterator[ReplayInput]:
    """What is replayed of a trace. Raises InputError."""
    import numpy as np

    from moeedge.hardware.provenance import read_provenance
    from moeedge.lab.sim.replay import ReplayInput, profile_of
    from moeedge.lab.traces.importers import read_trace
    from moeedge.lab.traces.schedule import cut_schedule, schedules

    recorded = read_trace(path, options.n_experts)
    source = read_provenance(trace=path, timed=False)  # the same trace gives the same bytes
    expert_bytes = recorded.expert_bytes()
    if options.expert_bytes is not None:
        expert_bytes = np.full(recorded.meta.n_layers, options.expert_bytes, dtype=np.int64)
    profiled, replayed, texts = _split(recorded, chosen, options.limit, options.profile_texts)
    profile = None
    if profiled is not None and profiled.text_rows().size:
        profile = profile_of(cut_schedule(profiled, gamma=0))
    for schedule in schedules(
        replayed,
        gamma=options.draft_max,
        acceptance_chance=options.acceptance_chance,
        rejected_token_models=None if options.rejected_token_model is None else options.rejected_token_model.models,
        seed=options.seed,
    ):
        budgets = expert_budgets.budgets(profile)
        yield ReplayInput(schedule, path.name, texts, profile, expert_bytes, source, budgets)


def _policies(asked: Sequence[str]) -> tuple[str, ...]:
    """The names, without the bounds. Raises InputError."""
    usable = [name for name in POLICIES | SIMULATED if name not in BOUNDS]
    wanted = [name for name in expand_names(asked) if name not in BOUNDS]
    if unknown := [name for name in wanted if name not in usable]:
        raise InputError(f"Unknown policy {unknown[0]!r}.", f"Choose from: {', '.join(usable)}, or all.")
    return tuple(wanted)


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
    import numpy as np

    from moeedge.lab.traces.schedule import texts_of

    n_texts = int(np.unique(trace.sequence).size)
    if n_texts == 0:
        raise InputError("The trace has no recorded experts.", "Name another trace.")
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
    from moeedge.lab.sim.noisy_predictor import NO_PREDICTOR, PredictorAccuracy

    if text is None:
        return NO_PREDICTOR
    if text.strip() == "default":
        return PredictorAccuracy()
    fields = {"draft-router": "draft_router", "next-gate": "next_gate"}
    try:
        pairs = [part.split("=") for part in text.split(",") if part.strip()]
        shares: dict[str, Any] = {fields[name.strip()]: float(share) for name, share in pairs}
        return replace(NO_PREDICTOR, **shares)
    except (KeyError, ValueError):
        raise InputError(
            f"--predictor-accuracy cannot use '{text}'.",
            f"Give NAME=SHARE, separated by commas; the names are {', '.join(fields)}.",
        ) from None
