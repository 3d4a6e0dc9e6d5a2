"""`moeedge profile`: which experts a model uses, step by step, and how well that can be foreseen."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from moeedge.cli.common import cli_errors
from moeedge.errors import EmptyPromptError, InputError

if TYPE_CHECKING:
    from moeedge.cli.pair import Pair
    from moeedge.engine.types import EngineConfig, SamplingConfig
    from moeedge.profiling.run import Question, Recording

_MODEL = "Model"
_HARDWARE = "Hardware"
_DEFAULT_LIMIT = 8  # prompts


class Output(str, Enum):
    """How the profile is printed."""

    TABLE = "table"
    JSON = "json"


def profile(
    layer: Annotated[
        str | None, typer.Option("--layer", metavar="N", help="The layer to look at, from 0; the last one without it.")
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option("--layers", metavar="LIST|all", help="Several layers, such as 0,5,40-47, or all of them."),
    ] = None,
    prompt: Annotated[str | None, typer.Option("-p", "--prompt", help="Profile the answer to this text.")] = None,
    dataset: Annotated[
        str | None,
        typer.Option(
            "--dataset",
            help="Profile the answers to a prompt set: mtbench, humaneval, gsm8k, mmlu-pro, alpaca, cnndm, qa, or a "
            ".jsonl file. Without it and without -p: moeedge's own sample.",
        ),
    ] = None,
    limit: Annotated[
        int, typer.Option("--limit", help="Prompts of the set, spread over all of it; 0: every one.")
    ] = _DEFAULT_LIMIT,
    offline_sample: Annotated[
        bool,
        typer.Option("--offline-sample", help="Use moeedge's own sample where the prompt set is not on this machine."),
    ] = False,
    n_predict: Annotated[
        int, typer.Option("-n", "--n-predict", help="Tokens per answer at most; -1: until the model stops.")
    ] = 128,
    output: Annotated[
        Output, typer.Option("-o", "--output", help="A table, or JSON: an object for --layer, an array for --layers.")
    ] = Output.TABLE,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE.png", help="Also draw activations and accuracy (png, svg or pdf)."),
    ] = None,
    trace_out: Annotated[
        Path | None,
        typer.Option(
            "--trace-out", metavar="FILE.npz", help="Also write the routing trace of all layers (docs/traces.md)."
        ),
    ] = None,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the prompts as they are, without a chat template.")
    ] = False,
    temp: Annotated[float, typer.Option("--temp", help="Temperature; 0 always takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("-s", "--seed", help="Seed of the sampling; -1: a fresh one.")] = -1,
    model: Annotated[
        Path | None,
        typer.Option("-m", "--model", help="Model file (GGUF); the bundled one without it.", rich_help_panel=_MODEL),
    ] = None,
    model_draft: Annotated[
        str | None,
        typer.Option(
            "-md",
            "--model-draft",
            metavar="FILE|ngram|none",
            help="Where drafts come from: a smaller model with the same vocabulary, n-gram lookup, or nowhere. Without "
            "it the bundled model gets the bundled draft and any other model none.",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    draft_max: Annotated[
        int,
        typer.Option(
            "--draft-max", help="Tokens per draft (gamma); 0 switches speculation off.", rich_help_panel=_MODEL
        ),
    ] = 4,
    ctx_size: Annotated[
        int,
        typer.Option(
            "-c", "--ctx-size", help="Context in tokens; 0: what the model was trained with.", rich_help_panel=_HARDWARE
        ),
    ] = 0,
    threads: Annotated[
        int, typer.Option("-t", "--threads", help="CPU threads; 0: one per physical core.", rich_help_panel=_HARDWARE)
    ] = 0,
    n_gpu_layers: Annotated[
        int,
        typer.Option(
            "-ngl", "--n-gpu-layers", help="Layers that llama.cpp keeps on the GPU.", rich_help_panel=_HARDWARE
        ),
    ] = 0,
    device: Annotated[
        str,
        typer.Option(
            "-dev",
            "--device",
            metavar="auto|none|NAME",
            help="Device to use; moeedge devices lists the names.",
            rich_help_panel=_HARDWARE,
        ),
    ] = "auto",
) -> None:
    """Look inside a model: which experts its tokens use, and how well the next step's experts can be foreseen.

    The profile goes to standard output, everything else to standard error.
    """
    # what follows loads numpy and llama.cpp: not needed for --help
    from moeedge.cli.device import check_device
    from moeedge.cli.pair import resolve_pair
    from moeedge.engine.types import EngineConfig, SamplingConfig
    from moeedge.ui.settings import seed_or_random

    with cli_errors():
        if layer is not None and layers is not None:
            raise InputError("--layer and --layers exclude each other.", "Give one of them.")
        _check_outputs(plot, trace_out)
        check_device(device)
        sampling = SamplingConfig(temperature=temp, seed=seed_or_random(seed))
        pair = resolve_pair(model, model_draft)
        config = EngineConfig(
            model=pair.target,
            draft=pair.draft,
            n_ctx=ctx_size,
            n_threads=threads,
            gamma=draft_max,
            n_gpu_layers=n_gpu_layers,
            device=device,
        )
        questions, source = _questions(prompt, dataset, limit, offline_sample)
        recording, chosen, code = _record(config, pair, layer, layers, questions, source, n_predict, sampling, raw)
        if trace_out is not None:
            recording.trace.save(trace_out)
        _report(recording, chosen, as_json=output is Output.JSON, single=layers is None, plot=plot)
        if code:
            raise typer.Exit(code)


def _check_outputs(plot: Path | None, trace_out: Path | None) -> None:
    """Before the model runs for minutes: can the files be written?"""
    from moeedge.ui.profile_plot import check_plot_path

    if plot is not None:
        check_plot_path(plot)
    for path in (plot, trace_out):
        if path is not None and (path.is_dir() or not path.absolute().parent.is_dir()):
            raise InputError(f"{path} cannot be written.", "Name a file in a folder that exists.")


def _questions(
    prompt: str | None, dataset: str | None, limit: int, offline_sample: bool
) -> tuple[list[Question], dict[str, object]]:
    """What is to be answered, and how the report calls it."""
    from moeedge.data import load_dataset
    from moeedge.profiling.run import Question

    if prompt is not None:
        if dataset is not None:
            raise InputError("-p and --dataset exclude each other.", "Give one of them.")
        if not prompt.strip():
            raise EmptyPromptError("The prompt is empty: -p is blank.", "Give some text to answer.")
        return [Question.single(prompt)], {"dataset": "prompt", "prompts": 1}
    if limit < 0:
        raise ValueError(f"--limit must be >= 0, not {limit}")
    loaded = load_dataset(dataset or "sample", offline_sample=offline_sample).limited(limit or None)
    questions = [
        Question(item.id, tuple([message.as_dict() for message in turn] for turn in item.turns))
        for item in loaded.prompts
    ]
    if not questions:
        raise InputError(f'The prompt set "{loaded.name}" is empty.')
    return questions, {"dataset": loaded.name, "prompts": len(questions), "dataset_sha256": loaded.sha256}


def _record(
    config: EngineConfig,
    pair: Pair,
    layer: str | None,
    layers: str | None,
    questions: list[Question],
    source: dict[str, object],
    n_predict: int,
    sampling: SamplingConfig,
    raw: bool,
) -> tuple[Recording, list[int], int]:
    """Load, check the layers, run. Returns the recording, the layers to report and the exit code of an interruption."""
    from moeedge.engine.session import Session
    from moeedge.profiling.layers import parse_layers
    from moeedge.profiling.run import check_layers, record_routing
    from moeedge.ui.console import stderr_console
    from moeedge.ui.header import header_line, hints
    from moeedge.ui.interrupt import Interrupt
    from moeedge.ui.profile_progress import Progress

    err = stderr_console()
    with Session.open(config) as session:
        n_layers = session.model.info.n_layers
        wanted = layers if layers is not None else layer if layer is not None else str(n_layers - 1)
        chosen = check_layers(session, parse_layers(wanted, n_layers, single=layers is None))
        for line in [header_line(session.info), *hints(session.info, toy=pair.bundled)]:
            err.print(line, style="dim", soft_wrap=True)
        with Interrupt() as interrupt, Progress(len(questions), err) as progress:
            interrupt.arm()
            recording = record_routing(
                session,
                questions,
                n_predict=n_predict,
                sampling=sampling,
                raw=raw,
                source=source,
                cancel=interrupt,
                on_step=progress.step,
            )
        if recording.skipped:
            names = ", ".join(recording.skipped)
            err.print(f"Longer than the context, left out: {names}.", style="yellow", soft_wrap=True)
        if interrupt.exit_code:
            err.print("Stopped: the profile covers what was generated until then.", style="yellow")
        return recording, chosen, interrupt.exit_code


def _report(recording: Recording, layers: list[int], *, as_json: bool, single: bool, plot: Path | None) -> None:
    import json

    from moeedge.profiling.analysis import profile_layers
    from moeedge.profiling.report import layer_report
    from moeedge.ui.console import stdout_console
    from moeedge.ui.profile_plot import draw_profiles
    from moeedge.ui.profile_view import print_profiles

    profiles = profile_layers(recording.trace, layers)
    if as_json:
        reports = [layer_report(one, recording) for one in profiles]
        typer.echo(json.dumps(reports[0] if single else reports, ensure_ascii=False))
    else:
        print_profiles(profiles, stdout_console())
    if plot is not None:
        meta = recording.trace.meta
        draw_profiles(profiles, f"{meta.model}, {meta.parameters.get('dataset', '')}, gamma {meta.gamma}", plot)
