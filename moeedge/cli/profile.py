"""`moeedge profile`: which experts a model uses, step by step, and how well they can be predicted."""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge import paths
from moeedge.cli import options
from moeedge.cli.common import show_log, valid_text
from moeedge.cli.declare import Output, flatten, option
from moeedge.cli.engine_options import EngineOptions, PlacementOptions, layer_notes
from moeedge.data import load_dataset
from moeedge.data.prompts import Prompt, user_turns
from moeedge.engine.types import EngineConfig, SamplingConfig
from moeedge.errors import EmptyPromptError, EngineError, InputError

if TYPE_CHECKING:
    from moeedge.engine.recording import Recording

Layer = Annotated[str | None, option(options.WORK, "--layer N", "Layer to profile, from 0. Default: the last.")]
Layers = Annotated[
    str | None, option(options.WORK, "--layers LIST|all", "Layers to profile, such as 0,5,40-47, or all.")
]


@flatten
def profile(
    layer: Layer = None,
    layers: Layers = None,
    prompt: options.Prompt = None,
    dataset: options.Dataset = None,
    limit: options.Limit = 8,
    offline_sample: options.OfflineSample = False,
    n_predict: options.NPredict = 128,
    raw: options.Raw = False,
    *,
    engine: EngineOptions,
    placement: PlacementOptions,
    temp: options.Temp = 0.0,
    seed: options.Seed = -1,
    plot: options.Plot = None,
    trace_out: options.TraceOut = None,
    save_ranking: options.SaveRanking = None,
    output: options.TextOrJson = Output.TEXT,
    verbose: options.Verbose = False,
) -> None:
    """Show which experts a model's tokens use, and how well the next step's can be predicted.

    The profile goes to standard output, everything else to standard error. JSON is an object for --layer, an array for
    --layers. After Ctrl-C the profile covers the tokens until then.
    """
    engine.limit_openmp_spin()
    from moeedge.ui.chat.settings import seed_or_random
    from moeedge.ui.console import check_output, check_picture

    if layer is not None and layers is not None:
        raise InputError("--layer and --layers exclude each other.", "Give one of them.")
    if n_predict == 0 or n_predict < -1:
        raise ValueError(f"-n must be -1 (until the model stops) or at least 1, not {n_predict}")
    if plot is not None:
        check_picture(plot)
    for path in (trace_out, save_ranking):
        if path is not None:
            check_output(path)
    prompts, source = _prompts(prompt, dataset, limit, offline_sample)
    config = engine.config(placement.config())
    seed_used = seed_or_random(seed)
    if seed_used is None and temp > 0:
        seed_used = secrets.randbits(32)  # one for all answers, so that the report and the trace can name it
    sampling = SamplingConfig(temperature=temp, seed=seed_used)
    if verbose:
        show_log()
    recording, chosen, code = _record(
        config, prompts, source, sampling, n_predict=n_predict, raw=raw, layer=layer, layers=layers
    )
    if trace_out is not None:
        recording.trace.save(trace_out)
    if save_ranking is not None:
        from moeedge.analysis.expert_ranking import rank_experts, write_ranking

        write_ranking(rank_experts(recording.trace), save_ranking)
    _report(recording, chosen, as_json=output is Output.JSON, single=layers is None, plot=plot)
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
    loaded = load_dataset(dataset or "sample", offline_sample=offline_sample).limited(limit or None)
    if not loaded.prompts:
        raise InputError(f'The prompt set "{loaded.name}" is empty.')
    return list(loaded.prompts), {
        "dataset": loaded.name,
        "prompts": len(loaded.prompts),
        "dataset_sha256": loaded.sha256,
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
) -> tuple[Recording, list[int], int]:
    """Answers the prompts: the recording, the layers to report, the exit code (not 0 after an interruption)."""
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
    if recording.skipped:
        say(err, f"Longer than the context, left out: {', '.join(recording.skipped)}.", style="yellow")
    if interrupt.exit_code:
        say(err, "Stopped: the profile covers the tokens until then.", style="yellow")
    return recording, chosen, interrupt.exit_code


def _report(recording: Recording, layers: list[int], *, as_json: bool, single: bool, plot: Path | None) -> None:
    from moeedge.analysis.profile import layer_report, profile_layers
    from moeedge.ui.console import stdout_console
    from moeedge.ui.plots import draw_profiles
    from moeedge.ui.trace_views import print_profiles

    profiles = profile_layers(recording.trace, layers)
    if as_json:
        reports = [layer_report(layer, recording) for layer in profiles]
        typer.echo(json.dumps(reports[0] if single else reports, ensure_ascii=False))
    else:
        print_profiles(profiles, stdout_console())
    if plot is not None:
        meta = recording.trace.meta
        draw_profiles(profiles, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", plot)
