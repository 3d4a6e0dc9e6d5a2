"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

import secrets
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import show_log, valid_text
from moeedge.cli.declare import Output, flatten, list_of, option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, layer_notes
from moeedge.cli.profile_output import Profiled, ProfileOutput, profile_trace
from moeedge.data import load_dataset
from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EmptyPromptError, EngineError, InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from moeedge.engine.pair_similarity import PairSimilarity
    from moeedge.engine.recording import Recording
    from moeedge.engine.session import Session
    from moeedge.ui.chat.interrupt import Interrupt

Layer = Annotated[str | None, option(options.WORK, "--layer N", "Layer to profile, from 0. Default: the last.")]
Layers = Annotated[
    str | None, option(options.WORK, "--layers LIST|all", "Layers to profile, such as 0,5,40-47, or all.")
]
Datasets = Annotated[str | None, list_of(options.Dataset)]
ProfiledTrace = Annotated[
    Path | None,
    option(options.WORK, "--trace FILE", "Profile this routing trace (docs/traces.md) without running a model."),
]
AcceptanceChance = Annotated[
    float | None,
    option(
        options.WORK,
        "--acceptance-chance X",
        "With --trace: cut the text into verifications of --draft-max drafts, each accepted with this chance.",
    ),
]
Report = Annotated[
    Path | None,
    option(options.OUTPUT, "--report FILE.html|FILE.json", "Write all pictures and numbers as one page, or as JSON."),
]
Pictures = Annotated[
    Path | None, option(options.OUTPUT, "--pictures FOLDER", "Write every picture of the report as a PNG.")
]
Compare = Annotated[
    Path | None,
    option(options.OUTPUT, "--compare FILE", "Compare with this trace in the report: another model, file or data set."),
]

BudgetAnalysis = Annotated[
    str | None,
    option(
        options.WORK,
        "--budget-analysis LIST|auto",
        "Instead of the profile: what expert budgets such as 8,16,32 would cost. Routing probability on the best "
        "experts, pairs of experts, and the error of each layer's output, by ranking and coverage. On the CPU.",
        show_default=False,
    ),
]


@flatten
def profile(
    layer: Layer = None,
    layers: Layers = None,
    prompt: options.Prompt = None,
    dataset: Datasets = None,
    limit: options.Limit = 8,
    offline_sample: options.OfflineSample = False,
    n_predict: options.NPredict = 128,
    raw: options.Raw = False,
    trace: ProfiledTrace = None,
    acceptance_chance: AcceptanceChance = None,
    *,
    engine: EngineOptions,
    placement: PlacementOptions,
    temp: options.Temp = 0.0,
    seed: options.Seed = -1,
    report: Report = None,
    pictures: Pictures = None,
    compare: Compare = None,
    plot: options.Plot = None,
    trace_out: options.TraceOut = None,
    save_ranking: options.SaveRanking = None,
    budget_analysis: BudgetAnalysis = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next step's can be predicted.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin()
    from moeedge.ui.chat.settings import seed_or_random
    from moeedge.ui.console import check_output

    if layer is not None and layers is not None:
        raise InputError("--layer and --layers exclude each other.", "Give one of them.")
    if n_predict == 0 or n_predict < -1:
        raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {n_predict}")
    for path in (trace_out, save_ranking):
        if path is not None:
            check_output(path)
    results = ProfileOutput(
        as_json=output is Output.JSON,
        single=layers is None,
        plot=plot,
        report=report,
        pictures=pictures,
        compare=compare,
        save_ranking=save_ranking,
    )
    others = (trace_out, save_ranking, report, pictures, compare)
    if budget_analysis is not None and any(path is not None for path in others):
        raise InputError(
            "--budget-analysis has a report of its own.",
            "Leave out --trace-out, --save-ranking, --report, --pictures and --compare.",
        )
    if trace is not None:
        if prompt is not None or dataset is not None or engine.model is not None or trace_out is not None:
            raise InputError("--trace takes no model, prompt or data set, and no --trace-out.", "Leave them out.")
        gamma = engine.draft_max
        if budget_analysis is not None:
            from moeedge.cli.budget_analysis import run_trace_analysis

            all_layers = layers if layers or layer else "all"
            profiled = profile_trace(trace, layer, all_layers, gamma=None, acceptance_chance=None, seed=seed)
            run_trace_analysis(budget_analysis, profiled.trace, profiled.layers, gamma=gamma, output=output, plot=plot)
            return
        code = results.write(
            profile_trace(trace, layer, layers, gamma=gamma, acceptance_chance=acceptance_chance, seed=seed)
        )
        if code:
            raise typer.Exit(code)
        return
    if acceptance_chance is not None:
        raise InputError("--acceptance-chance needs --trace.", "A model's own drafts are accepted or not.")
    prompts, source = _prompts(prompt, dataset, limit, offline_sample)
    config = engine.config(placement.config())
    seed_used = seed_or_random(seed)
    if seed_used is None and temp > 0:
        seed_used = secrets.randbits(32)  # one for all answers, so that the report and the trace can name it
    sampling = SamplingConfig(temperature=temp, seed=seed_used)
    if verbose:
        show_log()
    if budget_analysis is not None:
        from moeedge.cli.budget_analysis import run_budget_analysis

        run_budget_analysis(
            budget_analysis,
            config,
            prompts,
            source,
            sampling,
            n_predict=n_predict,
            raw=raw,
            layers=layers or layer or "all",
            output=output,
            plot=plot,
        )
        return
    profiled, code = _record(
        config,
        prompts,
        source,
        sampling,
        n_predict=n_predict,
        raw=raw,
        layer=layer,
        layers=layers,
        with_pair=results.wants_model,
        with_sensitivity=save_ranking is not None,
    )
    if trace_out is not None:
        profiled.trace.save(trace_out)
    code = results.write(profiled) or code
    if code:
        raise typer.Exit(code)


def _prompts(
    prompt: str | None, dataset: str | None, limit: int, offline_sample: bool
) -> tuple[list[Prompt], dict[str, object]]:
    """The prompts to answer, and the report's fields about their source."""
    if prompt is not None:
        if dataset is not None:
            raise InputError("-p and --dataset exclude each other.", "Give one of them.")
        if not prompt.strip():
            raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
        return [Prompt("prompt", "", user_turns(valid_text(prompt)))], {"dataset": "prompt", "prompts": 1}
    if limit < 0:
        raise ValueError(f"--limit must be >= 0, not {limit}")
    names = [name.strip() for name in (dataset or "sample").split(",") if name.strip()]
    sets = [load_dataset(name, offline_sample=offline_sample).limited(limit or None) for name in names]
    empty = next((found.name for found in sets if not found.prompts), None)
    if empty is not None or not sets:
        raise InputError(f'The prompt set "{empty or dataset}" is empty.')
    prompts = [replace(prompt, dataset=found.name) for found in sets for prompt in found.prompts]
    return prompts, {
        "dataset": ",".join(found.name for found in sets),
        "prompts": len(prompts),
        "dataset_sha256": ",".join(found.sha256 for found in sets),
    }


def _record(
    config: EngineConfig,
    prompts: list[Prompt],
    source: dict[str, object],
    sampling: SamplingConfig,
    *,
    n_predict: int,
    raw: bool,
    layer: str | None,
    layers: str | None,
    with_pair: bool,
    with_sensitivity: bool,
) -> tuple[Profiled, int]:
    """Answers the prompts: what is to be profiled, and the exit code (not 0 after an interruption).

    with_pair: the draft model is compared with the target, too. with_sensitivity: what a budget in each layer changes.
    """
    from moeedge.engine.recording import check_layers, parse_layers, record_routing, unseen_layers
    from moeedge.engine.session import Session
    from moeedge.ui.chat.greeting import print_header
    from moeedge.ui.chat.interrupt import Interrupt
    from moeedge.ui.console import notifier, say, stderr_console
    from moeedge.ui.progress import ProfileProgress

    err = stderr_console()
    with Session.open(config, notify=notifier(err)) as session:
        n_layers = session.model.info.n_layers
        if layers is None:
            asked = parse_layers(str(n_layers - 1) if layer is None else layer, n_layers, single=True)
        else:
            asked = parse_layers(layers, n_layers)
        chosen = check_layers(session, asked)
        print_header(err, session.info, toy=paths.is_bundled(config.model), warnings=layer_notes(config))
        if unseen := unseen_layers(session):
            say(err, unseen, style="yellow")
        with Interrupt() as interrupt, ProfileProgress(len(prompts), err) as progress:
            interrupt.arm()
            try:
                recording = record_routing(
                    session,
                    prompts,
                    n_predict=n_predict,
                    sampling=sampling,
                    raw=raw,
                    source=source,
                    cancel=interrupt,
                    on_step=progress.step,
                )
            except EngineError:
                if interrupt.exit_code:  # stopped before there was anything to report
                    raise typer.Exit(interrupt.exit_code) from None
                raise
            progress.update(completed=len(prompts))
            pair = _compare_pair(session, recording, interrupt) if with_pair else None
            sensitivity = _sensitivity(session, recording, interrupt) if with_sensitivity else None
    if recording.skipped:
        say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the profile covers the tokens until then.", style="yellow")
    profiled = Profiled(trace=recording.trace, layers=chosen, recording=recording, pair=pair, sensitivity=sensitivity)
    return profiled, interrupt.exit_code


def _sensitivity(session: Session, recording: Recording, interrupt: Interrupt) -> NDArray[np.float64] | None:
    """What an expert budget in each layer changes, on the recorded texts; None, with a note, where it is unknown."""
    from moeedge.engine.layer_sensitivity import measure_sensitivity
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    err = stderr_console()
    found = None
    try:
        with count_bar(err, "measuring budgets", "layers", len(session.model.info.expert_layers)) as bar:
            found = measure_sensitivity(
                session.model,
                recording.conversations,
                gamma=session.info.gamma,
                n_threads=session.info.n_threads,
                cancel=interrupt,
                on_layer=bar.add,
            )
    except EngineError as error:  # the recording is complete
        say(err, error.message, style="yellow")
    if found is None:
        say(err, "The ranking lacks the layers' sensitivity; layers are fitted by their loss alone.", style="yellow")
    return found


def _compare_pair(session: Session, recording: Recording, interrupt: Interrupt) -> PairSimilarity | None:
    """How similar draft and target are on the recorded texts; None, with a note, where they cannot be compared."""
    from moeedge.engine.pair_similarity import MAX_TOKENS, compare_pair
    from moeedge.ui.console import say, stderr_console
    from moeedge.ui.progress import count_bar

    if interrupt() or session.draft_context is None:
        return None
    err = stderr_console()
    n_tokens = min(sum(map(len, recording.conversations)), MAX_TOKENS)
    try:
        with count_bar(err, "comparing draft and target", "tokens", n_tokens) as bar:
            pair, reason = compare_pair(session, recording.conversations, cancel=interrupt, on_tokens=bar.add)
    except EngineError as error:  # the recording is complete
        pair, reason = None, error.message
    if pair is None and not interrupt():
        say(err, f"Draft and target are not compared: {reason.rstrip('.')}.")
    return pair
